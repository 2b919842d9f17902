"""`advise` finds what was planted, says nothing of a clean set-up, and leaves no trace; its record is data."""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import pytest
import torch
from test_trial import everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainwright import (
    DataError,
    Lamb,
    SettingError,
    Trainer,
    accuracy,
    advise,
    batches,
    checkpoint_activations,
)
from trainwright.tools import ways
from trainwright.tools.advice import Effect
from trainwright.tools.loading import _rebuilt as rebuilt
from trainwright.tools.loading import loader_techniques
from trainwright.tools.measuring import Way
from trainwright.tools.ways import Technique, techniques

advising = sys.modules["trainwright.tools.advise"]


class Slow(Dataset):
    """Rows that take a millisecond each, and are far from zero."""

    def __init__(self, rows=64):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = 200 + 50 * torch.randn(rows, 8, generator=generator), torch.arange(rows) % 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.001)
        return self.x[index], self.y[index]


class Reading(Trainer):
    def training_step(self, batch):
        x, y = batch
        loss = self.loss(self.model(x), y)
        self.last = loss.item()  # planted
        return loss


def clean():
    """A convolutional network whose update is work, on images that are normalised."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 3, 16, 16, generator=generator), torch.arange(256) % 4
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    metrics = {"accuracy": accuracy}
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), metrics=metrics, console=False), batches(
        (x, y), 64, shuffle=True
    )


def planted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    trainer = Reading(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), console=False)
    return trainer, DataLoader(Slow(), 4, shuffle=True)


@pytest.fixture(scope="module")
def of_planted():
    trainer, loader = planted()
    return advise(trainer, loader, seconds=6)


@pytest.fixture(scope="module")
def of_clean():
    trainer, data = clean()
    before = everything(trainer)
    seeds = data.state_dict()["seed"]
    advice = advise(trainer, data, seconds=8)
    assert data.state_dict()["seed"] == seeds
    return advice, before == everything(trainer)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("slow loader", "waiting for data"),
        ("inputs not normalised", "200"),
        ("bias before BatchNorm", "the bias of 0 before 1"),
        (".item()", "test_advise.py:"),
        ("tiny", "4"),
    ],
)
def test_what_was_planted_is_found(of_planted, name, where):
    found = [one for one in of_planted.findings if name in f"{one.name} {one.what}"]
    assert found, [one.name for one in of_planted.findings]
    assert where in str(found[0])
    assert found[0].fix


def test_nothing_is_said_of_a_clean_set_up(of_clean):
    advice, _ = of_clean
    assert [one.name for one in advice.findings] == []


def test_a_trace_is_nowhere_left(of_clean):
    assert of_clean[1]


def test_the_time_is_told_by_phase_and_read(of_planted, of_clean):
    assert of_planted.phases.shares["data"] > 0.5
    assert "waiting for data" in of_planted.phases.reading
    assert of_clean[0].phases.shares["data"] < 0.2
    assert sum(of_clean[0].phases.shares.values()) == pytest.approx(1)
    assert "waiting for data" not in of_clean[0].phases.reading


def test_where_updates_wait_it_is_said_which_speed_ups_leave_that_out(of_planted, of_clean):
    (told,) = [line for line in str(of_planted).splitlines() if line.startswith(" of what")]
    assert "batches are ready" in told and "in memory" in told.split(";")[1]
    assert {one.name for one in of_planted.tried if one.reads} >= {"1 worker", "in memory", "prefetch"}
    assert "batches are ready" not in str(of_clean[0])


def test_what_was_measured_once_is_clear_only_where_it_is_far_from_one():
    once, often = (partial(Effect, name="it", how="it", trials=trials) for trials in (1, 9))
    assert often(speedup=1.1, spread=(1.05, 1.2)).verdict == "use it"
    assert once(speedup=1.1, spread=(1.1, 1.1)).verdict == once(speedup=0.97, spread=(0.97,) * 2).verdict
    assert once(speedup=3.0, spread=(3.0, 3.0)).is_worth_it and "slower" in once(speedup=0.5, spread=(0.5,) * 2).verdict


def test_every_technique_is_in_the_table_tried_or_with_the_reason_why_not(of_clean):
    advice, _ = of_clean
    names = {one.name for one in advice.tried}
    wanted = {"bf16", "fp16", "tf32", "fused optimizer", "foreach optimizer", "compile", "channels-last"}
    wanted |= {"CUDA graphs", "cudnn.benchmark", "accumulate=2", "activation checkpointing", "flush denormal"}
    wanted |= {"gc freeze", "set_to_none=False", "batch size x2", "0 workers", "pinned memory", "prefetch", "in memory"}
    assert wanted <= names
    for one in advice.tried:
        assert one.how
        assert (one.speedup is None) == bool(one.why_not)
        if one.speedup is not None:
            assert one.trials >= 1
            assert one.spread[0] <= one.speedup <= one.spread[1]
    ranked = [one.speedup or 0 for one in advice.tried]
    assert ranked == sorted(ranked, reverse=True)
    assert "seconds=" in next(one for one in advice.tried if one.name == "compile").why_not


def test_what_changes_no_number_is_seen_to_change_none(of_clean):
    drifts = {one.name: one.drift for one in of_clean[0].tried}
    assert drifts["flush denormal"] == drifts["gc freeze"] == drifts["set_to_none=False"] == 0
    assert 0 < drifts["bf16"] < 0.1
    assert drifts["batch size x2"] is None


def test_memory_is_counted_and_not_measured_by_a_clock(of_clean):
    memory = {one.name: one.memory for one in of_clean[0].tried}
    assert memory["accumulate=2"] == pytest.approx(0.5, abs=0.05)
    assert memory["batch size x2"] == pytest.approx(2, abs=0.05)
    assert memory["gc freeze"] == 1
    # of each convolution its output and the rectified one are kept; the backward pass makes two such more
    kept = 64 * 16 * 16 * 24 * 4
    assert 4 * kept < of_clean[0].memory < 7 * kept


def test_advice_is_data_markdown_and_a_plot(of_planted, tmp_path):
    tree = json.loads(json.dumps(of_planted.to_dict()))
    assert [one["name"] for one in tree["tried"]] == [one.name for one in of_planted.tried]
    page = of_planted.markdown()
    assert page.count("\n| ") == len(of_planted.tried) + 2
    of_planted.plot(tmp_path / "advice.png")
    assert (tmp_path / "advice.png").stat().st_size > 5000
    assert max(map(len, str(of_planted).split("not tried")[0].splitlines())) < 200


def test_more_workers_are_worth_it_where_rows_are_slow(of_planted):
    tried = {one.name: one for one in of_planted.tried}
    assert tried["in memory"].speedup > 2
    assert tried["in memory"].verdict.startswith("use it")


def techniques_of(loader):
    model = nn.Linear(8, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    return {one.name: one for one in loader_techniques(trainer, loader, seconds_per_row=0.0, patience=0.0)}


def test_reading_ahead_is_that_of_workers_where_there_are_some():
    assert "there are none" in techniques_of(DataLoader(Slow(), 4))["prefetch"].why_not
    found = techniques_of(DataLoader(Slow(), 4, num_workers=1, prefetch_factor=3))
    assert found["prefetch"].how == "DataLoader(..., num_workers=1, prefetch_factor=6)"
    ahead, alone = (found[name].way.data._loader for name in ("prefetch", "0 workers"))
    assert (ahead.num_workers, ahead.prefetch_factor) == (1, 6)
    assert (alone.num_workers, alone.prefetch_factor) == (0, None)


class Endless(IterableDataset):
    def __iter__(self):
        yield from ((torch.ones(8), 0) for _ in range(12))


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_loader_of_a_stream_is_built_anew_with_other_settings(batch_size):
    loader = DataLoader(Endless(), batch_size, num_workers=1)
    assert techniques_of(loader)["prefetch"].way is not None
    assert len(list(rebuilt(loader, num_workers=0))) == len(list(loader))


def test_what_is_on_or_cannot_be_is_told_as_it_is():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    trainer = Trainer(model, Lamb(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    with checkpoint_activations(model, {nn.Sequential}):
        found = {one.name: one for one in techniques(trainer, [(torch.randn(4, 8), torch.ones(4).long())])}
    assert found["activation checkpointing"].why_not == "it is on"
    assert found["fused optimizer"].why_not == "Lamb of this kind cannot be fused"
    assert found["fused optimizer"].how == "torch.optim.AdamW(..., fused=True)"
    gathered = techniques_of(batches((torch.randn(8, 8), torch.ones(8).long()), 4))
    assert gathered["prefetch"].why_not == "a batch is one gather from memory"


def test_the_time_is_kept_to(of_clean):
    assert of_clean[0].seconds < 8


def test_time_is_kept_for_what_starts_slowly_where_there_is_enough_of_it(monkeypatch):
    slow = Technique(name="slow start", how="", way=Way(name="slow start"), start=1.0)
    monkeypatch.setattr(ways, "_compile", lambda *_: [slow])
    monkeypatch.setattr(advising, "ROUNDS", 10**6)  # the others would take all the time there is
    trainer, data = clean()
    tried = {effect.name: effect for effect in advise(trainer, data, seconds=5).tried}
    assert tried["slow start"].speedup is not None
    monkeypatch.setattr(advising, "SHARE", 10)
    tried = {effect.name: effect for effect in advise(trainer, data, seconds=5).tried}
    assert "may take 1 s to begin with" in tried["slow start"].why_not


def test_settings_of_the_process_are_listed_or_measured_by_a_script(of_clean, tmp_path):
    listed = [one for one in of_clean[0].tried if "before a process begins" in one.why_not]
    assert listed
    (tmp_path / "train.py").write_text("sum(range(1000))")
    model = nn.Linear(4, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    ready = [(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))]
    tried = {one.name: one for one in advise(trainer, ready, seconds=5, script=tmp_path / "train.py").tried}
    assert all(tried[one.name].speedup is not None or tried[one.name].why_not for one in listed)
    assert any(tried[one.name].speedup is not None for one in listed)


class Tells(Trainer):
    """An update by hand, which returns nothing."""

    def update(self, window):
        self.optimizer.zero_grad()
        for x, y in window:
            self.loss(self.model(x), y).backward()
        self.apply_gradients()


def test_an_update_that_tells_no_loss_is_advised_on_without_a_drift():
    model = nn.Linear(4, 2)
    trainer = Tells(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    tried = advise(trainer, [(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))], seconds=2).tried
    assert any(one.speedup is not None for one in tried)
    assert all(one.drift is None for one in tried)


class Fails(Trainer):
    def training_step(self, batch):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no half precision here")
        return super().training_step(batch)


def test_a_technique_that_raises_is_told_with_its_error_and_the_others_go_on():
    model = nn.Linear(4, 2)
    trainer = Fails(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.int64)), 8)
    tried = {one.name: one for one in advise(trainer, data, seconds=2).tried}
    assert "no half precision here" in tried["bf16"].verdict
    assert tried["fused optimizer"].speedup is not None


def test_a_stream_that_cannot_be_read_afresh_is_refused_with_the_cure():
    trainer, _ = planted()
    with pytest.raises(DataError, match="a list of ready batches"):
        advise(trainer, (batch for batch in [(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))]))


@pytest.mark.parametrize("seconds", [0, -1, True, "60"])
def test_seconds_are_a_number_above_zero(seconds):
    trainer, loader = planted()
    with pytest.raises(SettingError, match="seconds"):
        advise(trainer, loader, seconds=seconds)
