"""Numbers of all rows at once, `over_all`, and metrics that return a dict of numbers: as a call written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from distributed.pool import pool
from trainwright import EarlyStopping, SettingError, StepOutput, SumLoss, Trainer, accuracy, batches, over_all
from trainwright.metrics import Derived

ROWS, BATCH = 45, 8
INPUTS = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) + torch.randn(ROWS, generator=torch.Generator().manual_seed(1)) > 0).long()


def area(outputs: Tensor, targets: Tensor) -> float:
    return float(roc_auc_score(targets, outputs[:, 1]))


def in_order(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Numbers that change with the order of the rows."""
    places = torch.arange(1.0, len(targets) + 1)
    return {"output": (places * outputs[:, 0]).sum().double(), "target": (places * targets).sum(), "rows": len(outputs)}


def hits(output: Tensor, target: Tensor) -> dict[str, Any]:
    right = output.argmax(1) == target
    return {"all": right.float(), "of_ones": SumLoss((right & (target == 1)).sum(), int((target == 1).sum()))}


METRICS: dict[str, Any] = {
    "area": over_all(area),
    "order": over_all(in_order),
    "hits": hits,
    "accuracy": accuracy,
    "gini": Derived(lambda numbers: 2 * numbers["area"] - 1),
}


def made(**settings: Any) -> Trainer[Any]:
    torch.manual_seed(2)
    model = nn.Linear(4, 2)
    settings = {"metrics": METRICS, "console": False, **settings}
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **settings)


def by_hand(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        output = model(INPUTS)
    right = output.argmax(1) == TARGETS
    order = {f"val_order_{key}": float(value) for key, value in in_order(output, TARGETS).items()}
    auc = area(output, TARGETS)
    return {
        "val_area": auc,
        **order,
        "val_hits_all": float(right.double().mean()),
        "val_hits_of_ones": float(right[TARGETS == 1].double().mean()),
        "val_accuracy": float(right.double().mean()),
        "val_gini": 2 * auc - 1,
    }


def check_an_evaluation_is_one_call(size: int = BATCH) -> None:
    trainer = made()
    numbers = trainer.evaluate(batches((INPUTS, TARGETS), size))
    wanted = by_hand(trainer.model)
    assert list(numbers) == ["val_loss", *wanted]
    assert {name: numbers[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("size", [1, BATCH, ROWS])
def test_an_evaluation_is_one_call_with_all_rows(size: int) -> None:
    check_an_evaluation_is_one_call(size)


def test_a_mean_of_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.metrics import kinds

    def by_batch(self: Any) -> Any:
        return sum(self._function(*pair)["rows"] if self.name == "order" else 0.5 for pair in self._own) / len(
            self._own
        )

    monkeypatch.setattr(kinds.AllRows, "compute", by_batch)
    with pytest.raises(AssertionError):
        check_an_evaluation_is_one_call()


def test_training_keeps_no_rows_and_does_not_count_them() -> None:
    seen: list[int] = []

    def counted(outputs: Tensor, targets: Tensor) -> float:
        assert not outputs.requires_grad and outputs.is_cpu and targets.is_cpu
        seen.append(len(outputs))
        return area(outputs, targets)

    trainer = made(metrics={**METRICS, "area": over_all(counted)})
    result = trainer.fit(batches((INPUTS, TARGETS), BATCH), batches((INPUTS, TARGETS), BATCH), epochs=2)
    assert seen == [ROWS, ROWS]  # once per validation, and not in the rehearsal of one batch
    row = result.history[-1]
    assert {"hits_all", "hits_of_ones", "accuracy", "val_area", "val_gini", "val_order_rows"} <= row.keys()
    assert not {"area", "gini", "order"} & row.keys()


def test_the_rows_are_copies() -> None:
    shared = (torch.empty(BATCH, 4), torch.empty(BATCH, dtype=torch.int64))

    def reused() -> Any:
        for start in range(0, ROWS - BATCH + 1, BATCH):
            for buffer, column in zip(shared, (INPUTS, TARGETS), strict=True):
                buffer.copy_(column[start : start + BATCH])
            yield shared

    kept: list[Tensor] = []
    trainer = made(metrics={"keep": over_all(lambda outputs, targets: kept.append(targets) or 1.0)})
    trainer.evaluate(reused())
    assert torch.equal(kept[0], TARGETS[: len(kept[0])])


def test_a_key_of_a_dict_is_watched() -> None:
    trainer = made(early_stopping=EarlyStopping("val_order_rows", mode="max", patience=1))
    data = batches((INPUTS, TARGETS), BATCH)
    assert trainer.fit(data, data, epochs=9).epochs == 2
    with pytest.raises(SettingError, match=r"'val_hits_al'.*Did you mean 'val_hits_all'"):
        made(early_stopping=EarlyStopping("val_hits_al", mode="max", patience=1)).fit(data, data, epochs=2)


def test_a_dict_goes_on_after_a_resume_inside_an_epoch(tmp_path: Any) -> None:
    from trainwright import Checkpoint, Updates

    def run(updates: int, directory: str, resume: Any = None) -> Any:
        trainer = made(checkpoint=Checkpoint(tmp_path / directory, every=Updates(3)))
        return trainer.fit(batches((INPUTS, TARGETS), BATCH), max_updates=updates, resume=resume).history[-1]

    run(3, "cut")
    assert run(6, "cut", "auto")["hits_of_ones"] == run(6, "straight")["hits_of_ones"]


REFUSED: dict[str, tuple[Any, str]] = {
    "a number after a dict": (lambda o, t: {"a": 1.0} if len(t) == BATCH else 1.0, "the same keys for every batch"),
    "other keys": (lambda o, t: {f"a{len(t)}": 1.0}, "returned the keys 'a5'"),
    "no string": (lambda o, t: {1: 1.0}, "returned the keys 1"),
    "the name of another metric": (lambda o, t: {"too": 1.0}, "makes the name of another metric"),
    "no number for a key": (lambda o, t: {"a": "b"}, "metric 'it', key 'a', is a str"),
    "no number over all": (over_all(lambda o, t: "b"), "metric 'it' computed a str"),
    "no number for a key over all": (over_all(lambda o, t: {"a": o}), "computed a tensor of shape .* for 'a'"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_no_number_is_refused(mistake: str) -> None:
    metric, text = REFUSED[mistake]
    with pytest.raises(SettingError, match=text):
        made(metrics={"it": metric, "it_too": accuracy}).evaluate(batches((INPUTS, TARGETS), BATCH))


def test_rows_that_cannot_be_joined_are_refused() -> None:
    class Returning(Trainer[Any]):
        def validation_step(self, batch: Any) -> Any:
            return StepOutput(torch.tensor(1.0), *batch)

    trainer: Any = Returning(nn.Linear(4, 2), metrics={"it": over_all(lambda outputs, targets: 1.0)}, console=False)
    with pytest.raises(SettingError, match="their shapes differ"):
        trainer.evaluate([(INPUTS[:4], TARGETS[:4]), (INPUTS[4:, :2], TARGETS[4:])])
    with pytest.raises(SettingError, match="joins the rows of all batches"):
        trainer.evaluate([(INPUTS, {"a": TARGETS})])


def test_what_is_no_function_of_two_is_refused() -> None:
    with pytest.raises(SettingError, match=r"over_all\(3\)"):
        over_all(3)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="cannot be called with"):
        over_all(lambda outputs: 1.0)  # type: ignore[misc,arg-type]


def on_ranks() -> dict[str, float]:
    return made().evaluate(batches((INPUTS, TARGETS), BATCH))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_give_the_numbers_of_one(processes: int) -> None:
    one = made().evaluate(batches((INPUTS, TARGETS), BATCH))
    for numbers in pool(processes).run(on_ranks):
        assert numbers == pytest.approx(one, rel=1e-6)  # the loss sums float32 by slices
        assert numbers["val_order_target"] == one["val_order_target"]  # in the order of the data
