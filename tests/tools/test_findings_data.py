"""Findings in what the model gets: inputs out of scale are found, and batches that are mostly overhead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from looked_at import CLASSES, convolutional, found, perceptron, rows, trainer_of
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from trainwright import Normalise, Trainer, batches
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
    mended = eval(call, {"batches": batches, "Normalise": Normalise, "pixels": pixels, "y": y})
    ready = list(mended)
    assert abs(float(ready[0][0].mean())) < 0.1 and NAME not in found(trainer, ready)


def test_numbers_that_are_not_finite_are_found() -> None:
    bad = rows()
    bad[1][0][3, 2] = torch.nan
    assert list(found(trainer_of(perceptron()), bad)) == ["inputs that are not finite"]


def test_a_tiny_batch_is_found_and_a_usual_one_is_not_even_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tiny batch" in found(trainer_of(perceptron()), rows(2))
    assert "tiny batch" in found(trainer_of(perceptron(), accumulate=2), rows(2, batches=6))
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
    assert 0 < update_seconds(trainer_of(perceptron()), rows(4), updates=3) < 1
