"""Rows of unequal length: tokens as counts, and the same numbers padded, packed, nested, bucketed or one by one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from distributed.pool import pool
from trainwright import Checkpoint, MeanLoss, SumLoss, Trainer, Updates
from trainwright.data import bucketed, pad

from .world_runs import apart, flat

EXAMPLE = Path(__file__).parents[2] / "examples" / "variable_length.py"
found = importlib.util.spec_from_file_location("variable_length", EXAMPLE)
assert found is not None and found.loader is not None
example = importlib.util.module_from_spec(found)
found.loader.exec_module(example)
EXACT = 1e-12
EPOCHS = 8
IGNORED = -100


def rows(number: int = 41) -> list[tuple[Tensor, Tensor]]:
    """Tokens and a target for each; in some rows most are left out, in some all."""
    drawn = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (number,), generator=drawn).tolist()
    given = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(0, 7, (length,), generator=drawn)
        target = torch.randint(0, 7, (length,), generator=drawn)
        target[torch.rand(length, generator=drawn) < 0.3] = IGNORED
        if index % 9 == 4:
            target[:] = IGNORED
        given.append((tokens, target))
    return given


class Tagger(nn.Module):
    """A class for each token, from it and its neighbours within the row: padding must not be seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.mix, self.out = nn.Embedding(7, 6), nn.Conv1d(6, 6, 3, padding=1), nn.Linear(6, 7)
        self.double()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(rows, width) -> (rows, width, classes)."""
        x = self.embed(tokens).transpose(1, 2) * mask[:, None]
        logits: Tensor = self.out(torch.tanh(self.mix(x)).transpose(1, 2))
        return logits


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    tokens, mask, target = batch
    loss = F.cross_entropy(model(tokens, mask).flatten(0, 1), target.flatten(), reduction="sum")
    return loss, int((target != IGNORED).sum())


class Sums(Trainer[Tagger]):
    """The sum over tokens, and how many there are."""

    def training_step(self, batch: Any) -> Any:
        return SumLoss(*summed(self.model, batch))


class Means(Trainer[Tagger]):
    """The mean over tokens, and how many there are; over none it is 0."""

    def training_step(self, batch: Any) -> Any:
        loss, tokens = summed(self.model, batch)
        return MeanLoss(loss / max(tokens, 1), tokens)


class Default(Trainer[Tagger]):
    """The default step: the loss tells itself how many targets it is a mean over."""

    def split(self, batch: Any) -> Any:
        *inputs, target = batch
        return tuple(inputs), target


class Flat(nn.Module):
    """Cross entropy of (rows, width, classes), a mean over the targets that count."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(output.flatten(0, 1), target.flatten())
        return loss


STEPS: dict[str, type[Trainer[Tagger]]] = {"sum": Sums, "mean": Means, "default": Default}


def given(**how: Any) -> Any:
    data = rows()
    how = {"tokens": 48, "shuffle": True, "seed": 2, **how}
    return bucketed(data, lengths=[len(one) for one, _ in data], collate=pad(), **how)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def by_hand(order: Iterable[Iterable[list[int]]], accumulate: int) -> dict[str, Any]:
    """Every window as one batch of all its rows, padded to the longest of all: the mean over its tokens."""
    model, data = Tagger(), rows()
    optimizer, collate = sgd(model), pad()
    for epoch in order:
        micro = list(epoch)
        for start in range(0, len(micro), accumulate):
            window = [data[row] for batch in micro[start : start + accumulate] for row in batch]
            optimizer.zero_grad()
            loss, tokens = summed(model, collate(window))
            (loss / max(tokens, 1)).backward()
            optimizer.step()
    return {"weights": flat(model), "history": []}


def by_trainer(step: str, accumulate: int) -> dict[str, Any]:
    """The same in batches of neighbouring lengths, on as many processes as there are."""
    model, loss = Tagger(), Flat() if step == "default" else None
    trainer = STEPS[step](model, sgd(model), loss, accumulate=accumulate, console=False)
    result = trainer.fit(given(), given(shuffle=False), epochs=EPOCHS)
    return {"weights": flat(model), "history": result.history}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_window_counts_tokens_however_many_each_batch_has(step: str, accumulate: int) -> None:
    order = [given().order(epoch) for epoch in range(EPOCHS)]
    assert len({len(batch) for batch in order[0]}) > 2, "batches of unequal rows"
    outcome = by_trainer(step, accumulate)
    assert apart({**outcome, "history": []}, by_hand(order, accumulate)) <= EXACT


def test_the_loss_of_an_evaluation_is_the_mean_over_all_tokens() -> None:
    model = Tagger()
    loss, tokens = summed(model, pad()(rows()))
    numbers = Sums(model, sgd(model), console=False).evaluate(given())
    assert numbers["val_loss"] == pytest.approx(loss.item() / tokens, abs=EXACT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", ["sum", "default"])
def test_processes_give_what_one_gives(step: str, size: int) -> None:
    alone = by_trainer(step, 2)
    for outcome in pool(size).run(by_trainer, step, 2):
        assert apart(outcome, alone) <= EXACT


class Stopping(Sums):
    """Ends after an update."""

    at = 0

    def after_update(self) -> None:
        if self.progress.updates == self.at:
            self.stop("cut")


def trained(directory: Path, *, at: int = 0, resume: str | None = None) -> list[float]:
    model = Tagger()
    torch.manual_seed(99 if resume else 8)  # a new process draws anew
    slot = Checkpoint(directory, every=Updates(1), keep=1)
    trainer = Stopping(model, sgd(model), accumulate=2, checkpoint=slot, console=False)
    trainer.at = at
    trainer.fit(given(seed=None), epochs=2, resume=resume)
    return flat(model)


@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path: Path, at: int) -> None:
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "cut", at=at)
    assert trained(tmp_path / "cut", resume="auto") == whole


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
