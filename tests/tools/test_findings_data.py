"""Findings in what the model gets: inputs out of scale are found, and batches that are mostly overhead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from looked_at import CLASSES, convolutional, found, perceptron, rows, trainer_of
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from trainwright import Normalize, Trainer, batches
from trainwright.tools import findings_data
from trainwright.tools.findings_data import DeviceFacts, small_batch, tiny_batch, update_seconds

NAME = "inputs not normalised"


def shifted(scale: float, offset: float = 0.0, *shape: int) -> list[tuple[Tensor, Tensor]]:
    return [(scale * x + offset, y) for x, y in rows(32, *shape)]


@pytest.mark.parametrize(
    ("scale", "offset", "problem"),
    [(1, 0, False), (2, 0, False), (1, 2, False), (5, 0, True), (1, 4, True), (1e-3, 0, True), (100, 0, True)],
)
def test_inputs_are_judged_by_the_rule(scale: float, offset: float, problem: bool) -> None:
    assert (NAME in found(trainer_of(perceptron()), shifted(scale, offset))) is problem


def test_the_mean_and_deviation_that_were_seen_are_told() -> None:
    batches = shifted(50, 200)
    seen = torch.cat([x for x, _ in batches])
    told = found(trainer_of(perceptron()), batches)[NAME].what
    assert f"mean {seen.mean():.3g}, standard deviation {seen.std(correction=0):.3g}," in told


def test_one_feature_out_of_scale_among_many_is_found() -> None:
    batches = [(torch.cat([x.repeat(1, 20)[:, :100], 12 + x[:, :1]], 1), y) for x, y in rows()]
    assert NAME in found(trainer_of(nn.Linear(101, CLASSES)), batches)


@pytest.mark.parametrize(("load", "divide", "problem"), [(load_digits, 1, True), (load_digits, 16, False)])
def test_real_data_are_found_as_they_come_and_passed_over_when_scaled(load: Any, divide: float, problem: bool) -> None:
    x, y = load(return_X_y=True)
    x, y = torch.tensor(x / divide, dtype=torch.float32), torch.tensor(y)
    ready = list(zip(x.split(64), y.split(64), strict=True))
    assert (NAME in found(trainer_of(nn.Linear(64, 10)), ready)) is problem


def test_columns_of_very_different_scale_are_found_and_standardised_ones_are_not() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    model = nn.Linear(30, 2)
    one = found(trainer_of(model), list(zip(x.split(64), y.split(64), strict=True)))[NAME]
    names: dict[str, Any] = {"x": x}
    exec(one.fix.partition("#")[0], names)
    assert found(trainer_of(model), list(zip(names["x"].split(64), y.split(64), strict=True))) == {}


def test_token_numbers_and_inputs_that_the_model_normalises_itself_are_passed_over() -> None:
    tokens = [(torch.arange(64).view(32, 2) * 7, y) for _, y in rows()]
    embedding = nn.Sequential(nn.Embedding(500, 4), nn.Flatten(), nn.Linear(8, CLASSES))
    assert found(trainer_of(embedding), tokens) == {}
    own = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    assert found(trainer_of(own), shifted(100)) == {}


def test_numbers_that_a_weight_has_touched_are_no_inputs() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 100 * x.relu()

    assert found(trainer_of(nn.Sequential(nn.Linear(6, 8), Large(), nn.Linear(8, CLASSES))), rows()) == {}


def test_images_get_a_line_with_normalise_and_what_was_seen_by_which_nothing_is_found() -> None:
    pixels = torch.randint(0, 256, (96, 1, 6, 6), dtype=torch.uint8)
    y = torch.arange(96) % CLASSES

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolutional()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x.float())
            return out

    trainer = trainer_of(Bytes())
    one = found(trainer, list(zip(pixels.split(32), y.split(32), strict=True)))[NAME]
    call = one.fix.replace("...", "(pixels, y), 32")
    mended = eval(call, {"batches": batches, "Normalize": Normalize, "pixels": pixels, "y": y})
    ready = list(mended)
    assert abs(float(ready[0][0].mean())) < 0.1 and NAME not in found(trainer, ready)


def test_numbers_that_are_not_finite_are_found() -> None:
    bad = rows()
    bad[1][0][3, 2] = torch.nan
    assert list(found(trainer_of(perceptron()), bad)) == ["inputs that are not finite"]


@pytest.mark.parametrize(
    ("seconds", "found_tiny"), [((0.001, 0.0011), True), ((0.001, 0.0018), False), ((0.03, 0.031), False)]
)
@pytest.mark.parametrize("every", [1, 2])
def test_a_tiny_batch_is_found_by_the_time_of_twice_the_rows(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], found_tiny: bool, every: int
) -> None:
    monkeypatch.setattr(findings_data, "update_seconds", lambda _, batches: seconds[len(batches[0][0]) == 4])
    assert ("tiny batch" in found(trainer_of(perceptron(), accumulate=every), rows(2, batches=6))) is found_tiny


def test_a_usual_batch_is_not_even_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(findings_data, "update_seconds")
    assert found(trainer_of(perceptron()), rows(32)) == {}


@pytest.mark.parametrize(
    ("size", "ratio", "problem"), [(4, 1.1, True), (16, 1.2, True), (4, 1.6, False), (17, 1.0, False)]
)
def test_the_rule_of_tiny_batches(size: int, ratio: float, problem: bool) -> None:
    assert (tiny_batch(rows=size, ratio=ratio) is not None) is problem


def test_a_batch_that_cannot_be_doubled_is_not_timed() -> None:
    class Sure(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            assert len(x) == 2
            return nn.functional.cross_entropy(self.model(x), y)

    assert found(trainer_of(perceptron(), kind=Sure), rows(2)) == {}
    ragged = [{"x": x, "y": y, "names": ["a", "b"]} for x, y in rows(2)]

    class Named(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            return nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

    assert found(trainer_of(perceptron(), kind=Named), ragged) == {}


@pytest.mark.parametrize(
    ("looks", "busy", "used", "problem"), [(20, 2, 1, True), (20, 15, 1, False), (20, 2, 60, False), (2, 0, 1, False)]
)
def test_the_rule_of_small_batches_on_a_device(looks: int, busy: int, used: int, problem: bool) -> None:
    facts = DeviceFacts(device="GPU", rows=32, looks=looks, busy=busy, used=used << 30, total=80 << 30)
    one = small_batch(facts)
    assert (one is not None) is problem
    assert one is None or "batch_size=64" in one.fix


def test_a_device_is_looked_at_between_updates_often_enough_for_the_rule() -> None:
    told = findings_data.speeds(trainer_of(perceptron()), rows())
    assert len(told) >= findings_data.LOOKS - 1 >= 4
    assert all((one.updates, one.rows, one.looks) == (4, 128, 0) for one in told[:-1])  # a CPU is not looked at


def test_an_update_is_timed_in_seconds() -> None:
    assert update_seconds(trainer_of(perceptron()), rows(4), updates=3) > 0


def test_weights_and_columns_in_float64_are_found_with_both_casts() -> None:
    batches = [(x.double(), y) for x, y in rows()]
    one = found(trainer_of(perceptron().double()), batches)["float64 model and data"]
    assert one.level == "problem" and "model.float()" in one.fix and "x.float()" in one.fix
    assert one.where == ("model.0.weight", "model.0.bias", "model.3.weight", "model.3.bias", "batch[0]")


def test_a_column_or_a_model_in_float64_alone_is_found_alone() -> None:
    class Casting(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            x = torch.as_tensor(batch["x"]).to(next(self.model.parameters()).dtype)
            return nn.functional.cross_entropy(self.model(x), batch["y"])

    wide = [{"x": x.double(), "y": y} for x, y in rows()]
    narrow = [{"x": x, "y": y} for x, y in rows()]
    assert found(trainer_of(perceptron(), kind=Casting), wide)["float64 data"].where == ("batch['x']",)
    assert set(found(trainer_of(perceptron().double(), kind=Casting), narrow)) == {"float64 model"}
    assert found(trainer_of(perceptron(), kind=Casting), narrow) == {}


def test_float64_is_a_note_where_it_is_the_default_of_new_tensors() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        one = found(trainer_of(perceptron()), rows())["float64 model and data"]
    finally:
        torch.set_default_dtype(before)
    assert one.level == "note"
