"""Operations counted on the meta device: exact by the arithmetic of layers, and nothing of the model is moved."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.modules import count_flops
from trainwright.modules.flops import peak_of


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


def test_an_mlp_needs_two_operations_for_each_weight_and_row() -> None:
    forward = [2 * 7 * 6 * 5, 2 * 7 * 5 * 3]  # 2 * M * N * K
    assert count_flops(mlp(), torch.randn(7, 6), backward=False) == sum(forward)
    # The backward of a layer has two such products; the inputs of the first one need no gradient.
    assert count_flops(mlp(), torch.randn(7, 6)) == 2 * forward[0] + 3 * forward[1]


def test_a_convolution_is_the_product_of_its_windows_and_its_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    first, second = 2 * (2 * 10 * 10) * 8 * (3 * 9), 2 * (2 * 8 * 8) * 4 * (8 * 9)
    images = torch.randn(2, 3, 10, 10)
    assert count_flops(model, images, backward=False) == first + second
    assert count_flops(model, images) == 2 * first + 3 * second


def test_a_layer_that_is_not_trained_has_no_backward_of_its_weights() -> None:
    model = mlp()
    model[3].requires_grad_(False)
    first, second = 2 * 7 * 6 * 5, 2 * 7 * 5 * 3
    assert count_flops(model, torch.randn(7, 6)) == 2 * first + 2 * second
    assert count_flops(model.requires_grad_(False), torch.randn(7, 6)) == first + second


def test_outputs_of_any_form_and_keywords_are_counted() -> None:
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 2, bias=False), nn.Linear(4, 3, bias=False)

        def forward(self, x, *, scale):
            return {"one": [self.one(x) * scale], "other": (self.other(x), None)}

    assert count_flops(Two(), torch.randn(5, 4), scale=torch.ones(())) == 2 * (2 * 5 * 4 * 2 + 2 * 5 * 4 * 3)


def test_counting_leaves_no_trace() -> None:
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += 1
            self.seen.append(x)
            return self.layers(x + torch.rand(1).to(x.device) * random.random() * np.random.rand())

    torch.manual_seed(0)
    model, called = Noisy(), []
    model.layers[0].register_forward_hook(lambda *_: called.append(1))
    model.layers[3].eval()
    model(torch.randn(4, 6)).sum().backward()
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()]))
    modes = [module.training for module in model.modules()]
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    called.clear()
    assert count_flops(model, torch.randn(4, 6, generator=torch.Generator())) > 0
    after = (model.state_dict(), [p.grad for p in model.parameters()])
    assert all(torch.equal(one, after[0][name]) for name, one in before[0].items())
    assert all(torch.equal(one, other) for one, other in zip(before[1], after[1], strict=True))
    assert modes == [module.training for module in model.modules()]
    assert (model.calls, len(model.seen), called) == (1, 1, [])
    assert draws[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(draws[2], torch.get_rng_state())


def test_the_copy_holds_no_numbers_and_no_hook() -> None:
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.kept = torch.ones(8)

        def forward(self, x):
            assert self.weight.is_meta and self.kept.is_meta and not self._forward_hooks
            return x @ self.weight + self.kept

    model = Big()
    model.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    assert count_flops(model, torch.randn(2, 8)) == 2 * (2 * 2 * 8 * 8)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name, peak) -> None:
    assert peak_of(name) == peak
