"""Cross-validation: folds are what a plain loop gives, in any order, without a trace; leaks are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.model_selection import GroupKFold, KFold, RepeatedKFold, ShuffleSplit, StratifiedKFold, TimeSeriesSplit
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainwright import Checkpoint, DataError, EarlyStopping, SettingError, Trainer, accuracy, batches, freeze
from trainwright.tools import CrossValidation, cross_validate

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0.5).long()
ADVICE = {"batch_size": 16, "epochs": 2}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def make_trainer(model: nn.Module | None = None, **settings: Any) -> Trainer[Any]:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False, **settings)


def by_hand(train: np.ndarray, held_out: np.ndarray, seed: int) -> tuple[Tensor, float]:
    """Outputs for the rows held out, and their loss, of a plain loop."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = batches((x[train], y[train]), 16, shuffle=True, seed=seed)
        for _ in range(2):
            for inputs, target in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            output = torch.cat([model(rows) for rows in x[held_out].split(16)])  # as it is predicted
    return output, F.cross_entropy(output.double(), y[held_out]).item()


def test_every_fold_is_what_a_plain_loop_gives() -> None:
    splitter = KFold(3)
    found = cross_validate(make_trainer, (x, y), splitter, seed=7, **ADVICE)
    for fold, (train, held_out) in zip(found.folds, splitter.split(x), strict=True):
        output, loss = by_hand(train, held_out, fold.seed)
        assert torch.equal(fold.predictions, output)
        assert fold.numbers["loss"] == pytest.approx(loss, rel=1e-6)
        assert fold.numbers["accuracy"] == (output.argmax(1) == y[held_out]).double().mean().item()
        assert (fold.trained, len(fold.rows), fold.result.epochs) == (40, 20, 2)


def test_the_order_of_folds_does_not_matter() -> None:
    pairs = list(StratifiedKFold(3).split(x, y))
    one = cross_validate(make_trainer, (x, y), pairs, seed=1, **ADVICE)
    other = cross_validate(make_trainer, (x, y), pairs[::-1], seed=1, **ADVICE)
    alone = cross_validate(make_trainer, (x, y), pairs[1:2], seed=1, **ADVICE)
    assert torch.equal(one.predictions, other.predictions)
    assert [fold.numbers for fold in one.folds] == [fold.numbers for fold in other.folds[::-1]]
    assert alone.folds[0].numbers == one.folds[1].numbers
    assert len({fold.seed for fold in one.folds}) == 3
    assert np.isnan(alone.std["loss"])


def test_the_random_state_of_the_process_stays() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]

    def noisy() -> Trainer[Any]:
        random.random(), np.random.rand()
        return make_trainer()

    before = states()
    cross_validate(noisy, (x, y), KFold(2, shuffle=True), seed=0, **ADVICE)
    assert states() == before
    assert torch.equal(
        cross_validate(noisy, (x, y), 2, **ADVICE).predictions, cross_validate(noisy, (x, y), 2, **ADVICE).predictions
    )


def test_a_splitter_that_shuffles_by_the_global_state_goes_by_the_seed() -> None:
    found = list[CrossValidation]()
    for state in (1, 2):
        np.random.seed(state)
        splitter = ShuffleSplit(2, test_size=0.25)
        found.append(cross_validate(make_trainer, (x, y), splitter, seed=5, **ADVICE))
    one, other = found
    assert [fold.rows.tolist() for fold in one.folds] == [fold.rows.tolist() for fold in other.folds]


def test_predictions_lie_in_the_order_of_the_data() -> None:
    found = cross_validate(make_trainer, (x, y), 4, seed=0, **ADVICE)
    assert found.predictions.shape == (60, 2) and not found.predictions.isnan().any()
    for fold in found.folds:
        assert torch.equal(found.predictions[torch.from_numpy(fold.rows)], fold.predictions)
    assert found.held_out.tolist() == [1] * 60


def test_rows_that_are_never_held_out_are_nan_and_rows_held_out_twice_have_no_one_prediction() -> None:
    found = cross_validate(make_trainer, (x, y), TimeSeriesSplit(3), seed=0, **ADVICE)
    missing = found.held_out == 0
    assert missing.tolist() == [True] * 15 + [False] * 45
    assert torch.equal(found.predictions.isnan().all(1), missing)
    twice = cross_validate(make_trainer, (x, y), RepeatedKFold(n_splits=2, n_repeats=2), seed=0, **ADVICE)
    with pytest.raises(DataError, match="held out 2 times"):
        _ = twice.predictions


def test_outputs_of_several_tensors_are_laid_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"scores": self.layer(inputs), "classes": self.layer(inputs).argmax(1)}

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["scores"], target)

    def make() -> Trainer[Any]:
        model = Two()
        return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, console=False)

    whole = cross_validate(make, (x, y), 3, seed=0, **ADVICE).predictions
    assert torch.equal(whole["scores"].argmax(1), whole["classes"])
    with pytest.raises(DataError, match=r"torch.int64, and 15 rows"):
        _ = cross_validate(make, (x, y), TimeSeriesSplit(3), seed=0, **ADVICE).predictions


def test_mean_and_deviation_are_those_of_the_folds_and_the_record_is_plain_data() -> None:
    found = cross_validate(make_trainer, (x, y), 3, seed=0, **ADVICE)
    values = [fold.numbers["accuracy"] for fold in found.folds]
    assert found.mean["accuracy"] == pytest.approx(np.mean(values)) and set(found.mean) == {"loss", "accuracy"}
    assert found.std["accuracy"] == pytest.approx(np.std(values, ddof=1))
    reported = json.loads(json.dumps(found.to_dict()))
    assert reported["mean"] == found.mean and reported["folds"][1]["rows"] == found.folds[1].rows.tolist()
    table = str(found).splitlines()
    assert table[0].split() == ["fold", "rows", "loss", "accuracy", "epochs", "time"]
    assert len(table) == 6 and table[-1].split()[0] == "std"


def test_a_number_of_folds_keeps_classes_in_their_shares_and_groups_together() -> None:
    rare = torch.tensor([0] * 50 + [1] * 10)
    found = cross_validate(make_trainer, (x, rare), 5, seed=0, **ADVICE)
    assert [int(rare[torch.from_numpy(fold.rows)].sum()) for fold in found.folds] == [2] * 5
    groups = np.repeat(np.arange(12), 5)
    found = cross_validate(make_trainer, (x, y), 4, groups=groups, seed=0, **ADVICE)
    assert all(len({*groups[fold.rows]}) * 5 == len(fold.rows) for fold in found.folds)
    few = torch.tensor([0] * 58 + [1] * 2)  # too few of one class for three folds: they are not stratified
    assert len(cross_validate(make_trainer, (x, few), 3, seed=0, **ADVICE).folds) == 3


def test_numbers_of_numpy_are_numbers_of_folds_and_of_rows() -> None:
    one = cross_validate(make_trainer, (x, y), 3, seed=0, **ADVICE)
    other = cross_validate(make_trainer, (x, y), np.int64(3), seed=0, **ADVICE)
    rows = [fold.rows.tolist() for fold in one.folds]
    assert [fold.rows.tolist() for fold in other.folds] == rows and rows[0] != list(range(20))
    wide, narrow = (
        cross_validate(make_trainer, (x, y), [(every[:40], every[40:])], seed=0, **ADVICE).folds[0]
        for every in (np.arange(60), np.arange(60, dtype=np.uint8))
    )
    assert torch.equal(wide.predictions, narrow.predictions) and (wide.rows == narrow.rows).all()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return x[index], y[index]


def test_a_data_set_of_rows_gives_what_its_arrays_give() -> None:
    splitter = StratifiedKFold(3, shuffle=True, random_state=0)
    one = cross_validate(make_trainer, Rows(), splitter, target=y, seed=0, **ADVICE)
    other = cross_validate(make_trainer, (x.numpy(), y.numpy()), splitter, seed=0, **ADVICE)
    assert torch.equal(one.predictions, other.predictions)


def test_rows_to_validate_on_are_taken_from_the_training_rows() -> None:
    seen = list[Any]()

    def prepare(train: Any, val: Any, held_out: Any) -> tuple[Any, ...]:
        seen.append([{*part[0][:, 0].tolist()} for part in (train, val, held_out)])
        return train, val, held_out

    def make() -> Trainer[Any]:
        return make_trainer(early_stopping=EarlyStopping("val_loss", patience=1))

    found = cross_validate(make, (x, y), 3, validation=0.2, prepare=prepare, seed=0, **ADVICE)
    assert all(sum(map(len, sides)) == 60 and not set.intersection(*sides) for sides in seen)
    assert [len(val) for _, val, _ in seen] == [8] * 3 and "val_loss" in found.folds[0].result.history[-1]
    seen.clear()
    cross_validate(make, (x, y), TimeSeriesSplit(2), validation=0.25, prepare=prepare, seed=0, **ADVICE)
    assert seen[0][1] == {*x[15:20, 0].tolist()}
    seen.clear()
    groups = np.repeat(np.arange(12), 5)
    cross_validate(make, (x, y), 3, groups=groups, validation=0.25, prepare=prepare, seed=0, **ADVICE)
    of = {value: group for value, group in zip(x[:, 0].tolist(), groups, strict=True)}
    assert all(not {of[one] for one in fitted} & {of[one] for one in val} for fitted, val, _ in seen)


def test_what_prepares_data_sees_the_training_rows_alone_and_may_give_batches() -> None:
    def scaled(train: Any, held_out: Any) -> tuple[Any, Any]:
        mean = train[0].mean(0)
        return batches((train[0] - mean, train[1]), 8, shuffle=True, seed=0), (held_out[0] - mean, held_out[1])

    found = cross_validate(make_trainer, (x + 3, y), KFold(2), prepare=scaled, seed=0, **ADVICE)
    assert found.folds[0].result.updates == 2 * 4  # batches of 8 of 30 rows
    with pytest.raises(SettingError, match=r"prepare\(train, \*others\) gave"):
        cross_validate(make_trainer, (x, y), 2, prepare=lambda train, held_out: train[:1], **ADVICE)


def shared_model() -> Iterator[Callable[[], Trainer[Any]]]:
    trainer, model, layer = make_trainer(), network(), nn.Linear(4, 2)
    yield lambda: trainer
    yield lambda: make_trainer(model)
    yield lambda: make_trainer(nn.Sequential(layer))
    yield lambda: make_trainer(_around(layer))
    yield lambda: _with_loss(model)


def _around(layer: nn.Linear) -> nn.Module:
    """A new module with new parameters, in the memory of another's."""
    other = nn.Linear(4, 2)
    other.weight = nn.Parameter(layer.weight.data)
    return other


LOSS = nn.Linear(2, 1)


def _with_loss(model: nn.Module) -> Trainer[Any]:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = LOSS

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.head(output)[:, 0] - target).square().mean()

    fresh, loss = network(), Learned()
    optimizer = torch.optim.SGD([*fresh.parameters(), *loss.parameters()], lr=0.1)
    return Trainer(fresh, optimizer, loss, console=False)


def normalized(layer: nn.Module) -> Callable[[], Trainer[Any]]:
    return lambda: make_trainer(nn.Sequential(layer, nn.Linear(4, 2)))


def test_statistics_that_another_fold_has_moved_are_refused_and_frozen_ones_are_not() -> None:
    with pytest.raises(SettingError, match=r"gave statistics '0.running_mean' of fold 0 again, to fold 1"):
        cross_validate(normalized(nn.BatchNorm1d(4, affine=False)), (x, y), 2, batch_size=16, epochs=1)
    layer = nn.Sequential(nn.BatchNorm1d(4, affine=False))
    freeze(layer)
    assert len(cross_validate(normalized(layer), (x, y), 2, batch_size=16, epochs=1).folds) == 2


@pytest.mark.parametrize("index", range(5))
def test_what_has_been_trained_in_another_fold_is_refused(index: int) -> None:
    make = list(shared_model())[index]
    with pytest.raises(SettingError, match=r"make_trainer\(\) gave .* again, to fold 1") as caught:
        cross_validate(make, (x, y), 2, batch_size=16, epochs=1)
    assert any("in fold 1 of 2" in note for note in caught.value.__notes__)


def test_a_trainer_that_has_been_trained_before_is_refused() -> None:
    trainer = make_trainer()
    trainer.fit((x, y), epochs=1, batch_size=16)
    with pytest.raises(SettingError, match="trained already"):
        cross_validate(lambda: trainer, (x, y), 2, **ADVICE)


def test_folds_that_share_a_directory_are_refused_before_the_second_is_trained(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="folds 0 and 1 would write"):
        cross_validate(lambda: make_trainer(checkpoint=Checkpoint(tmp_path / "run")), (x, y), 2, **ADVICE)


@pytest.mark.parametrize("slot", ["early_stopping", "checkpoint"])
def test_choosing_by_the_rows_held_out_is_refused(slot: str, tmp_path: Path) -> None:
    watching = EarlyStopping("val_loss") if slot == "early_stopping" else Checkpoint(tmp_path, best="val_loss")
    with pytest.raises(SettingError, match="watches 'val_loss'") as caught:
        cross_validate(lambda: make_trainer(**{slot: watching}), (x, y), 2, **ADVICE)
    assert "without validation=0.1: fit has no rows to validate on" in caught.value.__notes__[-1]


def test_rows_and_groups_on_both_sides_are_refused() -> None:
    rows = np.arange(60)
    with pytest.raises(DataError, match="fold 0 leaks: 10 rows"):
        cross_validate(make_trainer, (x, y), [(rows[:40], rows[30:])], **ADVICE)
    groups = np.repeat(np.arange(12), 5)
    with pytest.raises(DataError, match="fold 0 leaks: 1 groups"):
        cross_validate(make_trainer, (x, y), KFold(8), groups=groups, **ADVICE)
    assert len(cross_validate(make_trainer, (x, y), GroupKFold(3), groups=groups, **ADVICE).folds) == 3


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"folds": 1}, "from 2 to 60"),
        ({"folds": "five"}, "a number, a splitter of scikit-learn"),
        ({"folds": None}, "a number, a splitter of scikit-learn"),
        ({"folds": True}, "n_splits=2 or more"),
        ({"folds": [(range(50), [60])]}, "from 0 to 59"),
        ({"folds": [(range(50), [51, 51])]}, "each once"),
        ({"folds": [range(50)]}, "a pair"),
        ({"folds": []}, "without one split"),
        ({"validation": 1.0}, "below 1"),
        ({"groups": [1, 2]}, "2 values for 60 rows"),
        ({"data": x, "folds": StratifiedKFold(3)}, "target=classes"),
        ({"make_trainer": make_trainer()}, "a function that builds"),
        ({"make_trainer": network}, "gave a Sequential"),
        ({"data": batches((x, y), 8)}, "no data set of rows"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], reported: str) -> None:
    given: dict[str, Any] = {"make_trainer": make_trainer, "data": (x, y), "folds": 2, **ADVICE, **settings}
    places = [given.pop(name) for name in ("make_trainer", "data", "folds")]
    with pytest.raises((SettingError, DataError), match=reported):
        cross_validate(*places, **given)


def test_folds_that_were_cut_off_go_on_to_the_same_numbers(tmp_path: Path) -> None:
    def making(root: Path, *, dies: bool) -> Callable[[int], Trainer[Any]]:
        class Dying(Trainer[Any]):
            def end_epoch(self, metrics: dict[str, float]) -> None:
                if dies and self.progress.epoch == 3 and self.fold == 1:
                    raise KeyError("the power went")

        def make(fold: int) -> Trainer[Any]:
            model = network()
            trainer = Dying(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                nn.CrossEntropyLoss(),
                checkpoint=Checkpoint(root / str(fold), async_save=False),
                console=False,
            )
            trainer.fold = fold
            return trainer

        return make

    settings: dict[str, Any] = {"batch_size": 16, "epochs": 4, "seed": 2}
    whole = cross_validate(making(tmp_path / "whole", dies=False), (x, y), 3, **settings)
    with pytest.raises(KeyError):
        cross_validate(making(tmp_path / "cut", dies=True), (x, y), 3, resume="auto", **settings)
    resumed = cross_validate(making(tmp_path / "cut", dies=False), (x, y), 3, resume="auto", **settings)
    assert torch.equal(resumed.predictions, whole.predictions)
    assert [fold.numbers for fold in resumed.folds] == [fold.numbers for fold in whole.folds]
