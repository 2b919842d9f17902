"""`self.evaluating` is the name of the set in a validation, and `super()` reaches the library's own step there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import EMA, EarlyStopping, Probe, StepOutput, SumLoss, Trainer, Updates, accuracy, over_all
from trainwright.metrics import F1

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()
SETS = {"easy": (X[:20], Y[:20]), "hard": (X[20:], Y[20:])}


class Noted(Trainer[Any]):
    """Notes where each step runs."""

    seen: list[Any]

    def training_step(self, batch: Any) -> Any:
        self.seen.append(("training_step", self.evaluating))
        return super().training_step(batch)

    def predict_step(self, batch: Any) -> Any:
        self.seen.append(("predict_step", self.evaluating))
        return super().predict_step(batch)


def made(cls: Any = Noted, loss: Any = None, **slots: Any) -> Any:
    torch.manual_seed(0)
    model = slots.pop("model", None) or nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = cls(model, optimizer, loss or nn.CrossEntropyLoss(), **{"console": False} | slots)
    trainer.seen = []
    return trainer


def test_it_is_the_name_of_each_set_in_evaluations_and_none_in_training() -> None:
    trainer = made()
    trainer.fit((X, Y), SETS, batch_size=20, epochs=1)
    rehearsed, trained = [("training_step", "val_easy"), ("training_step", "val_hard")], [("training_step", None)] * 2
    assert trainer.seen == [*rehearsed, *trained, *rehearsed]
    trainer.seen.clear()
    trainer.evaluate((X, Y))
    trainer.evaluate((X, Y), "test")
    trainer.evaluate(SETS, "test")
    names = ["val", "test", "test_easy", "test_hard"]
    assert trainer.seen == [("training_step", name) for name in names]
    assert trainer.evaluating is None


def test_it_is_none_in_predictions_reports_and_probes() -> None:
    trainer = made()
    trainer.predict((X, Y))
    trainer.report((X, Y))
    assert set(trainer.seen) == {("predict_step", None)}
    probed: list[Any] = []
    trainer = made(observers=[Probe(lambda trainer: probed.append(trainer.evaluating), every=Updates(1))])
    trainer.fit((X, Y), (X, Y), batch_size=20, epochs=1)
    assert probed and set(probed) == {None}


class Inner(Trainer[Any]):
    """Evaluates from within a validation."""

    seen: list[Any]

    def validation_step(self, batch: Any) -> Any:
        if self.evaluating == "val":
            self.seen += [self.evaluate((X, Y), "inner"), self.evaluating]
        return super().validation_step(batch)


def test_an_evaluation_inside_of_another_has_its_own_name() -> None:
    trainer = made(Inner)
    trainer.evaluate((X, Y))
    assert [list(trainer.seen[0]), trainer.seen[1]] == [["inner_loss"], "val"]


class Fails(Trainer[Any]):
    def validation_step(self, batch: Any) -> Any:
        raise RuntimeError(self.evaluating)


def test_it_is_none_again_after_an_error() -> None:
    trainer = made(Fails)
    with pytest.raises(RuntimeError, match="test"):
        trainer.evaluate((X, Y), "test")
    assert trainer.evaluating is None


def test_the_statistics_of_averaged_weights_are_taken_in_training() -> None:
    trainer = made(average=EMA(0.5))
    trainer.fit((X, Y), batch_size=20, epochs=1)
    assert set(trainer.seen) == {("training_step", None)}


class Own(Trainer[Any]):
    """Overrides both steps, and calls the library's own in validation."""

    def training_step(self, batch: Any) -> Any:
        raise AssertionError("the validation step is another one")

    def validation_step(self, batch: Any) -> Any:
        return super().training_step(batch)


class ByTraining(Trainer[Any]):
    def validation_step(self, batch: Any) -> Any:
        return super().training_step(batch)


class ByValidation(Trainer[Any]):
    def validation_step(self, batch: Any) -> Any:
        return super().validation_step(batch)


class Returns(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


ONE_HOT = F.one_hot(Y, 3).float()
LOSSES: dict[str, tuple[Any, Any]] = {
    "cross entropy": (nn.CrossEntropyLoss(), Y),
    "with ignored targets": (nn.CrossEntropyLoss(ignore_index=1), Y),
    "with class weights": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), Y),
    "with smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), Y),
    "a function": (F.cross_entropy, Y),
    "a partial": (partial(F.cross_entropy, ignore_index=2), Y),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), Y),
    "probabilities": (nn.CrossEntropyLoss(), ONE_HOT),
    "elements": (nn.MSELoss(), ONE_HOT),
    "logits": (nn.BCEWithLogitsLoss(), ONE_HOT),
    "a function of your own": (lambda output, target: (output - target).square().mean(), ONE_HOT),
    "a sum with a count": (lambda output, target: SumLoss((output - target).abs().sum(), target.numel()), ONE_HOT),
    "named losses": (
        lambda output, target: {"a": output.square().mean(), "b": (output - target).abs().mean()},
        ONE_HOT,
    ),
}


@pytest.mark.parametrize("cls", [Own, ByTraining, ByValidation])
@pytest.mark.parametrize("form", LOSSES)
def test_the_librarys_own_step_in_validation_gives_its_numbers(form: str, cls: Any) -> None:
    loss, target = LOSSES[form]
    metrics = {"spread": over_all(lambda output, target: output.std()), "first": lambda output, _: output[:, 0]}
    metrics |= {"accuracy": accuracy, "f1": F1()} if target is Y else {}
    batches = list(zip(X.split(17), target.split(17), strict=True))  # 17, 17 and 6 rows
    expected = made(Trainer, loss, metrics=metrics).evaluate(batches)
    assert made(cls, loss, metrics=metrics).evaluate(batches) == pytest.approx(expected, rel=1e-6)
    assert made(cls, loss).evaluate(batches) == pytest.approx(made(Trainer, loss).evaluate(batches), rel=1e-6)


@pytest.mark.parametrize("cls", [Own, ByTraining, ByValidation])
def test_the_librarys_own_step_asks_a_model_that_returns_its_loss(cls: Any) -> None:
    def evaluated(of: Any) -> Any:
        torch.manual_seed(0)
        model = Returns()
        trainer = of(model, torch.optim.SGD(model.parameters(), lr=0.1), metrics={"accuracy": accuracy}, console=False)
        return trainer.evaluate([{"x": x, "labels": y} for x, y in zip(X.split(17), Y.split(17), strict=True)])

    assert evaluated(cls) == pytest.approx(evaluated(Trainer), rel=1e-6)


class Clean(Trainer[Any]):
    """Adds noise in training alone."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        if self.evaluating is None:
            x = x + torch.randn_like(x)
        returned = super().training_step((x, y))
        return StepOutput(returned) if self.evaluating == "val" else returned


def test_one_step_may_tell_training_from_validation() -> None:
    trainer = made(Clean)
    row = trainer.fit((X, Y), (X, Y), batch_size=20, epochs=1).history[0]
    plain = made(Trainer)
    plain.model.load_state_dict(trainer.model.state_dict())
    assert row["val_loss"] == pytest.approx(plain.evaluate((X, Y))["val_loss"], rel=1e-6)


@pytest.mark.parametrize("cls", [ByTraining, ByValidation])
def test_the_librarys_own_step_gives_standard_errors_to_early_stopping(cls: Any) -> None:
    stopping = EarlyStopping("val_loss", patience=1, min_delta="1se")
    ours, theirs = (
        made(one, early_stopping=stopping).fit((X, Y), (X, Y), batch_size=20, epochs=30) for one in (cls, Trainer)
    )
    assert ours.epochs == theirs.epochs < 30


class Scores(dict[str, Any]):
    """An output whose attributes are its items: one that is missing is a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_an_output_whose_attributes_are_its_items_is_predicted() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Scores(logits=super().forward(x))

    model = Named(4, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    x = torch.randn(10, 4)
    assert torch.equal(trainer.predict(x, batch_size=4)["logits"], model(x)["logits"])
    batch = Scores(x=x, target=torch.zeros(10, dtype=torch.long))
    assert torch.equal(trainer.predict([batch])["logits"], model(x)["logits"])
