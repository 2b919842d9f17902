"""Several sets in `evaluate` as in `fit`, and numbers of an `evaluate` of the user's own that are watched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import DataError, EarlyStopping, SettingError, Trainer, Updates, batches


def rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(3)]


def made(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False, **settings)


def test_evaluate_takes_a_dict_of_sets_as_fit_does():
    trainer = made()
    numbers = trainer.evaluate({"clean": rows(1), "noisy": rows(2)}, name="test")
    alone = {name: trainer.evaluate(rows(seed))["val_loss"] for name, seed in (("clean", 1), ("noisy", 2))}
    assert numbers == {"test_clean_loss": alone["clean"], "test_noisy_loss": alone["noisy"]}
    history = trainer.fit(rows(0), {"clean": rows(1), "noisy": rows(2)}, epochs=1).history[-1]
    again = trainer.evaluate({"clean": rows(1), "noisy": rows(2)})
    assert {name: history[name] for name in again} == again


class Noisy(Trainer):
    def evaluate(self, data, name="val", **options):
        numbers = super().evaluate(data, name, **options)
        return numbers | {"noisy_loss": numbers[f"{name}_loss"] + 1.0}


@pytest.mark.parametrize("span", [{}, {"validate": Updates(2)}], ids=["each epoch", "inside epochs"])
def test_a_number_of_ones_own_evaluate_can_be_watched_whatever_its_name(span):
    trainer = made(Noisy, early_stopping=EarlyStopping("noisy_loss", patience=2))
    result = trainer.fit(rows(0), rows(1), epochs=4, **span)
    assert result.best.name == "noisy_loss"
    watched = [row["noisy_loss"] for row in result.history if "noisy_loss" in row]
    assert result.best.value == min(watched) and len(watched) >= 3


def test_evaluate_refuses_no_data_and_a_batch_size_that_it_cannot_use():
    trainer = made()
    with pytest.raises(DataError, match="None"):
        trainer.evaluate(None)
    with pytest.raises(DataError, match="batch_size"):
        trainer.evaluate(rows(1), batch_size=2)
    with pytest.raises(DataError, match="batch_size"):
        trainer.evaluate({"a": rows(1), "b": rows(2)}, batch_size=2)
    with pytest.raises(SettingError, match=r"test=list of 2 loaders(.|\n)*\{\"a\": first, \"b\": second\}"):
        trainer.evaluate([batches(torch.ones(4, 3), 2), batches(torch.ones(4, 3), 2)], name="test")


def test_the_batch_size_of_fit_is_for_rows_and_leaves_ready_validation_batches_alone():
    x = torch.cat([inputs for inputs, _ in rows(0)])
    history = made().fit((x, x.sum(1, keepdim=True)), {"ready": rows(1)}, epochs=1, batch_size=4).history
    assert "val_ready_loss" in history[-1]
