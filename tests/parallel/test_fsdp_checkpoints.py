"""A Trainer of a sharded model goes on from its checkpoint, on any number of processes, sharded or not."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright import EMA, Checkpoint, Trainer, batches, load_weights
from trainwright.parallel.fsdp import FSDP
from world.pool import pool

UPDATES, CUT = 14, 7


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)).double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).double()
    return x, x.sum(1, keepdim=True)


def fit(directory: Path, updates: int, shards: bool, named: bool) -> dict[str, Any]:
    """Train from the newest checkpoint to an update, with an average and the best weights restored."""

    both = {
        "one": lambda model: torch.optim.AdamW(list(model.parameters())[:2], lr=0.05),
        "two": lambda model: torch.optim.SGD(list(model.parameters())[2:], lr=0.05, momentum=0.9),
    }
    trainer = (Both if named else Trainer)(
        net(),
        both if named else lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        nn.MSELoss(),
        average=EMA(0.9),
        checkpoint=Checkpoint(directory, best="val_loss", restore_best=True),
        parallel=FSDP(blocks={nn.Sequential}) if shards else "auto",
        console=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more updates are asked for than when it was saved
        train = batches(data(), 8, shuffle=True, seed=3)
        result = trainer.fit(train, batches(data(), 16), epochs=6, max_updates=updates, resume="auto")
    weights = {name: value.full_tensor() if shards else value for name, value in trainer.model.state_dict().items()}
    assert result.best is not None and result.best.path is not None
    return {
        "weights": {name: value.detach().clone() for name, value in weights.items()},
        "best": (result.best.update, result.best.path.name),
        "loss": result.history[-1]["val_loss"],
        "left": result.weights,
    }


class Both(Trainer[nn.Sequential]):
    """Steps both of its optimizers in each update."""

    def update(self, window: Any) -> None:
        for x, y in window:
            for name in ("one", "two"):
                self.minimize(nn.functional.mse_loss(self.model(x), y), name)


@pytest.fixture(scope="module", params=[False, True], ids=["one optimizer", "two"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], bool]:
    """A run that was ended in the middle of an epoch, and how one that was not ends."""
    base = tmp_path_factory.mktemp("fsdp")
    undisturbed, _ = pool(2).run(fit, base / "whole", UPDATES, True, request.param)
    pool(2).run(fit, base / "cut", CUT, True, request.param)
    return base / "cut", undisturbed, request.param


@pytest.mark.parametrize(("size", "shards"), [(2, True), (3, True), (2, False), (1, True), (1, False)])
def test_a_run_of_a_sharded_model_goes_on_as_if_it_had_not_ended(
    cut: tuple[Path, dict[str, Any], bool], tmp_path: Path, size: int, shards: bool
) -> None:
    directory, undisturbed, named = cut
    shutil.copytree(directory, tmp_path / "run")
    for one in pool(size).run(fit, tmp_path / "run", UPDATES, shards, named):
        assert (one["best"], one["left"]) == (undisturbed["best"], undisturbed["left"])
        assert one["loss"] == pytest.approx(undisturbed["loss"], rel=1e-9)
        for name, value in one["weights"].items():
            assert torch.allclose(value, undisturbed["weights"][name], rtol=0, atol=1e-9), name
    best = load_weights(tmp_path / "run", net())
    assert all(torch.allclose(best[name], undisturbed["weights"][name], rtol=0, atol=1e-9) for name in best)
