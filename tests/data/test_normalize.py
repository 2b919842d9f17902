"""The layer that normalizes images: the bits of torchvision's two steps, in the dtype of the layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import DataError, SettingError, Trainer, batches, load_weights
from trainwright.data import Normalize

MEAN, STD = (0.5, 0.4), (0.2, 0.3)


def images(rows=20, *, height=5, width=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, 2, height, width), dtype=torch.uint8, generator=generator)


def normalized(given, dtype=torch.float32):
    mean, std = (torch.tensor(one).to(dtype).reshape(-1, 1, 1) for one in (MEAN, STD))
    scaled = given.to(dtype).div(255) if given.dtype is torch.uint8 else given.to(dtype)
    return scaled.sub(mean).div(std)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float32])
def test_the_output_has_the_bits_of_torchvisions_two_steps_and_the_input_is_unchanged(dtype, form):
    given = (images() if dtype is torch.uint8 else images().to(dtype) / 255).contiguous(memory_format=form)
    kept, layer = given.clone(), Normalize(MEAN, STD)
    for _unused in range(2):
        made = layer(given)
        assert torch.equal(made, normalized(given)) and torch.equal(given, kept)
        assert made.dtype == torch.float32 and made.is_contiguous(memory_format=form)


def test_a_layer_in_double_normalizes_in_double():
    assert torch.equal(Normalize(MEAN, STD).double()(images()), normalized(images(), torch.float64))


def network():
    torch.manual_seed(0)
    return nn.Sequential(Normalize(MEAN, STD), nn.Flatten(), nn.Linear(70, 3))


def test_a_run_on_bytes_is_the_run_on_normalized_images_and_its_weights_hold_the_numbers(tmp_path):
    weights = []
    for model, given in ((network(), images()), (network()[1:], normalized(images()))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False)
        data = batches((given, torch.arange(20) % 3), 6, shuffle=True, seed=1)
        trainer.fit(data, data, epochs=2)
        trainer.save_weights(tmp_path / f"{len(weights)}.safetensors")
        weights.append(model[-1].weight)
    assert torch.equal(*weights)
    other = network()
    other[0].mean.zero_()
    load_weights(tmp_path / "0.safetensors", other)
    assert torch.equal(other[0].mean, Normalize(MEAN, STD).mean)


@pytest.mark.parametrize("given", [(0.5, 0.2), ((0.5,), (0.2, 0.2)), ((0.5,), (0.0,)), ((), ()), ("a", "b")])
def test_numbers_that_normalize_nothing_are_refused_when_they_are_given(given):
    with pytest.raises(SettingError):
        Normalize(*given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (images()[:, :1], "of 2 channels"),
        (images()[:, 0], r"of 2 channels(.|\n)*x\[:, None\]"),
        (torch.zeros(4, 2), "of 2 channels"),
        (images().long(), "uint8, or floating point"),
    ],
)
def test_other_inputs_than_such_images_are_refused(given, said):
    with pytest.raises(DataError, match=said):
        Normalize(MEAN, STD)(given)
