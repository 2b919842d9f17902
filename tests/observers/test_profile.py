"""A profile of a few updates: what trace and table hold, what it costs, and that the run is the same without it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import SettingError, Trainer, Updates, batches
from trainwright.observers import Profile

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 3


class Killed(Trainer[Any]):
    at = 7

    def after_update(self) -> None:
        if self.progress.updates == self.at:
            raise OSError("gone")


def made(*observers: Any, cls: Any = Trainer, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(model, optimizer, nn.CrossEntropyLoss(), console=False, observers=observers, **settings)


def data() -> Any:
    return batches((x, y), 4, shuffle=True, seed=0)


def steps(path: Path) -> int:
    """How many steps of an optimizer a trace holds."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return sum(event.get("name") == "Optimizer.step#SGD.step" for event in trace["traceEvents"])


def test_the_trace_holds_the_updates_that_were_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile(tmp_path / "deep", after=4, updates=3, rows=5)
    made(profile).fit(data(), epochs=2)
    assert profile.path == tmp_path / "deep" / "updates-5-7.json.gz"
    assert steps(profile.path) == 3
    out = capsys.readouterr().out
    assert out.startswith("profile of updates 5 to 7; ")
    assert out.count("aten::") + out.count("Optimizer.step") + out.count("ProfilerStep") <= 5 and "Self CPU %" in out
    assert not torch.autograd._profiler_enabled()


def test_a_profile_across_epochs_and_validations_counts_updates(tmp_path: Path) -> None:
    profile = Profile(tmp_path, after=8, updates=5, rows=0)
    made(profile).fit(data(), data(), epochs=2, validate=Updates(3))
    assert profile.path is not None and profile.path.name == "updates-9-13.json.gz"
    assert steps(profile.path) == 5


def test_each_fit_is_profiled_and_updates_are_counted_over_all(tmp_path: Path) -> None:
    trainer = made(Profile(tmp_path, after=1, updates=2, rows=0))
    for _ in range(2):
        trainer.fit(data(), epochs=1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["updates-12-13.json.gz", "updates-2-3.json.gz"]


def test_what_was_recorded_before_an_error_is_written(tmp_path: Path) -> None:
    profile = Profile(tmp_path, after=4, updates=9, rows=0)
    with pytest.raises(OSError, match="gone"):
        made(profile, cls=Killed).fit(data(), epochs=2)
    assert profile.path is not None and profile.path.name == "updates-5-7.json.gz"
    assert not torch.autograd._profiler_enabled()
    made().fit(data(), epochs=1)


@pytest.mark.parametrize("after", [20, 19, 50])
def test_a_run_that_ends_before_says_so(tmp_path: Path, after: int, capsys: pytest.CaptureFixture[str]) -> None:
    made(Profile(tmp_path, after=after, updates=2)).fit(data(), epochs=2)
    out = capsys.readouterr().out
    if after == 19:
        assert "profile of updates 20 to 20" in out
    else:
        assert out == f"profile: nothing recorded, for the run ended at update 20, before {after + 1}\n"
    assert not torch.autograd._profiler_enabled()


def test_updates_outside_are_not_recorded_and_cost_no_call(tmp_path: Path) -> None:
    calls = {name: 0 for name in ("warm_up", "begin", "end")}

    class Counted(Profile):
        def warm_up(self, device: Any) -> None:
            calls["warm_up"] += 1
            super().warm_up(device)

        def begin(self) -> None:
            calls["begin"] += 1
            super().begin()

        def end(self, update: int) -> None:
            calls["end"] += 1
            super().end(update)

    class Counts(Trainer[Any]):
        pauses = 0

        def _between_updates(self, *args: Any, **named: Any) -> None:
            self.pauses += 1
            super()._between_updates(*args, **named)

    trainer = made(Counted(tmp_path, after=12, updates=4, rows=0), cls=Counts)
    trainer.fit(data(), epochs=4)
    alone = made(cls=Counts)
    alone.fit(data(), epochs=4)
    assert calls == {"warm_up": 1, "begin": 1, "end": 1}
    assert trainer.pauses == alone.pauses + 3


def test_a_second_profiler_is_refused_before_the_first_update(tmp_path: Path) -> None:
    trainer = made(Profile(tmp_path))
    with torch.profiler.profile(), pytest.raises(SettingError, match="profiled already"):
        trainer.fit(data(), epochs=1)
    assert trainer.result is None or not trainer.result.updates


@pytest.mark.parametrize("setting", [{"after": 0}, {"updates": 0}, {"rows": -1}, {"updates": 2.5}, {"after": True}])
def test_settings_are_checked_when_they_are_given(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="a whole number, at least"):
        Profile(tmp_path, **setting)
