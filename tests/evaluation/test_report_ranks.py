"""Reports of several processes: one on all rows, in data-set order, the same on every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import RankFailed, pool
from trainwright import StepOutput, Trainer, batches
from trainwright.evaluation.reports import Report

SIZES = (1, 7, 51, 64)
BATCH = 16


def classes(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    target = torch.randint(0, 3, (n,), generator=generator)
    target[n // 2] = -100 if n > 1 else target[n // 2]
    return torch.randn(n, 5, generator=generator, dtype=torch.float64), target


def values(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = classes(n)
    return x, x[:, :2] * 3 + x[:, 2:4].square()


def model(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, outputs).double()


def reported(kind: str, n: int) -> Report:
    if kind == "classes":
        return Trainer(model(3), None, nn.CrossEntropyLoss(), console=False).report(batches(classes(n), BATCH))
    return Trainer(model(2), None, nn.MSELoss(), console=False).report(batches(values(n), BATCH), kind="values")


def reported_all(kind: str) -> list[Report]:
    return [reported(kind, n) for n in SIZES]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    return [number for inner in value for number in numbers(inner)] if isinstance(value, list) else [float(value)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_every_process_has_the_report_of_one(ranks: int, kind: str) -> None:
    answers = pool(ranks).run(reported_all, kind)
    for index, n in enumerate(SIZES):
        wanted = reported(kind, n)
        for answer in answers:
            found = answer[index]
            assert found.names == wanted.names and found.kind == wanted.kind
            assert torch.equal(found.target, wanted.target)
            assert torch.allclose(found.output, wanted.output, rtol=1e-12, atol=1e-12)
            assert found.text == wanted.text
            assert found.to_dict().keys() == wanted.to_dict().keys()
            assert numbers(found.to_dict()) == pytest.approx(numbers(wanted.to_dict()), rel=1e-12, nan_ok=True)


class Splitting(Trainer[nn.Module]):
    """Has a split and steps of its own, and outputs that are as long as their longest row."""

    def predict_step(self, batch: Any) -> Any:
        (x,), target = self.split(batch)
        longest = int(target.max()) + 1
        return StepOutput(None, self.model(x)[:, :1].expand(-1, longest), target[:, None].expand(-1, longest))


def ragged() -> Report:
    x, target = classes(7)
    target = torch.arange(7)
    return Splitting(model(3), None, None, console=False).report(batches((x, target), 4), kind="values")


def test_batches_that_do_not_join_are_reported_on_slice_by_slice() -> None:
    """Slices of batches of four rows end at rows 2, 4, 6 (or 5) and 7."""
    first, second = pool(2).run(ragged)
    assert [tuple(one.shape) for one in first.target] == [(2, 2), (2, 4), (1, 5), (2, 7)]
    assert str(first) == str(second)
    assert first.to_dict()["rows"] == 7


def without_target() -> Report:
    return Trainer(model(3), None, nn.CrossEntropyLoss(), console=False).report(batches(classes(7)[0], BATCH))


def test_what_cannot_be_compared_is_refused_on_every_process() -> None:
    with pytest.raises(RankFailed) as caught:
        pool(2).run(without_target)
    assert str(caught.value).count("SettingError: a report compares outputs with targets") == 2
