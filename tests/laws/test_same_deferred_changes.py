"""Law Same, deferred: batches that count nothing, hooks after an update, groups whose kernels leave nothing out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laws.deferred_runs import Watches, data, defer_on_cpu, net, same, state, trained
from laws.test_same_deferred import masked, poisoned
from trainwright import Checkpoint, Observer, StepLR, Trainer, Updates
from trainwright.core.errors import NonFiniteError


def padded(*empty: int) -> list[Any]:
    """Data of which some batches have no target to learn from: torch's mean over nothing is NaN."""
    batches = data()
    for at in empty:
        batches[at] = (batches[at][0], torch.full_like(batches[at][1], -100))
    return batches


def of_ones_own(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output, target)


LOSSES: dict[str, Any] = {"module": nn.CrossEntropyLoss(), "function": of_ones_own}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("empty", [(1,), (0, 4), (0, 1, 2)])
def test_a_micro_batch_that_counts_nothing_is_left_out_unless_all_do(
    empty: tuple[int, ...], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        model = nn.Sequential(net(), nn.LogSoftmax(-1))
        trainer, reported, error = trained(padded(*empty), model=model, loss=LOSSES[loss], accumulate=3, epochs=2)
        assert (type(error) is NonFiniteError) == (len(empty) == 3)
        return masked(state(trainer)), reported.records, str(error)

    at_once = run()
    defer_on_cpu(monkeypatch)
    late = run()
    assert same(at_once[0], late[0])
    assert at_once[1:] == late[1:]


class Clamped(Trainer[Any]):
    """Halves a weight after each update."""

    def after_update(self) -> None:
        with torch.no_grad():
            self.model[2].bias.mul_(0.5)


def test_no_after_update_follows_an_update_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> Any:
        trainer, _, error = trained(poisoned(2), cls=Clamped)
        assert str(error).startswith("update 3: the loss")
        return trainer.model.state_dict()

    at_once = weights()
    defer_on_cpu(monkeypatch)
    assert same(at_once, weights())


class Changes(Trainer[Any]):
    """Changes its optimizer before the second epoch."""

    change: Any = None

    def begin_epoch(self, epoch: int) -> None:
        if epoch == 1:
            self.change(self.optimizer)


def unfused(optimizer: Any) -> None:
    optimizer.param_groups[0]["fused"] = False


def hooked(optimizer: Any) -> None:
    def moves(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["params"][0].data.mul_(0.9)

    optimizer.register_step_post_hook(moves)


def dampened(optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["dampening"] = 0.5
    weight = group["params"].pop()
    optimizer.add_param_group({"params": [weight], "lr": 0.2})
    optimizer.state.clear()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("change", [unfused, hooked, dampened])
def test_groups_that_change_in_a_run_are_left_out_too(
    change: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        own = type("Own", (Changes,), {"change": staticmethod(change)})
        rows = lambda epoch: poisoned(epoch) if epoch else data()  # noqa: E731
        trainer, _, error = trained(rows, cls=own, optimizer="sgd", epochs=2, on_nonfinite=policy)
        assert type(error) is (type(None) if policy == "skip" else NonFiniteError)
        return state(trainer), str(error)

    at_once, said = run()
    defer_on_cpu(monkeypatch)
    late, said_late = run()
    assert said == said_late
    assert same(at_once[0], late[0])


def test_a_run_resumes_from_a_checkpoint_of_an_optimizer_that_was_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(folder: str, *, fused: bool, epochs: int) -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        slot = Checkpoint(tmp_path / folder)
        trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, checkpoint=slot, on_nonfinite="skip")
        trainer.fit(data() if epochs == 1 else poisoned(3), epochs=epochs, resume="auto", resume_data=epochs == 1)
        return state(trainer)

    fit("now", fused=False, epochs=1)
    fit("late", fused=False, epochs=1)
    with pytest.warns(UserWarning, match="fused=False of the optimizer's group 0 is the checkpoint's"):
        at_once = fit("now", fused=True, epochs=2)
    defer_on_cpu(monkeypatch)
    with pytest.warns(UserWarning, match="fused=False"):
        late = fit("late", fused=True, epochs=2)
    assert same(at_once, late)


class Logs(Trainer[Any]):
    """Logs the number of each update after it."""

    def after_update(self) -> None:
        self.log("number", float(self.progress.updates))


class Thinned(Watches):
    """Hears of every third update."""

    every = Updates(3)


def test_a_record_holds_nothing_that_was_logged_after_an_update_before_it() -> None:
    reported: Observer = Thinned()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    trainer = Logs(model, optimizer, nn.CrossEntropyLoss(), console=False, observers=[reported])
    reported.trainer = trainer
    trainer.fit(data(), epochs=1)
    assert [(one.update, one.values["number"]) for one in reported.records] == [(3, 3.0), (6, 6.0)]
    assert trainer.history[0]["number"] == pytest.approx((4 * (1 + 2 + 3 + 4 + 5) + 2 * 6) / 22)


def test_a_run_that_applies_nothing_any_more_ends_at_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fit.run", "update.deferred_check"):
        monkeypatch.setattr(f"trainwright.{module}.PATIENCE", 5)

    def run() -> Any:
        slots: dict[str, Any] = {"on_nonfinite": "skip", "schedule": StepLR(Updates(1), gamma=0.5)}
        trainer, _, error = trained(lambda epoch: [*data()[:3], *(poisoned(0)[:1] * 20)], epochs=1, **slots)
        assert "5 updates in a row" in str(error)
        counted = trainer.result.updates, trainer.result.skipped, trainer.progress.batch, trainer.progress.rows
        return counted, trainer.optimizer.param_groups[0]["lr"]

    at_once = run()
    assert at_once[0] == (3, 5, 8, 32)
    defer_on_cpu(monkeypatch)
    assert run() == at_once
