"""A Trainer of a sharded model goes on from its checkpoint, on any number of processes, sharded or not."""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.pool import pool
from trainwright import EMA, Checkpoint, EarlyStopping, Trainer, batches, latest_checkpoint, load_weights
from trainwright.distributed.fsdp import FSDP

UPDATES, CUT = 14, 7


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)).double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).double()
    return x, x.sum(1, keepdim=True)


def fit(directory: Path, updates: int, shards: bool, named: bool, step: int = 1) -> dict[str, Any]:
    """Train from the newest checkpoint to an update, with an average and the best weights restored.

    `step` -1: the optimizers hold their parameters in reverse.
    """

    both = {
        "one": lambda model: torch.optim.AdamW(list(model.parameters())[:2][::step], lr=0.05),
        "two": lambda model: torch.optim.SGD(list(model.parameters())[2:][::step], lr=0.05, momentum=0.9),
    }
    trainer = (Both if named else Trainer)(
        net(),
        both if named else lambda model: torch.optim.AdamW(list(model.parameters())[::step], lr=0.05),
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


@pytest.mark.sample(3)
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


@pytest.mark.slow
@pytest.mark.parametrize(("size", "shards"), [(2, True), (1, False)])
def test_a_sharded_optimizer_is_resumed_with_its_parameters_in_another_order(
    cut: tuple[Path, dict[str, Any], bool], tmp_path: Path, size: int, shards: bool
) -> None:
    directory, undisturbed, named = cut
    shutil.copytree(directory, tmp_path / "run")
    for one in pool(size).run(fit, tmp_path / "run", UPDATES, shards, named, -1):
        for name, value in one["weights"].items():
            assert torch.allclose(value, undisturbed["weights"][name], rtol=0, atol=1e-9), name


# Early stopping that keeps the weights of its best on the host.


class Tied(nn.Module):
    """Two names for one weight, and buffers where there is a `norm`."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.body[2].weight = self.body[0].weight
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)).sum(1, keepdim=True)


def tied(norm: bool = True) -> Tied:
    torch.manual_seed(0)
    return Tied(norm).double()


MODELS = {"blocks": net, "tied": tied, "tied without norm": functools.partial(tied, norm=False)}
STOPPING: dict[str, Any] = {
    # the best comes late, and what is saved before is beaten; the rate is far too high, and the first stays the best
    "improves": {"lr": 0.05, "patience": 9},
    "never improves again": {"lr": 1.5, "patience": 20},
}


def stop_early(
    directory: Path, updates: int, shards: bool, *, case: str, ema: bool = False, model: str = "blocks"
) -> dict[str, Any]:
    """Train from the newest checkpoint to an update; the weights that the model is left with, and the saved best."""
    settings = STOPPING[case]
    trainer = Trainer(
        MODELS[model](),
        lambda made: torch.optim.SGD(made.parameters(), lr=settings["lr"]),
        nn.L1Loss(),
        average=EMA(0.5) if ema else None,
        early_stopping=EarlyStopping("val_loss", patience=settings["patience"]),
        checkpoint=Checkpoint(directory),
        parallel=FSDP(blocks={nn.Sequential}) if shards else "auto",
        device="cpu",
        console=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_updates")  # more updates are asked for than when it was saved
        train = batches(data(), 8, shuffle=True, seed=3)
        result = trainer.fit(train, batches(data(), 16), epochs=6, max_updates=updates, resume="auto")
    weights = {
        name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in trainer.model.state_dict().items()
    }
    assert result.best is not None
    return {
        "weights": {name: value.detach().clone() for name, value in weights.items()},
        "best": result.best.update,
        "left": result.weights,
        "losses": [row["val_loss"] for row in result.history],
    }


def agree(one: dict[str, Any], other: dict[str, Any], *, tolerance: float) -> None:
    """Whether two runs end with the same best and its weights."""
    assert (one["best"], one["left"]) == (other["best"], other["left"])
    assert one["losses"] == pytest.approx(other["losses"], rel=0, abs=tolerance)
    for name, value in one["weights"].items():
        assert torch.allclose(value, other["weights"][name], rtol=0, atol=tolerance), name


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "ema", "model", "before", "after"),
    [
        ("improves", False, "blocks", True, True),
        ("never improves again", False, "blocks", True, True),
        ("never improves again", True, "tied", True, True),
        ("improves", True, "tied", False, True),
        ("never improves again", False, "tied", False, True),
        ("never improves again", True, "blocks", True, False),
    ],
)
def test_early_stopping_of_a_sharded_model_is_resumed_with_the_weights_of_its_best(
    alone: None, tmp_path: Path, case: str, ema: bool, model: str, before: bool, after: bool
) -> None:
    settings: dict[str, Any] = {"case": case, "ema": ema, "model": model}
    undisturbed = stop_early(tmp_path / "whole", UPDATES * 2, False, **settings)
    assert (undisturbed["best"] > 10) == (case == "improves"), undisturbed["best"]
    stop_early(tmp_path / "cut", 10, before, **settings)
    agree(stop_early(tmp_path / "cut", UPDATES * 2, after, **settings), undisturbed, tolerance=0)


def test_a_resumed_best_is_sharded_in_the_next_checkpoint(alone: None, tmp_path: Path) -> None:
    """Each process holds and writes its part of it, also where it was saved by a model of whole weights."""
    case = "never improves again"
    stop_early(tmp_path, 10, False, case=case)
    stop_early(tmp_path, 20, True, case=case)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    listed = json.loads((newest / "shards.json").read_text())["tensors"]
    assert {name for name in listed if name.startswith("early_stopping.weights.")} == {
        f"early_stopping.weights.{name}" for name, _ in net().named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", STOPPING)
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize(("size", "shards"), [(2, True), (3, True), (2, False), (1, True)])
def test_early_stopping_of_a_sharded_model_is_resumed_on_another_world_size(
    tmp_path: Path, case: str, ema: bool, size: int, shards: bool
) -> None:
    settings = functools.partial(stop_early, case=case, ema=ema)
    undisturbed = stop_early(tmp_path / "whole", UPDATES * 2, False, case=case, ema=ema)
    pool(2).run(settings, tmp_path / "cut", 10, True)
    for one in pool(size).run(settings, tmp_path / "cut", UPDATES * 2, shards):
        agree(one, undisturbed, tolerance=1e-9)


@pytest.mark.slow
def test_tied_weights_of_a_resumed_best_are_one_on_every_rank(tmp_path: Path) -> None:
    """The ranks compare their parts of them; three rows on two ranks are not dealt evenly."""
    case, model = "never improves again", "tied without norm"
    settings = functools.partial(stop_early, case=case, model=model)
    undisturbed = stop_early(tmp_path / "whole", UPDATES * 2, False, case=case, model=model)
    pool(2).run(settings, tmp_path / "cut", 10, True)
    for one in pool(2).run(settings, tmp_path / "cut", UPDATES * 2, True):
        agree(one, undisturbed, tolerance=1e-9)
