"""Rows of unequal length on a real GPU: padded, packed and nested batches train to what they train to on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainwright import SumLoss, Trainer, batches
from trainwright.data import bucketed, pad, together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
CLOSE = 1e-3
"""Relative, in float32: kernels of the two devices add up in other orders."""


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(8, 16), nn.Linear(16, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        """(rows, classes)."""
        classes: Tensor = self.out(self.gru(packed)[1][0])
        return classes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 3)

    def attended(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(rows, length, 8) -> (rows, length, 16)."""
        q, k, v = (one.unflatten(-1, [2, 8]).contiguous().transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        seen = None if mask is None else mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(-2)


class Nested(Attention):
    def forward(self, x: Tensor) -> Tensor:
        """(rows, classes)."""
        return torch.stack([one.mean(0) for one in self.out(self.attended(x)).unbind()])


class Padded(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(rows, classes)."""
        entries = self.out(self.attended(x, mask)) * mask[..., None]
        classes: Tensor = entries.sum(1) / mask.sum(1, keepdim=True)
        return classes


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().cpu().flatten() for one in model.parameters()])


def trained(kind: type[nn.Module], collate: Any, *, device: str) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200,), generator=drawn).tolist()
    rows = [(torch.randn(n, 8, generator=drawn), n % 3) for n in lengths]
    torch.manual_seed(1)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), accumulate=2, device=device, console=False)
    data = bucketed(rows, tokens=600, lengths=lengths, shuffle=True, seed=1, collate=collate)
    trainer.fit(data, data, epochs=2)
    return weights(model)


def packed(rows: list[Any]) -> Any:
    return pack_sequence([row for row, _ in rows], enforce_sorted=False), torch.tensor([target for _, target in rows])


def nested(rows: list[Any]) -> Any:
    sequences = torch.nested.nested_tensor([row for row, _ in rows], layout=torch.jagged)
    return sequences, torch.tensor([target for _, target in rows])


CASES = [(Padded, pad()), (Padded, pad(multiple=8)), (Packed, packed), (Nested, nested)]


@pytest.mark.parametrize(("kind", "collate"), CASES, ids=["padded", "in eights", "packed", "nested"])
def test_batches_of_unequal_rows_train_as_on_the_cpu(kind: type[nn.Module], collate: Any) -> None:
    ours, theirs = (trained(kind, collate, device=device) for device in ("cuda", "cpu"))
    assert (ours - theirs).norm() <= CLOSE * theirs.norm()


class Both(Trainer[nn.Module]):
    def training_step(self, batch: Any) -> Any:
        a, b = (self.model(one).square().sum() for one in batch.values())
        return SumLoss(a + b, sum(map(len, batch.values())))


def test_batches_read_together_are_moved_together() -> None:
    found = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        drawn = torch.Generator().manual_seed(0)
        a, b = (batches(torch.randn(n, 4, generator=drawn), 8, shuffle=True, seed=n) for n in (40, 24))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        Both(model, optimizer, device=device, console=False).fit(together(a=a, b=b), epochs=3)
        found.append(weights(model))
    assert (found[0] - found[1]).norm() <= CLOSE * found[1].norm()


def test_varlen_attention_takes_what_nested_rows_hold() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="it comes with torch 2.10")
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 64, generator=drawn).bfloat16() for n in (3, 9, 1, 5)]
    held = torch.nested.nested_tensor(rows, layout=torch.jagged).cuda()
    heads, offsets = held.values().unflatten(-1, [2, 32]), held.offsets().int()
    ours = varlen.varlen_attn(heads, heads, heads, offsets, offsets, 9, 9)
    each = [row.float().unflatten(-1, [2, 32]).transpose(0, 1) for row in rows]
    theirs = torch.cat([F.scaled_dot_product_attention(one, one, one).transpose(0, 1) for one in each])
    assert (ours.float().cpu() - theirs).abs().max() <= 0.03
