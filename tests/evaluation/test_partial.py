"""A partial evaluation is over the rows of the first batches, and says so."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright import Console, Journal, SettingError, Trainer, accuracy, batches, over_all
from trainwright.observers import read_journal

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
FIRST = (X[:16], Y[:16])


def made(**slots: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    metrics = {"accuracy": accuracy, "spread": over_all(lambda output, target: output.std())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), metrics=metrics, **{"console": False} | slots)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            for start in range(0, 48, 8):
                yield X[start : start + 8], Y[start : start + 8]


FORMS: dict[str, Any] = {
    "batches": lambda: batches((X, Y), 8),
    "loader": lambda: DataLoader(TensorDataset(X, Y), 8),
    "loader with workers": lambda: DataLoader(TensorDataset(X, Y), 8, num_workers=1),
    "list": lambda: list(zip(X.split(8), Y.split(8), strict=True)),
    "endless": Endless,
    "function": lambda: lambda epoch: batches((X, Y), 8),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_over_the_rows_of_the_first_batches(form: str) -> None:
    trainer = made()
    numbers = trainer.evaluate(FORMS[form](), "test", max_batches=2)
    assert numbers.pop("test_first_batches") == 2.0
    assert numbers == trainer.evaluate(FIRST, "test", batch_size=8)
    assert torch.equal(trainer.predict(FORMS[form](), max_batches=2), trainer.predict(X[:16], batch_size=8))


def test_rows_take_their_batch_size_and_each_set_of_several_is_cut() -> None:
    trainer = made()
    numbers = trainer.evaluate({"a": (X, Y), "b": (X[8:], Y[8:])}, batch_size=8, max_batches=2)
    assert {name for name in numbers if "first" in name} == {"val_a_first_batches", "val_b_first_batches"}
    assert numbers["val_a_loss"] == trainer.evaluate(FIRST, batch_size=8)["val_loss"]
    assert numbers["val_b_loss"] == trainer.evaluate((X[8:24], Y[8:24]), batch_size=8)["val_loss"]


def test_more_batches_than_there_are_is_a_complete_evaluation() -> None:
    trainer = made()
    assert trainer.evaluate((X, Y), batch_size=8, max_batches=7) == trainer.evaluate((X, Y), batch_size=8)
    assert "first" not in str(trainer.report((X, Y), batch_size=8, max_batches=7))


def test_a_report_says_how_much_it_is_of() -> None:
    report = made().report((X, Y), batch_size=8, max_batches=2)
    assert len(report.target) == 16
    assert str(report).endswith("first 2 of 7 batches")


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_validates_on_the_first_batches_and_header_journal_and_result_say_so(form: str, tmp_path: Path) -> None:
    stream = io.StringIO()
    journal = Journal(tmp_path / "journal.jsonl")
    trainer = made(console=Console(stream, width=120), observers=[journal])
    train = batches((X, Y), 10, shuffle=True, seed=0)
    result = trainer.fit(train, FORMS[form](), epochs=2, max_val_batches=2)
    said = "first 2 batches" if form == "endless" else "first 2 of 7 batches"
    assert result.notes == (f"val: {said}",)
    assert f": {said}" in stream.getvalue().partition("\n\n")[0]
    assert said in read_journal(journal.path)[0]["val"]
    complete = made().fit(train, FIRST, epochs=2)
    assert [row["val_loss"] for row in complete.history] == pytest.approx([row["val_loss"] for row in result.history])
    assert [row["val_spread"] for row in result.history] == [row["val_spread"] for row in complete.history]


def test_the_training_is_that_with_all_batches() -> None:
    def trained(**fit: Any) -> Any:
        torch.manual_seed(3)
        loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True)
        trainer = made()
        trainer.fit(loader, loader, epochs=2, **fit)
        return trainer.model.weight, torch.rand(1)

    assert all(map(torch.equal, trained(), trained(max_val_batches=1)))


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "all"])
def test_a_number_of_batches_that_is_none_is_refused(number: Any) -> None:
    trainer = made()
    for call in (trainer.evaluate, trainer.predict, trainer.report):
        with pytest.raises(SettingError, match=f"max_batches={number!r}"):
            call((X, Y), max_batches=number)
    with pytest.raises(SettingError, match=f"max_val_batches={number!r}"):
        trainer.fit((X, Y), (X, Y), batch_size=8, epochs=1, max_val_batches=number)


def test_it_needs_validation_data() -> None:
    with pytest.raises(SettingError, match=r"max_val_batches=3\) without validation data"):
        made().fit((X, Y), batch_size=8, epochs=1, max_val_batches=3)
