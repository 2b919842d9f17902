"""`Checkpoint(trainable_only=True)`: small checkpoints of adapters on a frozen model, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    CheckpointError,
    EarlyStopping,
    SettingError,
    Trainer,
    batches,
    freeze,
    latest_checkpoint,
    load_weights,
)

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * 2


class Adapted(nn.Module):
    """A large frozen part with a BatchNorm, and a small trained one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 16))
        self.norm = nn.BatchNorm1d(16)
        self.adapter = nn.Linear(16, 4, bias=False)
        self.head = nn.Linear(4, 1)
        freeze(self.base)
        freeze(self.norm, norm="train")  # its statistics still move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.adapter(self.norm(self.base(x))))
        return output


class Killed(Exception):
    """Ends a run, as a kill does."""


class Stops(Trainer[Any]):
    stops_at = -1

    def after_update(self) -> None:
        if self.progress.updates == self.stops_at:
            raise Killed


def made(directory: Any = None, model: Any = None, *, best: Any = None, restore: bool = False, **slots: Any) -> Any:
    model = model or Adapted()
    if directory is not None:
        slots["checkpoint"] = Checkpoint(
            directory, best=best, restore_best=restore, trainable_only=True, async_save=False
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Stops(model, torch.optim.AdamW(trained, lr=0.05), nn.MSELoss(), console=False, **slots)


def data() -> Any:
    return batches((X, Y), 8, shuffle=True, seed=0), batches((X, Y), 32)


def same(one: Any, other: Any) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SLOTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "EMA": {"average": EMA(0.9)},
    "SWA": {"average": SWA(start=0.3)},
    "early stopping": {"early_stopping": EarlyStopping("val_loss", patience=9)},
}


@pytest.mark.parametrize("slots", SLOTS)
def test_a_killed_run_is_resumed_bit_for_bit(slots: str, tmp_path: Path) -> None:
    whole = made(**SLOTS[slots])
    complete = whole.fit(*data(), epochs=4)
    killed = made(tmp_path / "run", **SLOTS[slots])
    killed.stops_at = 21
    with pytest.raises(Killed):
        killed.fit(*data(), epochs=4)
    resumed = made(tmp_path / "run", **SLOTS[slots])
    result = resumed.fit(*data(), epochs=4, resume="auto")
    assert result.history == complete.history
    assert same(resumed.model, whole.model)
    again = made(tmp_path / "run", **SLOTS[slots])
    assert again.fit(*data(), epochs=4, resume="auto").history == complete.history
    assert same(again.model, whole.model)


@pytest.mark.parametrize("slots", SLOTS)
def test_the_frozen_weights_are_in_no_file_and_all_else_is(slots: str, tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", **SLOTS[slots])
    trainer.fit(*data(), epochs=2)
    path = latest_checkpoint(tmp_path / "run")
    assert path is not None
    size = sum(file.stat().st_size for file in path.iterdir())
    frozen = sum(parameter.nbytes for parameter in trainer.model.base.parameters())
    assert frozen > 50_000 and size < 40_000
    with pytest.warns(UserWarning, match=r"trainable weights alone, 6 tensors, and not 6 frozen ones: load_weights\("):
        held = load_weights(tmp_path / "run", which="last")
    assert set(held) == {
        *("adapter.weight", "head.weight", "head.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }


def test_load_weights_takes_the_frozen_weights_of_the_model(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run")
    trainer.fit(*data(), epochs=2)
    model = Adapted()
    load_weights(tmp_path / "run", model, "last")  # without a warning
    assert same(model, trainer.model)
    other = Adapted(seed=1)
    with pytest.warns(UserWarning, match=r"4 frozen weights differ from those of its run: base.0.weight"):
        load_weights(tmp_path / "run", other, "last")
    ours, theirs = other.state_dict(), trainer.model.state_dict()
    assert torch.equal(ours["adapter.weight"], theirs["adapter.weight"])
    assert not torch.equal(ours["base.0.weight"], theirs["base.0.weight"])
    with pytest.raises(CheckpointError, match="lacks frozen ones of its run"):
        load_weights(tmp_path / "run", nn.Sequential(nn.Linear(16, 4)), "last")


@pytest.mark.parametrize("slots", ["nothing", "EMA"])
def test_the_best_comes_back(slots: str, tmp_path: Path) -> None:
    for restored in (
        made(tmp_path / "a", best="val_loss", restore=True, **SLOTS[slots]),
        made(tmp_path / "b", early_stopping=EarlyStopping("val_loss", patience=9), **SLOTS[slots]),
    ):
        torch.manual_seed(0)
        result = restored.fit(*data(), epochs=3)
        assert result.weights.endswith(f"best of epoch {result.best.epoch}")
        assert restored.evaluate(data()[1])["val_loss"] == pytest.approx(result.best.value, rel=1e-6)


def test_other_frozen_weights_are_refused_and_frozen_ones_in_an_optimizer_are_saved(tmp_path: Path) -> None:
    made(tmp_path / "run").fit(*data(), epochs=1)
    other = made(tmp_path / "run", Adapted(seed=1))
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"4 frozen weights differ(.|\n)*load them before Trainer"):
        other.fit(*data(), epochs=2, resume="auto")
    assert all(torch.equal(before[name], tensor) for name, tensor in other.model.state_dict().items())
    model = Adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    all_in = Stops(
        model, optimizer, nn.MSELoss(), checkpoint=Checkpoint(tmp_path / "all", trainable_only=True), console=False
    )
    all_in.fit(*data(), epochs=1)
    assert set(load_weights(tmp_path / "all", which="last")) == set(model.state_dict())


def test_a_parameter_that_must_be_there_is_missed(tmp_path: Path) -> None:
    made(tmp_path / "run").fit(*data(), epochs=1)
    model = Adapted()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: extra.bias, extra.weight"):
        made(tmp_path / "run", model).fit(*data(), epochs=2, resume="auto")


def test_the_switch_may_change_between_sessions(tmp_path: Path) -> None:
    whole = made()
    whole.fit(*data(), epochs=3)
    for first, second in ((True, False), (False, True)):
        trainer = made()
        for epochs, only in ((2, first), (3, second)):
            model = Adapted()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            checkpoint = Checkpoint(tmp_path / str(first), trainable_only=only)
            adamw = torch.optim.AdamW(trained, lr=0.05)
            trainer = Trainer(model, adamw, nn.MSELoss(), checkpoint=checkpoint, console=False)
            trainer.fit(*data(), epochs=epochs, resume="auto")
        assert same(trainer.model, whole.model)


def test_a_flag_is_asked_for() -> None:
    with pytest.raises(SettingError, match="trainable_only='yes'"):
        Checkpoint("runs/1", trainable_only="yes")  # type: ignore[arg-type]
