"""A Trainer with FSDP on two processes gives what one process gives: weights, numbers, averages, predictions, files."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.fsdp_cases import Block, Net, adamw, differ, net
from distributed.pool import pool
from trainwright import (
    EMA,
    ClipNorm,
    ClipValue,
    EarlyStopping,
    MixedPrecision,
    NonFiniteError,
    Observer,
    SettingError,
    Trainer,
    load_weights,
)
from trainwright.distributed.fsdp import FSDP

EXACT = 1e-12


def rows(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(number, 3, generator=generator).double(), torch.randn(number, 1, generator=generator).double()


class Norms(Observer):
    wants = frozenset({"grad_norm"})

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_update(self, update: Any) -> None:
        self.seen.append(update.grad_norm)


class Encoding(Trainer[Net]):
    """A step that calls a method of the model, which is registered with FSDP."""

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model.head(self.model.encode(x)), y)


def made(parallel: Any, *, optimizer: Any = adamw, **settings: Any) -> Trainer[Net]:
    norms = Norms()
    trainer = Trainer(net(), optimizer, nn.MSELoss(), console=False, parallel=parallel, observers=[norms], **settings)
    trainer.norms = norms
    return trainer


def trained(parallel: Any, path: str, number: int, settings: dict[str, Any]) -> Any:
    trainer = made(parallel, **settings)
    data, val = rows(number), rows(7)
    result = trainer.fit(data, val, batch_size=4, epochs=3)
    trainer.save_weights(path)
    numbers = (result.history, trainer.evaluate(val, batch_size=3), trainer.norms.seen)
    return numbers, trainer.predict(val, batch_size=3)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused, clipped by norm 1": {"optimizer": partial(adamw, fused=True), "clip": ClipNorm(0.2, norm_type=1)},
    "momentum, clipped by norm inf": {
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "clip": ClipNorm(0.02, norm_type=math.inf),
        "accumulate": 2,
    },
    "clipped by value": {"clip": ClipValue(0.01)},
    "accumulated and clipped": {"accumulate": 3, "clip": ClipNorm(0.05)},
    "averaged": {"average": EMA(0.5), "accumulate": 2},
    "the best": {"early_stopping": EarlyStopping("val_loss", patience=1, restore_best=True)},
    "scaled": {"precision": MixedPrecision("fp16", init_scale=2.0**10, growth_interval=2), "clip": ClipNorm(0.05)},
    "skipping": {"on_nonfinite": "skip", "clip": 0.1},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "number"), [*((name, 13) for name in CASES), ("accumulated and clipped", 1)])
def test_two_processes_that_share_a_model_train_as_one(name: str, number: int, tmp_path: Path) -> None:
    one, two = str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")
    numbers, predicted = trained(None, one, number, CASES[name])
    shared, _ = pool(2).run(trained, FSDP({Block}), two, number, CASES[name])
    close(shared[0], numbers)
    torch.testing.assert_close(shared[1], predicted, rtol=0, atol=EXACT)
    assert differ(load_weights(two), load_weights(one)) < EXACT


def close(ours: Any, theirs: Any) -> None:
    """Nested numbers that are the same."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for key in theirs:
            close(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            close(one, other)
    else:
        assert ours == pytest.approx(theirs, rel=1e-11, abs=EXACT)


def by_method(parallel: Any) -> Any:
    trainer = Encoding(net(), adamw, nn.MSELoss(), console=False, parallel=parallel)
    trainer.fit(rows(8), batch_size=4, epochs=1)
    return trainer.predict(rows(3), batch_size=3)


def test_a_step_may_call_a_method_that_was_named() -> None:
    parallel = FSDP({Block, nn.Linear}, methods=("encode",))
    for predicted in pool(2).run(by_method, parallel):
        torch.testing.assert_close(predicted, by_method(None), rtol=0, atol=EXACT)


def spoilt(policy: str) -> Any:
    """One row that makes the loss NaN on the process that runs it."""
    x, y = rows(12)
    y[5] = float("nan")
    trainer = made(FSDP({Block}), on_nonfinite=policy)
    try:
        result = trainer.fit((x, y), batch_size=4, epochs=1)
    except NonFiniteError as error:
        return str(error).splitlines()[0]
    (prediction,) = trainer.predict((x[:1],), batch_size=1)
    return result.skipped, bool(torch.isfinite(prediction).all())


def test_a_loss_that_is_not_finite_on_one_process_is_judged_on_all() -> None:
    said = pool(2).run(spoilt, "raise")
    assert said[0] == said[1] and "is not finite" in said[0]
    for skipped, finite in pool(2).run(spoilt, "skip"):
        assert skipped == 1 and finite


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def on_meta() -> tuple[str, list[float]]:
    """A model that no process could build whole."""
    with torch.device("meta"):
        model = Large()
    trainer = Trainer(model, adamw, nn.MSELoss(), console=False, parallel=FSDP({Block}), device="cpu")
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(16, 5, generator=generator), torch.randn(16, 1, generator=generator)
    history = trainer.fit(data, batch_size=8, epochs=3).history
    return str(trainer.device), [row["loss"] for row in history]


def test_a_model_on_meta_is_made_and_trained() -> None:
    (device, losses), (_, others) = pool(2).run(on_meta)
    assert device == "cpu" and losses == others and losses[2] < losses[0]


def before() -> str:
    model = net()
    try:
        Trainer(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), console=False, parallel=FSDP({Block}))
    except SettingError as error:
        return str(error)
    return ""


def test_an_optimizer_that_was_built_before_is_refused_when_the_trainer_is_built() -> None:
    for text in pool(2).run(before):
        assert "lambda model: AdamW(model.parameters(), lr=...)" in text
