"""Recomputed blocks give the gradients of kept ones to the last bit, move each number once, and keep less memory."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from trainwright import SettingError, StepError, summary
from trainwright.modules import activations, checkpoint_activations, count_flops


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.norm = nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width)
        self.drop, self.down = nn.Dropout(0.3), spectral_norm(nn.Linear(4 * width, width))
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.draws = 0, True

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        self.seen += x.detach().mean()
        inside = self.drop(torch.relu(self.norm(self.up(x))))
        if self.draws:
            inside = inside * (random.random() + float(np.random.rand()))
        return x + self.down(inside) * scale * (1 + self.seen) * self.calls


class Net(nn.Module):
    def __init__(self, width=8, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=x.mean())
        return self.head(x)


def trained(model, x, *, autocast=False, passes=2):
    """Gradients of some passes, all buffers and counters, and where the random draws stand."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in range(passes):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            output = model(x)
        output.float().square().mean().backward()
    moved = [one.clone() for one in (*(p.grad for p in model.parameters()), *model.buffers())]
    draws = [torch.tensor([random.random(), np.random.rand()]), torch.rand(1)]
    return [*moved, *draws, torch.tensor([block.calls for block in model.blocks])]


def pair(dtype=torch.float64):
    torch.manual_seed(0)
    model = Net().to(dtype)
    other = copy.deepcopy(model)
    return model, other, checkpoint_activations(other, {Block}), torch.randn(16, 8, dtype=dtype)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_buffers_counters_and_draws_are_those_of_plain_blocks(dtype) -> None:
    plain, recomputed, _, x = pair(dtype)
    assert equal(trained(plain, x), trained(recomputed, x))


def test_under_autocast_too() -> None:
    plain, recomputed, _, x = pair(torch.float32)
    assert equal(trained(plain, x, autocast=True), trained(recomputed, x, autocast=True))


def test_running_statistics_move_once_where_torch_alone_moves_them_twice() -> None:
    norm, x = nn.BatchNorm1d(8), torch.randn(16, 8)
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 2
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1))
    with checkpoint_activations(model, nn.Sequential):
        model(x).sum().backward()
    assert model[0][1].num_batches_tracked == 1


def test_the_modes_of_the_forward_count_not_those_of_the_backward() -> None:
    plain, recomputed, _, x = pair()
    found = []
    for model in (plain, recomputed):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        output = model(x)
        model.eval()
        output.square().sum().backward()
        assert not model.blocks[0].training
        found.append([p.grad for p in model.parameters()])
    assert equal(*found)


def test_a_weight_that_has_changed_before_its_backward_is_an_error_and_not_another_gradient() -> None:
    _, model, _, x = pair()
    output = model(x)
    with torch.no_grad():
        model.blocks[2].up.weight.add_(1)
    with pytest.raises(StepError, match=r"up\.weight of a recomputed Block has changed between its forward"):
        output.sum().backward()


def test_an_input_that_has_changed_is_an_error_of_torchs() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    checkpoint_activations(model, nn.Sequential)
    x = torch.randn(4, 8, requires_grad=True) * 1
    output = model(x)
    x.data.add_(0)  # data is not watched
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_backward_may_be_repeated_and_be_differentiated() -> None:
    plain, recomputed, _, x = pair()
    found = []
    for model in (plain, recomputed):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        loss = model(x).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters()))
        found.append([*first, *second, *model.buffers()])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(*found, strict=True))


def test_passes_without_gradients_run_as_before(monkeypatch) -> None:
    _, model, _, x = pair()
    monkeypatch.setattr(activations, "_FirstForward", lambda *_: pytest.fail("something was prepared for a backward"))
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model.eval()(x)


def test_names_stay_and_copies_and_pickles_recompute_for_themselves() -> None:
    plain, model, saved, x = pair()
    assert list(plain.state_dict()) == list(model.state_dict())
    other = copy.deepcopy(model)
    assert vars(other.blocks[0])["forward"].__self__.module is other.blocks[0]
    assert equal(trained(other, x), trained(plain, x))
    deep = Deep()
    checkpoint_activations(deep.layers, nn.Sequential)
    other = pickle.loads(pickle.dumps(deep))
    assert vars(other.layers[1])["forward"].__self__.module is other.layers[1]
    assert equal([other(x.float())], [deep(x.float())])
    saved.remove()
    saved.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    assert saved.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert str(saved) == "recomputes 4 Block"


def test_a_forward_that_an_instance_has_of_its_own_is_kept() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1))
    own = model[0].forward = lambda x: x * 2
    with checkpoint_activations(model, nn.Sequential):
        assert torch.equal(model[0](torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert model[0].forward is own


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (None, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ({Block}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ([Block, nn.BatchNorm1d], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ({nn.BatchNorm1d}, ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "blocks.3.norm"]),
    ],
)
def test_blocks_are_found_by_class(blocks, names) -> None:
    assert list(checkpoint_activations(Net(), blocks).names) == names


def test_some_blocks_alone_are_those_of_a_part_of_the_model() -> None:
    model = Net()
    assert checkpoint_activations(model.blocks[1:3], Block).names == ("0", "1")
    assert ["forward" in vars(block) for block in model.blocks] == [False, True, True, False]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: checkpoint_activations(Net(), {nn.GRU}), r"GRU means no module in Net"),
        (lambda: checkpoint_activations(Net(), {Net}), r"class of the model itself"),
        (lambda: checkpoint_activations(Net(), "blocks.*"), r"a class of modules, or several"),
        (lambda: checkpoint_activations(Net(), nn.ModuleList), r"blocks \(ModuleList\) has no forward of its own"),
        (lambda: checkpoint_activations(Net(), Net().blocks[0]), r"blocks=\{Block\}"),
        (lambda: checkpoint_activations(Net(), []), r"a class of modules, or several"),
        (lambda: checkpoint_activations(nn.Linear(2, 2)), r"repeats no class"),
        (lambda: checkpoint_activations(pair()[1], Block), r"activations: blocks\.0 is recomputed already"),
        (lambda: checkpoint_activations(pair()[1], nn.Linear), r"is recomputed already"),
        (lambda: checkpoint_activations(torch.compile(Net()), Block), r"before torch\.compile"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_what_cannot_be_meant_is_refused(call, said) -> None:
    with pytest.raises(SettingError, match=said):
        call()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_compiled_blocks_recompute_and_move_their_buffers_once() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)))
    x, found = torch.randn(16, 8), []
    for recomputed in (False, True):
        model = copy.deepcopy(plain)
        if recomputed:
            checkpoint_activations(model, nn.Sequential)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x).square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert equal(*found)
    assert model[0][1].num_batches_tracked == 1


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).sum()


def test_the_memory_that_recomputing_saves_is_counted_to_the_byte() -> None:
    model, x = Deep(), torch.randn(200, 8)
    row = 200 * 4
    inputs = 2 * 8 * row  # of the second and third block; the first one's is the batch
    plain = summary(model, x).total
    with checkpoint_activations(model.layers, nn.Sequential):
        recomputed = summary(model, x).total
    assert (plain.kept, recomputed.kept) == (3 * 64 * row + inputs, inputs)
    assert recomputed.peak < plain.peak
    forward = 2 * 200 * 8 * 64 * 6
    assert plain.flops == 3 * forward - 2 * 200 * 8 * 64  # the batch itself needs no gradient
    assert recomputed.flops == plain.flops + forward // 2  # the last product of a block is not needed


def test_operations_of_the_model_are_counted_once() -> None:
    model, x = Deep(), torch.randn(10, 8)
    plain = count_flops(model, x)
    with checkpoint_activations(model.layers, nn.Sequential):
        assert count_flops(model, x) == plain
