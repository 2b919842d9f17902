"""Statistics of weights, gradients and updates, of one process and of several: exact, and honest about NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import EMA, ClipNorm, Journal, Observer, SettingError, TensorBoardLogger, Trainer, Updates, batches
from trainwright.core import host_reads
from trainwright.distributed.ddp import DDP
from trainwright.observers import ModelStatistics, Profile, Statistics, read_journal

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 3
EACH = Updates(1)


class Reported(Observer):
    def __init__(self) -> None:
        self.seen: list[ModelStatistics] = []

    def on_statistics(self, statistics: ModelStatistics) -> None:
        self.seen.append(statistics)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def made(*observers: Any, model: Any = None, cls: Any = Trainer, **settings: Any) -> Any:
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return cls(model, optimizer, nn.CrossEntropyLoss(), console=False, observers=observers, **settings)


def data(size: int = 4) -> Any:
    return batches((x, y), size, shuffle=False)


def by_hand(updates: int) -> list[dict[str, dict[str, float]]]:
    """The numbers of each update of a plain loop: windows of two batches of four rows, clipped at 0.5."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = []
    for index in range(updates):
        rows_of = slice(8 * (index % 5), 8 * (index % 5) + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows_of]), y[rows_of]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer.step()
        rows.append({name: numbers(one, before[name]) for name, one in model.named_parameters()})
    return rows


def numbers(parameter: nn.Parameter, before: torch.Tensor) -> dict[str, float]:
    weight, grad = parameter.detach(), parameter.grad
    assert grad is not None
    return {
        "weight_norm": weight.norm().item(),
        "weight_max": weight.abs().max().item(),
        "weight_zeros": (weight == 0).float().mean().item(),
        "grad_norm": grad.norm().item(),
        "grad_max": grad.abs().max().item(),
        "grad_zeros": (grad == 0).float().mean().item(),
        "update_ratio": ((weight - before).norm() / before.norm()).item(),
    }


@pytest.mark.parametrize(("each", "average"), [(1, None), (2, None), (3, EMA(0.5)), (7, None)])
def test_the_numbers_are_those_of_a_plain_loop(each: int, average: Any) -> None:
    reported = Reported()
    trainer = made(Statistics(every=Updates(each)), reported, accumulate=2, clip=ClipNorm(0.5), average=average)
    trainer.fit(data(), epochs=4)
    assert [one.update for one in reported.seen] == list(range(each, 21, each))
    expected = by_hand(20)
    for one in reported.seen:
        for name, found in one.parameters.items():
            plain = expected[one.update - 1][name]
            assert {key: getattr(found, key) for key in plain} == pytest.approx(plain, rel=2e-4, abs=1e-7)
    assert list(reported.seen[0].parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_nan_is_a_nan_and_is_counted() -> None:
    class Poisons(Trainer[Any]):
        def after_update(self) -> None:
            with torch.no_grad():
                self.model[2].weight.grad[0, :2] = math.nan
                self.model[2].weight[1, 1] = math.inf
                self.model[0].bias.zero_()

    reported = Reported()
    made(Statistics(every=EACH), reported, cls=Poisons).fit(data(), max_updates=1)
    poisoned, fine = reported.seen[0].parameters["2.weight"], reported.seen[0].parameters["0.weight"]
    assert math.isnan(poisoned.grad_norm) and math.isnan(poisoned.grad_max)
    assert (poisoned.grad_nonfinite, poisoned.weight_nonfinite) == (2, 1)
    assert poisoned.weight_norm == math.inf and poisoned.update_norm == math.inf
    assert math.isfinite(fine.grad_norm) and not fine.grad_nonfinite
    assert reported.seen[0].parameters["0.bias"].weight_zeros == 1.0
    assert "3 not finite" in str(reported.seen[0])
    assert math.isnan(ModelOf(0.0, 0.0)) and ModelOf(1.0, 0.0) == math.inf


def ModelOf(moved: float, before: float) -> float:
    from trainwright.observers import ParameterStatistics

    none = {"weight_norm": 0.0, "weight_max": 0.0, "weight_zeros": 0.0, "weight_nonfinite": 0}
    return ParameterStatistics(elements=1, update_norm=moved, before=before, **none).update_ratio


def test_frozen_parameters_have_no_gradient_and_sparse_ones_count_what_they_leave_out() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 4, sparse=True)
            self.head = nn.Linear(4, 3)
            self.head.bias.requires_grad_(False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(words).mean(1))

    reported, model = Reported(), Words()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    trainer = Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        console=False,
        observers=[Statistics(every=EACH), reported],
    )
    words = torch.tensor([[0, 1], [1, 2]])
    trainer.fit((words, torch.tensor([0, 1])), epochs=1, batch_size=2)
    seen = reported.seen[0].parameters
    assert seen["words.weight"].grad_zeros == 0.7
    assert seen["head.bias"].grad_norm is None and seen["head.bias"].update_norm == 0.0
    assert "-" in str(reported.seen[0]).splitlines()[-1]


def test_all_numbers_of_a_turn_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, real = [], host_reads.read

    def read(values: Any) -> Any:
        reads.append(len(values))
        return real(values)

    monkeypatch.setattr(host_reads, "read", read)
    made(Statistics(every=Updates(5))).fit(data(), epochs=1)
    assert [size for size in reads if size == 4 * 10] == [40, 40]


def test_a_pattern_chooses_parameters_and_one_that_names_none_is_refused() -> None:
    reported = Reported()
    made(Statistics(every=EACH, parameters="2.*"), reported).fit(data(), max_updates=1)
    assert list(reported.seen[0].parameters) == ["2.weight", "2.bias"]
    with pytest.raises(SettingError, match=r"matches none of the model's.*(?s:.)*0\.weight"):
        made(Statistics(parameters="heads.*")).fit(data(), epochs=1)


def test_updates_that_were_held_back_are_no_turn() -> None:
    bad = x.clone()
    bad[[9, 10, 25]] = math.nan
    reported = Reported()
    trainer = made(Statistics(every=Updates(3)), reported, on_nonfinite="skip")
    # With an end by the clock the loop pauses after each update, also after those that were held back.
    trainer.fit(batches((bad, y), 4, shuffle=False), epochs=2, max_seconds=1000.0)
    assert [one.update for one in reported.seen] == [3, 6, 9, 12, 15]
    assert all(math.isfinite(one.parameters["0.weight"].update_norm) for one in reported.seen)
    assert all(one.parameters["0.weight"].update_norm > 0 for one in reported.seen)


@pytest.mark.parametrize("setting", [{"every": 5}, {"every": None}, {"parameters": ""}, {"parameters": None}])
def test_settings_are_checked_when_they_are_given(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="want"):
        Statistics(**setting)


def test_the_journal_and_tensorboard_write_them(tmp_path: Path) -> None:
    journal, board = Journal(tmp_path / "run.jsonl"), TensorBoardLogger(tmp_path / "board")
    asked = Statistics(every=Updates(5))
    made(asked, journal, board).fit(data(), epochs=1)
    written = [one for one in read_journal(tmp_path / "run.jsonl") if one["event"] == "statistics"]
    assert [one["update"] for one in written] == [5, 10]
    assert asked.latest is not None
    last = asked.latest.parameters["0.weight"]
    assert written[-1]["parameters"]["0.weight"]["grad_norm"] == last.grad_norm
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in shown.Scalars("update_ratio/0.weight")][-1] == (
        10,
        pytest.approx(last.update_ratio, rel=1e-6),
    )


def on_ranks(directory: Path, only_first: bool, parallel: Any) -> list[Any]:
    torch.manual_seed(0)
    reported = Reported()
    asked = [Statistics(every=Updates(3)), Profile(directory, after=4, updates=2, rows=0)]
    has_them = not only_first or torch.distributed.get_rank() == 0
    observers = [*(asked if has_them else []), reported]
    trainer = made(*observers, model=nn.Linear(4, 3), parallel=parallel)
    try:
        trainer.fit(data(7), epochs=2)
    except SettingError as error:
        return [str(error)]
    return [
        (one.update, one.parameters["weight"].grad_norm, one.parameters["weight"].update_norm) for one in reported.seen
    ]


def test_the_first_process_tells_what_one_process_would(tmp_path: Path) -> None:
    first, second = pool(2).run(on_ranks, tmp_path, False, DDP())
    alone, _ = pool(2).run(on_ranks, tmp_path / "alone", False, None)
    assert second == []
    assert [one[0] for one in first] == [3, 6, 9, 12]
    for together, one in zip(first, alone, strict=True):
        assert together == pytest.approx(one, rel=1e-5)
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["updates-5-6.json.gz"]


def test_observers_that_only_some_processes_have_are_refused(tmp_path: Path) -> None:
    for reported in pool(2).run(on_ranks, tmp_path, True, DDP()):
        assert (
            "the processes of this run were not given the same probes" in reported[0]
            and "Statistics(every=" in reported[0]
        )
