"""`workers="auto"`: how many are taken, where none is, and what a run makes of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from choosing import EPOCHS, Augmented, check_same, chose, ignore_those_that_run, pids, source
from torch import nn

from trainwright import Console, Trainer
from trainwright.data import auto_workers


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose after few batches, on a machine of two cores, whatever is gained; leave no process."""
    ignore_those_that_run()
    for name, value in {"MEASURED": 0.0, "CHEAP": 0.0, "WORTH": 0.0, "GAIN": 1e9}.items():
        monkeypatch.setattr(auto_workers, name, value)
    monkeypatch.setattr(auto_workers, "usable_cores", lambda: 2)
    yield
    assert pids() == set()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("usable_cores", lambda: 1, "no core is free"),
        ("_forks", lambda: False, "new processes would run the script"),
        ("_room", lambda: 100, "/dev/shm has 0 MB"),
        ("CHEAP", 1.0, ""),
        ("WORTH", 1.0, ""),
        ("GAIN", 0.0, "with 2 beside it"),
    ],
)
def test_none_is_taken_where_they_are_of_no_use(monkeypatch: Any, name: str, value: Any, said: str) -> None:
    monkeypatch.setattr(auto_workers, name, value)
    given = check_same(Augmented)
    assert chose(given) == 0
    news = given.take_news()
    assert (said in news) if said else not news


def test_all_sources_together_take_no_more_workers_than_there_are_cores() -> None:
    first, second = source(Augmented()), source(Augmented())
    first.keeps_workers = second.keeps_workers = True
    list(first.epoch(0))
    list(second.epoch(0))
    assert (chose(first), chose(second)) == (2, 0)
    first.end_workers()


@pytest.mark.parametrize(
    ("fetching", "training", "cores", "number"),
    [
        (0.01, 0.01, 16, 1),
        (0.03, 0.01, 16, 3),
        (0.03, 0.01, 3, 2),
        (0.01, 0.03, 2, 1),
        (1.0, 0.0, 8, 8),
        (0.1, 0.1, 1, 0),
    ],
)
@pytest.mark.parametrize(("local", "share"), [("", 4), ("2", 2), ("9", 4), ("x", 4)])
def test_as_many_are_taken_as_keep_up_and_as_there_are_cores_for_each_process(
    monkeypatch: Any, local: str, share: int, fetching: float, training: float, cores: int, number: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(auto_workers, "usable_cores", lambda: cores * share)
    given = source(Augmented())
    given._chosen._times = [(fetching, training)] * 5
    what = auto_workers.Pass(0, 0, iter(()), asks_ahead=True, keeps=False, name="", processes=4)
    assert given._chosen._best(what) == number


def test_a_fit_keeps_its_workers_from_epoch_to_epoch_tells_of_them_once_and_leaves_none() -> None:
    seen, told = [], io.StringIO()

    class Fitted(Trainer[nn.Module]):
        def training_step(self, batch: Any) -> Any:
            seen.append(pids())
            return self.model(batch[1]).square().mean()

    weights = []
    for workers in (0, "auto"):
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Fitted(model, optimizer, console=Console(told))
        given = source(Augmented(), workers)
        trainer.fit(given, epochs=EPOCHS)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
    assert pids() == set()
    assert seen[-1] == seen[-15] != set()
    assert told.getvalue().count("Augmented: 2 workers (a batch takes") == 1
