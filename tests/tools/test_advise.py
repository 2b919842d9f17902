"""`advise`: verdicts follow from recorded times, trials leave no trace, and the result is plain data.

No verdict here depends on the speed of the machine: the judging functions get recorded ratios, and complete runs of
`advise` read a simulated clock that only the model and the data advance. Two runs by the real clock check structure.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_trial import everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainwright import SettingError, Trainer, accuracy, advise, batches
from trainwright.core.device import usable_cores
from trainwright.modules import checkpoint_activations
from trainwright.optim import Lamb
from trainwright.tools import advising
from trainwright.tools import techniques as offered
from trainwright.tools.advising import FEWEST, SEVERAL, Effect, effect_of, noise_of, slow_loader
from trainwright.tools.techniques import Phases, Technique, peak_memory, process_settings, techniques
from trainwright.tools.trial import open_afresh, traceless

# recorded on a shared machine with two busy neighbors, by the clock: the trainer against itself, and a switch that
# changes nothing
ITSELF = (0.62, 1.41, 0.88, 1.75, 1.02, 0.71, 1.33, 1.90, 0.97)
NOTHING = (1.34, 1.88, 1.10, 1.52, 0.90, 1.45, 1.60, 1.21, 1.39)
QUIET = (0.99, 1.01, 1.00, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00)


def judged(ratios, *, itself=QUIET, wall=None, wall_itself=None, name="it", how="do it", **effect):
    """Return the effect of recorded ratios beside those of the trainer against itself."""
    noise = noise_of(itself, wall=wall_itself or itself, clock="CPU time" if wall else "wall clock")
    return effect_of(Effect(name=name, how=how, **effect), ratios, wall=wall or ratios, noise=noise)


def test_noise_gets_no_verdict():
    one = judged(NOTHING, itself=ITSELF)
    assert one.speedup == 1.39 and one.spread[0] > 1  # which would be enough alone
    assert (one.verdict, one.is_worth_it) == ("no clear difference", False)
    inverse = judged([1 / ratio for ratio in NOTHING], itself=[1 / ratio for ratio in ITSELF])
    assert (inverse.verdict, inverse.is_slower) == ("no clear difference", False)
    assert judged(NOTHING, itself=QUIET).verdict == "use it"  # the same ratios on a quiet machine


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.1, "use it"), (1.04, "use it"), (1.015, "no clear difference"), (0.99, "no clear difference"), (0.9, "slower")],
)
def test_a_difference_beyond_the_noise_gets_a_verdict(ratio, verdict):
    assert judged([ratio * one for one in QUIET[:-1]]).verdict == verdict


def test_a_median_beyond_the_noise_needs_its_quartile_on_the_same_side():
    assert judged([0.8, 0.85, 0.9, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3]).verdict == "no clear difference"


@pytest.mark.parametrize(("trials", "least"), [(FEWEST, 1.2), (SEVERAL - 1, 1.2), (SEVERAL, 1.03)])
def test_few_trials_need_a_larger_difference(trials, least):
    assert judged([least + 0.01] * trials).is_worth_it and not judged([least - 0.01] * trials).is_worth_it
    assert judged([1 / (least + 0.01)] * trials).is_slower and not judged([1 / (least - 0.01)] * trials).is_slower


def test_too_few_trials_give_no_verdict():
    assert judged([3.0] * (FEWEST - 1)).verdict == "too few trials"
    assert judged([3.0] * 9, itself=QUIET[: FEWEST - 1]).verdict == "no clear difference"
    assert Effect(name="it", how="", speedup=3.0, spread=(3.0, 3.0), trials=9).verdict == "no clear difference"


def test_less_cpu_time_that_takes_longer_by_the_clock_is_slower():
    less = [1.5] * 9
    assert judged(less, wall=[1.4] * 9).verdict == "use it"
    assert judged(less, wall=[1.0] * 9).verdict == "use it"
    assert judged(less, wall=[0.7] * 9).verdict == "slower"
    assert judged(less, wall=[0.7] * 9, wall_itself=ITSELF).verdict == "use it"  # the clock is too noisy to object


def test_noise_alone_passes_in_less_than_one_of_a_hundred_runs():
    draw = random.Random(0)

    def noisy(number):
        return [
            draw.lognormvariate(0, 0.3) * (draw.lognormvariate(0, 1) if draw.random() < 0.15 else 1)
            for _ in range(number)
        ]

    for number in (SEVERAL, 15):
        effects = [judged(noisy(number), itself=noisy(number)) for _ in range(2000)]
        assert sum(one.is_worth_it for one in effects) < 20 and sum(one.is_slower for one in effects) < 20


WAITING = Phases(data=6.0, forward=2.0, backward=1.0, optimizer=1.0)


def loader_finding(tried):
    (finding,) = slow_loader(WAITING, tried)
    return finding


def test_a_slow_loader_whose_cure_was_measured_as_slower_says_that_the_trials_disagree():
    one = loader_finding([judged([0.49] * 9, name="2 workers", reads=True)])
    assert "the trials disagree" in one.why and "2 workers x0.49 slower" in one.why
    assert "num_workers" not in one.fix and "__getitem__" in one.fix and one.level == "note"


def test_a_slow_loader_gets_the_cure_that_was_measured_as_the_best():
    tried = [
        judged([0.49] * 9, name="2 workers", how="num_workers=2", reads=True),
        judged([3.0] * 9, name="in memory", how="in_memory=True", reads=True),
        judged([9.0] * 9, name="fused optimizer", how="fused=True"),
    ]
    assert loader_finding(tried).fix == "in_memory=True  # measured here: x3.00"


def test_a_slow_loader_without_a_measured_cure_gets_a_line_to_try():
    tried = [
        judged([1.5] * (FEWEST - 1), name="in memory", reads=True),  # too few for a verdict
        Effect(name="2 workers", how="", why_not="the time was over", reads=True),
        judged([1.5] * 9, name="fused optimizer"),
    ]
    assert "num_workers=2" in loader_finding(tried).fix and loader_finding(tried).level == "problem"


def test_a_slow_loader_of_rows_in_memory_is_not_advised_to_copy_them():
    one = loader_finding([Effect(name="in memory", how="", why_not="it is on", reads=True)])
    assert "in_memory" not in one.fix and "in memory already" in one.fix


def test_a_loader_is_slow_from_a_fifth_of_the_time_on():
    assert slow_loader(replace(WAITING, data=0.9), []) == []
    (finding,) = slow_loader(replace(WAITING, data=1.1), [])
    assert "22%" in finding.what


class SimulatedClock:
    """Wall clock and CPU time that only the model and the data advance."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def spend(self, seconds, *, cpu=True):
        """CPU time of an update is exact; by the clock a neighbor adds up to twice as much."""
        self.wall += seconds * (1 + 2 * DRAW.random()) if cpu else seconds
        self.cpu += seconds if cpu else 0.0


DRAW = random.Random(0)
CLOCK = SimulatedClock()


@contextmanager
def simulated_clocks():
    clocks = SimpleNamespace(perf_counter=lambda: CLOCK.wall, process_time=lambda: CLOCK.cpu)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("advising", "techniques"):
            patch.setattr(sys.modules[f"trainwright.tools.{name}"], "time", clocks)
        yield


@pytest.fixture
def simulated():
    with simulated_clocks():
        yield


class Timed(nn.Sequential):
    """A perceptron whose call takes 50 ms, and half of that in half precision, whatever the machine."""

    def forward(self, x):
        CLOCK.spend(0.025 if torch.is_autocast_enabled("cpu") else 0.05)
        return super().forward(x)


class Rows(Dataset):
    """Rows that are waited for, 10 ms each."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        CLOCK.spend(0.01, cpu=False)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


class Own(DataLoader):
    """A loader that is not tried with workers: other processes do not advance the clock."""


def timed(**settings):
    torch.manual_seed(0)
    model = Timed(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    return Trainer(model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), console=False, **settings)


@pytest.fixture(scope="module")
def ready_made():
    """Advice on a tuple of arrays by the simulated clock, and whether the trainer and the data are as they were."""
    trainer = timed(metrics={"accuracy": accuracy})
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = batches((x, torch.arange(256) % 3), 64, shuffle=True)
    before, seed = everything(trainer), data.position()["seed"]
    with simulated_clocks():
        advice = advise(trainer, data, seconds=36)
    return advice, everything(trainer) == before and data.position()["seed"] == seed


@pytest.fixture(scope="module")
def waiting():
    """Advice where most of an update is waiting for rows, by the simulated clock."""
    with simulated_clocks():
        return advise(timed(), Own(Rows(), 16, shuffle=True), seconds=80)


def effects(advice):
    return {one.name: one for one in advice.tried}


def test_verdicts_are_of_cpu_time_where_the_work_is_on_the_cpu(ready_made):
    advice, _ = ready_made
    tried = effects(advice)
    assert (advice.noise["ready"].clock, advice.noise["ready"].floor) == ("CPU time", pytest.approx(1))
    assert advice.noise["ready"].wall_floor > 1.1  # by the clock nothing could be seen
    assert tried["bf16"].speedup == tried["batch size x2"].speedup == pytest.approx(2)
    assert {one.name for one in advice.best} == {"bf16", "batch size x2"}
    assert tried["fused optimizer"].speedup == pytest.approx(1)
    assert "no clear difference" in tried["fused optimizer"].verdict


def test_the_control_has_as_many_pairs_as_each_technique(ready_made):
    advice, _ = ready_made
    trials = [advice.noise["ready"].trials, *(one.trials for one in advice.tried if one.trials)]
    assert min(trials) >= SEVERAL and max(trials) - min(trials) <= 1


def test_updates_that_read_data_are_judged_by_the_wall_clock_with_their_own_control(waiting):
    noise = waiting.noise
    assert (noise["loader"].clock, noise["ready"].clock) == ("wall clock", "CPU time")
    assert noise["loader"].trials >= FEWEST and noise["loader"].floor > noise["ready"].floor
    assert all(one.wall is None for one in waiting.tried if one.reads)


def test_a_slow_loader_is_found_with_the_cure_that_pays(waiting):
    (slow,) = [one for one in waiting.findings if one.name == "slow loader"]
    memory = effects(waiting)["in memory"]
    assert memory.is_worth_it and slow.fix.startswith(memory.how)
    assert "waiting for data" in waiting.reading and "in memory x" in waiting.reading


def test_the_report_names_the_techniques_compared_on_updates_that_read_the_data(waiting, ready_made):
    (reported,) = [line for line in str(waiting).splitlines() if line.startswith(" of what")]
    assert "in memory" in reported.split(";")[0] and "ready batches" in reported.split(";")[1]
    assert not [line for line in str(ready_made[0]).splitlines() if line.startswith(" of what")]


def test_the_time_of_an_update_is_split_by_phase(waiting, ready_made):
    assert ready_made[0].phases.shares["forward"] == pytest.approx(1)
    assert waiting.phases.shares["data"] + waiting.phases.shares["forward"] == pytest.approx(1)
    assert waiting.phases.data == pytest.approx(0.16)  # 16 rows
    assert "; measured: bf16 x2.00" in ready_made[0].reading


def test_a_correct_set_up_has_no_findings(ready_made):
    assert ready_made[0].findings == ()


def test_advise_leaves_no_trace(ready_made):
    assert ready_made[1]


def test_every_technique_is_tried_or_listed_with_the_reason(ready_made):
    advice, _ = ready_made
    wanted = {"bf16", "fused optimizer", "compile", "channels-last", "activation checkpointing", "batch size x2"}
    wanted |= {"2 workers" if usable_cores() == 2 else f"{min(4, usable_cores())} workers", "in memory"}
    assert {name.removesuffix("s") for name in wanted} == {name.removesuffix("s") for name in effects(advice)}
    for one in advice.tried:
        assert one.how
        assert (one.speedup is None) == bool(one.why_not)
        if one.speedup is not None:
            assert one.spread[0] <= one.speedup <= one.spread[1]
    ranked = [one.speedup or 0 for one in advice.tried]
    assert ranked == sorted(ranked, reverse=True)
    assert "seconds=" in effects(advice)["compile"].why_not


@pytest.mark.parametrize(
    ("device", "precision", "on"), [("cuda", "bf16", True), ("cuda", None, False), ("cpu", "bf16", False)]
)
def test_channels_last_is_not_tried_where_the_default_has_it_on(device, precision, on):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    trainer = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss(), precision=precision, device="cpu", console=False)
    trainer.device = torch.device(device)  # no kernel runs: the choice reads the device alone
    assert offered._channels_last(trainer).why_not == ("it is on" if on else "")


def test_settings_of_the_process_are_advice_in_words(ready_made):
    advice, _ = ready_made
    assert any(one.startswith("torch.set_num_interop_threads(1)") for one in advice.settings)
    assert not {one.name for one in advice.tried} & {"flush denormal", "gc freeze", "set_to_none=False", "2 threads"}
    assert " by hand   torch.set_flush_denormal(True)  #" in str(advice)


def test_a_setting_of_the_environment_is_not_advised_twice(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "libjemalloc" in str(process_settings(torch.device("cpu")))
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert "libjemalloc" not in str(process_settings(torch.device("cpu")))


def test_anomaly_mode_is_a_setting_to_switch_off():
    assert "anomaly" not in str(process_settings(torch.device("cpu")))
    with torch.autograd.set_detect_anomaly(True):
        assert "anomaly" in str(process_settings(torch.device("cpu")))


def test_drift_is_zero_for_techniques_that_change_no_numbers(ready_made):
    drifts = {one.name: one.drift for one in ready_made[0].tried}
    assert drifts["fused optimizer"] == pytest.approx(0, abs=1e-5)
    assert 0 < drifts["bf16"] < 0.1
    assert drifts["batch size x2"] is None


def test_memory_of_twice_the_rows_is_larger(ready_made):
    memory = {one.name: one.memory for one in ready_made[0].tried}
    assert memory["batch size x2"] > 1.5


def test_memory_of_an_update_is_its_activations_and_gradients():
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1))
    loss = nn.MSELoss()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, console=False)
    ready = [(torch.randn(16, 3, 16, 16), torch.randn(16, 24, 16, 16))]
    with traceless(trainer) as kept:
        taken = peak_memory(trainer, kept, Technique(name="as it is", data=open_afresh(ready)))
    one = 16 * 16 * 16 * 24 * 4
    assert 3 * one < taken < 6 * one  # two or three outputs, and the gradients of two


def test_advice_is_plain_data_and_its_table_fits_a_line(waiting):
    tree = json.loads(json.dumps(waiting.to_dict(), allow_nan=False))
    assert [one["name"] for one in tree["tried"]] == [one.name for one in waiting.tried]
    assert tree["noise"]["ready"]["clock"] == "CPU time" and tree["settings"]
    assert "of the trainer against itself" in str(waiting)
    table = str(waiting).split("technique ")[1].split(" noise ")[0]
    assert max(map(len, table.splitlines())) < 200


def test_the_budget_holds_and_the_order_of_a_pair_alternates(simulated, monkeypatch):
    made, run = [], advising.run_block

    def noted(trainer, before, technique, **how):
        made.append(technique.name)
        return run(trainer, before, technique, **how)

    monkeypatch.setattr(advising, "run_block", noted)
    advice = advise(timed(), (torch.randn(64, 8), torch.arange(64) % 3), batch_size=32, seconds=20)
    assert advice.seconds <= 20
    pairs = list(zip(made[2:-1:2], made[3:-1:2], strict=True))  # between two blocks that calibrate and a last one
    bf16 = [pair for pair in pairs if "bf16" in pair]
    assert bf16 == [("as it is", "bf16"), ("bf16", "as it is")] * (len(bf16) // 2) + bf16[len(bf16) // 2 * 2 :]
    assert len(bf16) == effects(advice)["bf16"].trials >= 2


def test_a_technique_that_starts_slowly_is_tried_where_the_budget_allows(simulated, monkeypatch):
    slow = Technique(name="slow start", start=1.0)
    monkeypatch.setattr(offered, "_compile", lambda *_: slow)
    monkeypatch.setattr(advising, "ROUNDS", 10**6)  # the others would take all the time there is
    data = (torch.randn(64, 8), torch.arange(64) % 3)
    tried = effects(advise(timed(), data, batch_size=32, seconds=6))
    assert tried["slow start"].trials == 5
    monkeypatch.setattr(advising, "START_FACTOR", 10)
    tried = effects(advise(timed(), data, batch_size=32, seconds=6))
    assert "may take 1 s to start" in tried["slow start"].why_not


def techniques_of(loader):
    model = nn.Linear(8, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    return {one.name: one for one in techniques(trainer, loader, [], seconds_per_row=0.0, patience=0.0)}


def test_a_loader_with_workers_is_tried_without_and_keeps_its_order():
    loader = DataLoader(Rows(), 4, num_workers=1, prefetch_factor=3)
    found = techniques_of(loader)["0 workers"].data._loader
    assert (found.num_workers, found.batch_sampler) == (0, loader.batch_sampler)


class Endless(IterableDataset):
    def __iter__(self):
        yield from ((torch.ones(8), 0) for _ in range(12))


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_loader_of_a_stream_is_not_tried_with_other_workers(batch_size):
    found = techniques_of(DataLoader(Endless(), batch_size, num_workers=1))
    assert "no rows" in found["0 workers"].why_not and "no map-style data set" in found["in memory"].why_not


def test_a_technique_that_is_on_or_cannot_be_says_so():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    trainer = Trainer(model, Lamb(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    data = batches((torch.randn(8, 8), torch.ones(8).long()), 4)
    with checkpoint_activations(model, {nn.Sequential}):
        tried = techniques(trainer, data, list(data), seconds_per_row=0.0, patience=1.0)
    found = {one.name: one for one in tried}
    assert found["activation checkpointing"].why_not == "it is on"
    assert found["fused optimizer"].why_not == "Lamb of this kind cannot be fused"
    assert found["fused optimizer"].how == "torch.optim.AdamW(..., fused=True)"
    assert found["in memory"].why_not == "it is on"
    assert "a batch is one gather from memory" in {one.why_not for one in tried}


class CustomUpdate(Trainer):
    """An update by hand, which returns nothing."""

    def update(self, window):
        self.optimizer.zero_grad()
        for x, y in window:
            self.loss(self.model(x), y).backward()
        self.apply_gradients()


def test_a_custom_update_without_a_loss_has_no_drift(simulated):
    model = Timed(nn.Linear(4, 2))
    trainer = CustomUpdate(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    tried = advise(trainer, [(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))], seconds=10).tried
    assert any(one.speedup is not None for one in tried)
    assert all(one.drift is None for one in tried)


class Fails(Trainer):
    def training_step(self, batch):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no half precision here")
        return super().training_step(batch)


def test_a_technique_that_raises_is_listed_with_its_error_and_the_others_are_tried(simulated):
    model = Timed(nn.Linear(4, 2))
    trainer = Fails(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.int64)), 8)
    tried = effects(advise(trainer, data, seconds=10))
    assert "no half precision here" in tried["bf16"].verdict
    assert tried["fused optimizer"].speedup is not None


@pytest.mark.parametrize("seconds", [0, -1, True, "60"])
def test_seconds_are_a_number_above_zero(seconds):
    with pytest.raises(SettingError, match="seconds"):
        advise(timed(), (torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)), batch_size=4, seconds=seconds)


class Slow(Rows):
    """Rows that take a millisecond each by the real clock, and are far from zero."""

    def __getitem__(self, index):
        time.sleep(0.001)
        x, y = super().__getitem__(index)
        return 200 + 50 * x, y


@pytest.mark.slow
def test_by_the_real_clock_what_was_planted_is_found_and_a_trace_is_nowhere_left():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), console=False)
    before = everything(trainer)
    advice = advise(trainer, DataLoader(Slow(), 32, shuffle=True), seconds=4)
    assert everything(trainer) == before
    found = {one.name: str(one) for one in advice.findings}
    assert "mean 20" in found["inputs not normalized"] and "the bias of 0 before 1" in found["bias before BatchNorm"]
    assert "in memory" in effects(advice)
    assert sum(advice.phases.shares.values()) == pytest.approx(1)
