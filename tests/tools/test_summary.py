"""A summary is exact by the arithmetic of layers, counts what is shared once, and leaves no trace."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from trainwright import SettingError, Trainer, batches, summary
from trainwright.modules import checkpoint_activations, count_flops

ROWS = 10


class Shared(nn.Module):
    """A block that is called twice, a frozen layer, one that is never called, and a list without a forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8).requires_grad_(False)
        block = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.blocks = nn.ModuleList([block, block, nn.BatchNorm1d(8)])
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_each_module_is_a_row_with_all_that_is_inside_it() -> None:
    model = Shared()
    found = summary(model, torch.randn(ROWS, 8))
    one = 2 * ROWS * 8 * 32
    block = found["blocks.0"]
    assert (block.kind, block.depth, block.calls, block.outputs) == ("Sequential", 2, 2, ((ROWS, 8),))
    assert block.parameters == block.trained == 8 * 32 + 32 + 32 * 8 + 8
    assert block.flops == 4 * one
    assert found["blocks.0.0"].flops == 2 * one
    assert found["blocks.0.1"].kept == 2 * ROWS * 32 * 4  # a tanh keeps its result
    assert found["blocks.0.2"].kept == 2 * ROWS * 8 * 4  # its results are inputs of the next ones
    assert found["blocks.2"].kept == 2 * 8 * 4  # means and deviations of the batch
    assert (found["blocks"].calls, found["blocks"].flops) == (0, 4 * one)
    assert found["blocks"].kept == block.kept + found["blocks.2"].kept
    assert (found["first"].parameters, found["first"].trained) == (72, 0)
    assert (found["spare"].calls, found["spare"].flops, found["spare"].outputs) == (0, 0, ())
    whole = found[""]
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    assert whole.buffers == 8 + 8 + 1
    assert found.weights == 4 * whole.parameters
    assert found.buffers == 4 * 16 + 8
    assert whole.kept == found.total.kept == found["blocks"].kept + ROWS * 8 * 4  # and what comes out of the first
    assert whole.flops == count_flops(model, torch.randn(ROWS, 8), backward=False)
    assert found.total.flops == count_flops(model, torch.randn(ROWS, 8))
    assert [layer.name for layer in found.layers] == [name for name, _ in model.named_modules()]


def test_a_summary_is_data_and_a_table() -> None:
    found = summary(Shared(), torch.randn(ROWS, 8))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["layers"][0]["flops"] == found[""].flops
    assert data["total"]["kept"] == found.total.kept
    text = str(found)
    assert "0 (Sequential)" in text and "10x8 x 2 calls" in text
    assert "spare (Linear)" in text and "not called" in text
    assert f"{found[''].parameters:,} parameters · 72 frozen" in text
    assert "blocks (ModuleList)" in found.table(1) and "Tanh" not in found.table(1)
    with pytest.raises(KeyError):
        _ = found["nobody"]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, image, text=None, *, labels=None):
        output = self.body(image if text is None else image + text)
        return {"output": output} if labels is None else (output, labels)


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (X, ((3, 4),)),
        ((X, torch.zeros(3)), ((3, 4),)),
        ([X, X, torch.zeros(3)], ((3, 4),)),
        ({"image": X, "text": X}, ((3, 4),)),
        ({"image": X, "labels": torch.zeros(3)}, ((3, 4),)),
        ({"image": X, "target": torch.zeros(3)}, ((3, 4),)),
    ],
)
def test_the_model_is_called_as_a_trainer_calls_it(batch, shapes) -> None:
    assert summary(Two(), batch)[""].outputs == shapes


def test_a_whole_batch_is_given_where_the_model_takes_nothing_less() -> None:
    class Both(nn.Module):
        def forward(self, image, text):
            return image @ text.T

    assert summary(Both(), (X, X))[""].flops == 2 * 3 * 3 * 4
    with pytest.raises(SettingError, match=r"Both\.forward\(image, text\)"):
        summary(Both(), {"pixels": X})
    found = summary(Both(), {"pixels": X}, call=lambda model, batch: model(batch["pixels"], batch["pixels"]))
    assert found[""].flops == 2 * 3 * 3 * 4


class Needs(nn.Module):
    """Reads numbers, moves its buffer, draws, and writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x += 1
        return self.layers(x) * (2 if x.sum().item() > 0 else 1)


def test_what_does_not_run_on_meta_runs_where_the_model_lies_and_says_so() -> None:
    model, x = Needs(), torch.randn(6, 4)
    model(x.clone()).sum().backward()
    model.layers[2].eval()
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()], x, torch.get_rng_state()))
    found = summary(model, x)
    assert "item()" in found.note and "measured on the model's own device" in str(found)
    assert found[""].flops == 2 * 6 * 4 * 4
    after = (model.state_dict(), [p.grad for p in model.parameters()], x, torch.get_rng_state())
    for one, other in zip(before[0].items(), after[0].items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert all(torch.equal(one, other) for one, other in zip(before[1], after[1], strict=True))
    assert torch.equal(before[2], after[2]) and torch.equal(before[3], after[3])
    assert (model.calls, model.training, model.layers[2].training) == (1, True, False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_on_the_device_memory_is_the_devices_own() -> None:
    model, x = nn.LSTM(8, 16, batch_first=True), torch.randn(4, 5, 8)
    shapes, real = summary(model, x), summary(model, x, on="device")
    assert real.note == 'on="device"' and not shapes.note
    assert real[""].flops == shapes[""].flops > 0  # its kernel on the CPU has no formula: meta counts its products
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    there = {one.untyped_storage()._cdata for one in (x, *model.parameters())}
    assert real.total.kept == sum(one.nbytes() for key, one in saved.items() if key not in there)


def test_under_autocast_it_is_what_autocast_makes() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(ROWS, 8)
    plain = summary(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        half = summary(model, x)
    assert "autocast" in half.note
    assert half["1"].kept == plain["1"].kept // 2


def test_recomputed_blocks_keep_less_and_count_their_forward_once() -> None:
    model, x = Shared(), torch.randn(ROWS, 8)
    plain = summary(model, x)
    with checkpoint_activations(model, nn.Sequential):
        less = summary(model, x)
    assert less["blocks.0"].kept == 2 * ROWS * 8 * 4  # what goes from one to the next
    assert less[""].flops == plain[""].flops
    assert less["blocks.0"].calls == 2
    assert less.total.flops > plain.total.flops


def test_what_is_made_on_no_device_in_a_forward_is_made_on_meta() -> None:
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 4)

        def forward(self, x):
            return self.table(torch.arange(x.shape[1])) + x

    found = summary(Positions(), torch.randn(2, 5, 4))
    assert not found.note and not found["table"].uncounted


def test_operations_that_torch_has_no_formula_for_are_said() -> None:
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (x[:, :, None] * self.weight).sum(1)

    found = summary(Odd(), X)
    assert found[""].uncounted and "no formula" in str(found)


def test_what_cannot_be_summarized_is_refused() -> None:
    with pytest.raises(SettingError, match="has no shape yet"):
        summary(nn.LazyLinear(3), X)
    with pytest.raises(SettingError, match='"meta" or "device"'):
        summary(nn.Linear(4, 4), X, on="cuda")
    with pytest.raises(TypeError, match="summary"):
        summary("model", X)


def test_a_trainer_and_a_loader_get_the_line_to_write_instead():
    model = nn.Linear(3, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    data = batches((torch.randn(9, 3), torch.randint(2, (9,))), 4)
    with pytest.raises(TypeError, match=r"summary\(trainer.model, batch\)"):
        summary(trainer, data)
    with pytest.raises(TypeError, match=r"summary\(model, next\(iter\(data\)\)\)"):
        summary(model, data)
    with pytest.raises(TypeError, match=r"summary\(model, torch.randn\(8, 3\)\)"):
        summary(model, (9, 3))
    assert summary(model, next(iter(data))).layers[0].parameters == 8
