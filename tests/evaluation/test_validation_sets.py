"""`val` as a dict of loaders: what numbers are called, what may be watched, what is judged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import (
    Checkpoint,
    DataError,
    EarlyStopping,
    Plateau,
    SettingError,
    Trainer,
    accuracy,
    batches,
)

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(24) % 3
clean, noisy = (x[:10], y[:10]), (x[10:17] + 1, y[10:17])


def made(cls=Trainer, lr=0.1, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return cls(
        model, torch.optim.SGD(model.parameters(), lr=lr), nn.CrossEntropyLoss(), **{"console": False} | settings
    )


def val():
    return {"clean": batches(clean, 4), "noisy": batches(noisy, 4)}


def train():
    return batches((x, y), 8)


def test_each_set_has_its_own_numbers():
    trainer = made(metrics={"accuracy": accuracy})
    row = trainer.fit(train(), val(), epochs=1).history[0]
    for name, (inputs, target) in (("clean", clean), ("noisy", noisy)):
        output = trainer.model(inputs)
        assert row[f"val_{name}_loss"] == pytest.approx(nn.functional.cross_entropy(output, target).item(), rel=1e-6)
        assert row[f"val_{name}_accuracy"] == pytest.approx((output.argmax(1) == target).double().mean().item())
    assert "val_loss" not in row and row["loss"] > 0


def test_a_dict_of_columns_is_one_set():
    class Columns(Trainer):
        def split(self, batch):
            return (batch["x"],), batch["y"]

    row = made(Columns).fit({"x": x, "y": y}, {"x": x, "y": y}, epochs=1, batch_size=8).history[0]
    assert "val_loss" in row and not any(name.startswith("val_x") for name in row)


def test_the_batch_size_of_fit_holds_for_each_set_of_arrays():
    row = made().fit((x, y), {"clean": clean, "noisy": noisy}, epochs=1, batch_size=5).history[0]
    assert {"val_clean_loss", "val_noisy_loss"} < set(row)


@pytest.mark.parametrize("watch", ["early", "checkpoint", "plateau"])
def test_a_monitor_must_name_one_of_the_sets(watch, tmp_path):
    def settings(name):
        return {
            "early": {"early_stopping": EarlyStopping(name)},
            "checkpoint": {"checkpoint": Checkpoint(tmp_path / name, best=name)},
            "plateau": {"schedule": Plateau(name)},
        }[watch]

    for wrong, meant in (("val_loss", None), ("val_claen_loss", "val_clean_loss"), ("val_noisy_los_loss", None)):
        trainer = made(**settings(wrong))
        with pytest.raises(SettingError, match="val_noisy_loss") as caught:
            trainer.fit(train(), val(), epochs=1)
        assert meant is None or f"Did you mean '{meant}'" in str(caught.value)
        assert trainer.progress.updates == 0
    assert made(**settings("val_clean_loss")).fit(train(), val(), epochs=1).updates == 3


def test_early_stopping_judges_the_set_that_it_names():
    early = EarlyStopping("val_noisy_loss", patience=1, restore_best=True)
    trainer = made(lr=0.1, early_stopping=early)
    away = {"clean": train(), "noisy": [(x[:9], (y[:9] + (x[:9, 0] > 0)) % 3)]}
    result = trainer.fit(train(), away, epochs=90)
    losses = [row["val_noisy_loss"] for row in result.history]
    assert result.stopped.startswith("val_noisy_loss did not improve")
    assert result.best.value == min(losses) == losses[-2] and losses[-1] > losses[-2]
    assert trainer.evaluate(away["noisy"])["val_loss"] == pytest.approx(min(losses))
    assert result.history[-1]["val_clean_loss"] < result.history[-2]["val_clean_loss"]


@pytest.mark.parametrize("number", ["loss", "accuracy"])
def test_one_standard_error_is_that_of_the_set_that_is_named(number):
    mode = None if number == "loss" else "max"
    early = EarlyStopping(f"val_clean_{number}", mode=mode, patience=2, min_delta="1se")
    metrics = {"accuracy": lambda output, target: (output.argmax(1) == target).double()}
    trainer = made(lr=0.02, early_stopping=early, metrics=metrics)
    result = trainer.fit(train(), val(), epochs=40)
    model = made().model
    output = model(clean[0])
    assert output.shape == (10, 3)
    sign = 1 if number == "loss" else -1
    values = [sign * row[f"val_clean_{number}"] for row in result.history]
    assert "did not improve" in result.stopped and len(values) == result.best.epoch + 2
    if number == "loss":  # it falls in each epoch, by less than a standard error: a plain comparison would go on
        assert values == sorted(values, reverse=True)


def test_one_standard_error_without_values_of_rows_is_refused():
    early = EarlyStopping("val_clean_accuracy", mode="max", min_delta="1se")
    trainer = made(
        early_stopping=early, metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()}
    )
    with pytest.raises(SettingError, match="needs the standard error of val_clean_accuracy"):
        trainer.fit(train(), val(), epochs=2)


def test_a_set_that_can_be_read_once_is_read_once():
    reads = []

    def once():
        for part in zip(clean[0].split(4), clean[1].split(4), strict=True):
            reads.append(1)
            yield part

    row = made().fit(train(), {"clean": once(), "noisy": batches(noisy, 4)}, epochs=1).history[0]
    assert len(reads) == 3 and {"val_clean_loss", "val_noisy_loss"} < set(row)
    with pytest.raises(DataError, match=r"exhausted|only once"):
        made().fit(train(), {"clean": once(), "noisy": batches(noisy, 4)}, epochs=2)


def test_a_monitor_of_a_set_that_cannot_be_rehearsed_is_checked_too():
    stream = (part for part in [(x, y)])
    with pytest.raises(SettingError, match="val_once_loss"):
        made(early_stopping=EarlyStopping("val_other_loss")).fit(train(), {"once": stream}, epochs=1)
    stream = (part for part in [(x, y)])
    made(early_stopping=EarlyStopping("val_once_loss")).fit(train(), {"once": stream}, epochs=1)


@pytest.mark.parametrize("name", ["a b", 3, "", "a-b"])
def test_a_name_that_is_no_identifier_is_refused(name):
    with pytest.raises(SettingError, match="identifiers"):
        made().fit(train(), {name: batches(clean, 4)}, epochs=1)


def test_an_empty_dict_is_refused():
    with pytest.raises((SettingError, DataError), match="val"):
        made().fit(train(), {}, epochs=1)


def test_the_header_names_each_set():
    plan = made().plan(train(), val(), epochs=1)
    assert plan.val.startswith("clean: 10 rows") and "; noisy: 7 rows" in plan.val
