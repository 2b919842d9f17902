"""Rows of unequal length: the same numbers padded, packed and nested."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainwright import Trainer
from trainwright.data import bucketed, pad

from .world_runs import flat

EXAMPLE = Path(__file__).parents[2] / "examples" / "variable_length.py"
found = importlib.util.spec_from_file_location("variable_length", EXAMPLE)
assert found is not None and found.loader is not None
example = importlib.util.module_from_spec(found)
found.loader.exec_module(example)
EXACT = 1e-12


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


# The same rows padded, packed, nested.


def sequences() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(4)
    return [torch.randn(n, 8, generator=drawn, dtype=torch.float64) for n in (5, 1, 7, 3)]


class Attention(nn.Module):
    """One layer of self-attention with two heads, and a mean over the entries of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv, self.out = nn.Linear(8, 24).double(), nn.Linear(8, 3).double()

    def attended(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(rows, length, 8) -> the same; padding is masked, nested rows need no mask."""
        q, k, v = (
            one.unflatten(-1, [2, 4]).contiguous().transpose(1, 2)  # the kernels want heads that lie so
            for one in self.qkv(x).chunk(3, -1)
        )
        seen = None if mask is None else mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return attended.transpose(1, 2).flatten(-2)

    def padded(self, x: Tensor, mask: Tensor) -> Tensor:
        """The classes of each row."""
        entries = self.out(self.attended(x, mask)) * mask[..., None]
        return entries.sum(1) / mask.sum(1, keepdim=True)

    def nested(self, x: Tensor) -> Tensor:
        """The classes of each row."""
        entries: Tensor = self.out(self.attended(x))
        return torch.stack([one.mean(0) for one in entries.unbind()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_attention_is_padded_and_masked_attention_forward_and_backward() -> None:
    twins = Attention(), Attention()
    nested = torch.nested.nested_tensor(sequences(), layout=torch.jagged)
    outputs = twins[0].padded(*pad()(sequences())), twins[1].nested(nested)
    assert (outputs[0] - outputs[1]).abs().max() <= EXACT
    for output in outputs:
        output.square().sum().backward()
    for ours, theirs in zip(*(twin.parameters() for twin in twins), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() <= EXACT
        assert ours.grad.abs().max() > 0


def test_a_packed_gru_sees_each_row_as_alone() -> None:
    torch.manual_seed(2)
    gru = nn.GRU(8, 4, batch_first=True).double()
    alone = torch.stack([gru(one[None])[1][0, 0] for one in sequences()])
    alone.square().sum().backward()
    grads = [one.grad.clone() for one in gru.parameters() if one.grad is not None]
    gru.zero_grad()
    last = gru(pack_sequence(sequences(), enforce_sorted=False))[1][0]
    assert (last - alone).abs().max() <= EXACT
    last.square().sum().backward()
    for ours, theirs in zip(gru.parameters(), grads, strict=True):
        assert ours.grad is not None
        assert (ours.grad - theirs).abs().max() <= EXACT


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.gru, self.out = nn.GRU(8, 4).double(), nn.Linear(4, 3).double()

    def forward(self, packed: PackedSequence) -> Tensor:
        """(rows, classes)."""
        classes: Tensor = self.out(self.gru(packed)[1][0])
        return classes


class Nested(Attention):
    def forward(self, x: Tensor) -> Tensor:
        """(rows, classes)."""
        return self.nested(x)


WITHOUT_PADDING = [(Packed, example.packed), (Nested, example.nested)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("model", "collate"), WITHOUT_PADDING, ids=["packed", "nested"])
def test_packed_and_nested_batches_train_by_the_default_step(model: Any, collate: Any) -> None:
    data = [(one, index % 3) for index, one in enumerate(sequences() * 3)]
    twins = model(), model()
    trainer = Trainer(twins[0], sgd(twins[0]), nn.CrossEntropyLoss(), accumulate=2, console=False)
    trainer.fit(bucketed(data, 5, lengths=lambda row: len(row[0]), collate=collate), epochs=3)
    optimizer = sgd(twins[1])
    order = bucketed(data, 5, lengths=lambda row: len(row[0])).order()
    for _ in range(3):
        for window in (order[0] + order[1], order[2]):
            inputs, target = collate([data[row] for row in window])
            optimizer.zero_grad()
            F.cross_entropy(twins[1](inputs), target).backward()
            optimizer.step()
    differences = [abs(a - b) for a, b in zip(flat(twins[0]), flat(twins[1]), strict=True)]
    assert max(differences) <= EXACT
