"""The largest batch: a model of memory from two sizes, tried; memory that runs out is put up with; no trace is left."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from laws.oom_cases import Scarce
from trainwright import Fast, SettingError, Trainer, find_batch_size
from trainwright.modules import peak_memory as runtime_peaks
from trainwright.tools.batch_search import MOST_TRIALS, LargestBatch

X, Y = torch.randn(4000, 5), torch.randint(4, (4000,))


pytestmark = pytest.mark.usefixtures("little_to_collect")


class Formula:
    """A device whose memory is a formula of the rows that the model was given."""

    what, refuses = "a formula", True

    def __init__(self, model, formula, free):
        self._model, self._formula, self._free, self.peak = model, formula, free, 0

    def left(self):
        return self._free

    @contextmanager
    def watching(self):
        self._model.calls.clear()
        yield
        self.peak = self._formula(max(self._model.calls))


def straight(n):
    return 1000 + 10 * n


def scarce(most=10**6, optimizer=torch.optim.SGD, lr=0.1, **settings):
    torch.manual_seed(0)
    model = Scarce(nn.Linear(5, 4), most)
    return Trainer(model, optimizer(model.parameters(), lr=lr), nn.CrossEntropyLoss(), console=False, **settings)


def found(monkeypatch, trainer, formula=straight, free=10_000, data=None, **how):
    monkeypatch.setitem(runtime_peaks.PEAKS, "cpu", lambda device, known: Formula(trainer.model, formula, free))
    made = find_batch_size(trainer, (X, Y) if data is None else data, **{"batch_size": 8, **how})
    assert isinstance(made, LargestBatch) and len(made.trials) <= MOST_TRIALS
    assert made.rows in [one.rows for one in made.trials if one.fits]  # what is reported was tried
    return made


def test_two_sizes_tell_the_model_and_the_third_is_what_it_foretells(monkeypatch):
    made = found(monkeypatch, scarce(), free=2000)
    assert [(one.rows, one.bytes) for one in made.trials] == [(8, 1080), (16, 1160), (80, 1800)]
    assert (made.rows, made.fixed, made.per_row, made.budget) == (80, 1000, 10.0, 2000)
    assert made.how == "a formula" and made.why == "about 80 rows fill the 1.8 KiB that are planned for"


def test_the_model_is_not_believed_far_beyond_what_was_measured(monkeypatch):
    made = found(monkeypatch, scarce())
    assert [one.rows for one in made.trials] == [8, 16, 256, 800]


def test_a_model_that_is_wrong_is_found_out_by_the_trial(monkeypatch):
    made = found(monkeypatch, scarce(most=150), lambda n: 1000 + n * n, free=30_000)
    assert made.rows <= 150 and any(one.bytes is None and not one.fits for one in made.trials)
    made = found(monkeypatch, scarce(), lambda n: 1000 + n * n, free=30_000, budget=30_000)
    assert straight(0) < 1000 + made.rows**2 <= 30_000 and made.why.endswith("rows do not fit")


@pytest.mark.parametrize(("most", "least"), [(8, 4), (5, 2), (30, 16), (3, 2), (1, 1)])
def test_memory_that_runs_out_in_a_trial_is_put_up_with(monkeypatch, most, least):
    trainer = scarce(most)
    weights = [p.clone() for p in trainer.model.parameters()]
    drawn = torch.get_rng_state()
    made = found(monkeypatch, trainer, batch_size=16 if most > 1 else 8)
    assert least <= made.rows <= most
    assert any(one.bytes is None for one in made.trials)
    for parameter, before in zip(trainer.model.parameters(), weights, strict=True):
        assert torch.equal(parameter, before) and parameter.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)


def test_one_row_that_does_not_fit_is_an_error(monkeypatch):
    with pytest.raises(SettingError, match="micro-batches of 1 rows do not fit"):
        found(monkeypatch, scarce(0))


def test_bytes_of_tensors_grow_by_what_a_row_takes():
    torch.manual_seed(0)
    width = 256
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    made = find_batch_size(trainer, (X, Y), batch_size=64, budget=2**21)
    assert made.how == "the bytes of tensors that were alive at once"
    weights = sum(p.nbytes for p in model.parameters())
    assert made.per_row == pytest.approx(4 * 4 * width, rel=0.3)  # both outputs, their gradient, what is made of it
    assert weights / 2 < made.fixed < 4 * weights
    assert max(one.bytes for one in made.trials if one.fits) <= 2**21 == made.budget
    assert all(one.fits == (one.bytes <= made.budget) for one in made.trials)
    wider = find_batch_size(trainer, (X, Y), batch_size=64, budget=2**21, effective=2048)
    assert wider.fixed > made.fixed  # gradients are there while the second micro-batch is run


def test_without_a_budget_half_of_the_memory_is_taken_and_no_more_rows_than_there_are():
    made = find_batch_size(scarce(), (X[:50], Y[:50]), batch_size=8)
    assert made.rows == 50 and made.why == "all rows of the data: 50"
    assert 2**20 < made.budget < 2**50


@pytest.mark.parametrize(
    ("optimizer", "effective", "accumulate", "micro_batch", "factor"),
    [
        (torch.optim.SGD, 640, 8, 80, 640 / 16),
        (torch.optim.AdamW, 640, 8, 80, math.sqrt(640 / 16)),
        (torch.optim.RMSprop, 100, 2, 50, math.sqrt(100 / 16)),
        (torch.optim.SGD, 83, 2, 42, 84 / 16),
        (torch.optim.SGD, 24, 1, 24, 24 / 16),
        (torch.optim.SGD, None, 1, 80, 80 / 16),
        (torch.optim.Rprop, None, 1, 80, None),
    ],
)
def test_the_update_that_is_wanted_is_made_of_equal_parts_and_its_rate_scaled(
    monkeypatch, optimizer, effective, accumulate, micro_batch, factor
):
    trainer = scarce(optimizer=optimizer, accumulate=2)
    made = found(monkeypatch, trainer, free=2000, effective=effective)
    assert (made.accumulate, made.micro_batch) == (accumulate, micro_batch)
    assert made.effective == accumulate * micro_batch and micro_batch <= made.rows
    assert made.lr_factor == (None if factor is None else pytest.approx(factor))
    shown = str(made)
    assert f"batches(data, {micro_batch}, ...)   Trainer(..., accumulate={accumulate})" in shown
    if factor is not None:
        rule = "linear" if optimizer is torch.optim.SGD else "sqrt"
        assert f"lr={rule}_scaled(0.1, batch=16, to={made.effective})   # {0.1 * factor:.4g}" in shown
    else:
        assert "no rule is known for the rate of Rprop" in shown


def test_the_record_is_data(monkeypatch):
    made = found(monkeypatch, scarce(), free=2000).to_dict()
    assert made["rows"] == 80 and made["trials"][0] == {"rows": 8, "bytes": 1080, "fits": True}


def test_the_longest_rows_of_the_data_are_measured(monkeypatch):
    class Tokens(Scarce):
        def forward(self, x):
            self.calls.append(x.shape[0])
            lengths.append(x.shape[1])
            return self.inner(x.float().mean(1, keepdim=True))

    lengths = []
    model = Tokens(nn.Linear(1, 4))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    data = [(torch.ones(n, length), torch.zeros(n, dtype=torch.long)) for n, length in ((8, 3), (6, 9), (8, 4))]
    made = found(monkeypatch, trainer, data=data, batch_size=None, most=32)
    assert made.rows == 32 and made.trials[0].rows == 8 and set(lengths) == {9}


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"budget": 0}, "budget=0"),
        ({"most": 1.5}, "most=1.5"),
        ({"effective": True}, "effective=True"),
    ],
)
def test_settings_that_cannot_be_are_refused(how, match):
    with pytest.raises(SettingError, match=match):
        find_batch_size(scarce(), (X, Y), batch_size=8, **how)


def test_a_budget_that_not_one_row_fits_into_is_said_to_be_one(monkeypatch):
    with pytest.raises(SettingError, match="micro-batches of 1 rows do not fit in a budget of"):
        found(monkeypatch, scarce(0), budget=16)


def test_what_is_compiled_is_counted_uncompiled():
    trainer = scarce(fast=Fast(compile={"backend": "eager"}))
    assert find_batch_size(trainer, (X, Y), batch_size=8, budget=2**20, most=16).rows == 16
