"""Averages over stages and checkpoints: applied and reverted, parameters that are added and removed, resume."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from averages import X, normed, same, train, values, weights
from torch import nn

from trainwright.core.durations import Updates
from trainwright.core.errors import CheckpointError
from trainwright.core.plan import Plan
from trainwright.optim.averaging import EMA, SWA
from trainwright.protocols import Stateful

HALF = EMA(0.5)


def averaged(settings=HALF, updates=3):
    model = normed()
    average = settings.bind(model)
    for update in train(model, updates=updates):
        average.take(update)
    return model, average


def forward_of(model):
    def forward():
        torch.manual_seed(5)
        for batch in X.split(8):
            model(batch)

    return forward


def test_revert_restores_the_raw_weights_after_apply():
    for settings in (EMA(0.5), SWA(Updates(1), Updates(1))):
        model, average = averaged(settings)
        raw = values(model)
        with average.swapped(forward_of(model)):
            inside = values(model)
        assert not average.revert() and same(values(model), raw)  # nothing was left
        assert average.apply()
        assert same(values(model), inside) and average.is_applied
        with average.swapped():
            assert same(values(model), inside)
        assert same(values(model), inside)
        assert average.revert() and same(values(model), raw) and not average.is_applied
        average.take(4)


def test_a_model_that_was_moved_is_unchanged():
    model, average = averaged()
    raw = values(model)
    average.apply()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # what `model.to(device)` does
    assert average.revert() and same(values(model), raw)


def load_again(model):
    model.load_state_dict(model.state_dict())


def assign(model):
    model.load_state_dict(deepcopy(model.state_dict()), assign=True)


def edit_data(model):
    model[0].bias.data.add_(1)


def replace_data(model):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters())


def new_layer(model):
    model[4] = nn.Linear(6, 1)


def convert(model):
    model.double()


@pytest.mark.parametrize("change", [load_again, assign, edit_data, replace_data, new_layer, convert])
def test_revert_leaves_weights_that_were_changed(change):
    model, average = averaged()
    average.apply()
    change(model)
    changed = values(model)
    assert not average.revert()
    assert same(values(model), changed) and not average.is_applied


def test_weights_that_are_loaded_after_apply_count_as_applied():
    model, average = averaged()
    raw = weights(model)
    average.apply()
    with torch.no_grad():
        model[0].weight.fill_(7)
    assert average.apply()
    assert (model[0].weight == 7).all()
    assert average.revert() and same(weights(model), raw)
    average.apply()
    with torch.no_grad():
        model[0].weight.fill_(7)
    average.apply()
    model[0].weight.data.fill_(8)
    assert not average.revert()


def test_new_parameters_start_with_their_current_value_and_removed_ones_are_dropped():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    average = EMA(0.5).bind(model)
    for update in train(model, updates=3):
        average.take(update)
    groups = average._groups
    average.attach(model)
    assert average._groups is groups
    before = average._averages[0].clone()
    model[1] = nn.Linear(4, 2)
    average.attach(model)
    with average.swapped():
        assert torch.equal(model[0].weight, before)
        joined = weights(model[1])
    assert same(joined, weights(model[1]))
    with torch.no_grad():
        model[1].bias += 1
    average.take(4)
    with average.swapped():
        assert torch.equal(model[1].bias, torch.lerp(joined[1], joined[1] + 1, 0.5))
        assert list(average.state_dict()["raw"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert average.state_dict()["raw"]["1.weight"].shape == (2, 4)


def test_statistics_of_a_changed_model_are_estimated_again():
    model, average = averaged(SWA(Updates(1), Updates(1)))
    with average.swapped(forward_of(model)):
        pass
    average.attach(model)
    assert not average.needs_statistics
    model[3] = nn.BatchNorm1d(6, affine=False)  # no parameters, but statistics
    average.attach(model)
    assert average.needs_statistics
    with average.swapped(forward_of(model)):
        pass
    model[3] = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
    average.attach(model)
    assert average.needs_statistics
    model[1] = model[3]
    average.attach(model)
    assert not average.needs_statistics


def test_a_parameter_that_was_resized_or_converted_is_averaged_in_its_new_form():
    model, average = averaged()
    model[4].weight.data = torch.ones(3, 6)
    model[0].double()
    average.attach(model)
    average.take(4)
    with average.swapped():
        assert (model[4].weight == 1).all() and model[0].weight.dtype == torch.float64


def test_the_state_is_that_beside_the_averaged_weights():
    model, average = averaged()
    assert isinstance(average, Stateful)
    with pytest.raises(CheckpointError, match=r"with average.swapped\(\): save"):
        average.state_dict()
    raw = weights(model)
    average.apply()
    assert same(list(average.state_dict()["raw"].values()), raw)
    fresh = EMA().bind(model).state_dict()
    assert fresh["raw"] is None and fresh["taken"] == 0


def test_a_state_without_an_average_starts_anew():
    model, average = averaged()
    raw = values(model)
    average.load_state_dict(EMA(0.5).bind(normed()).state_dict())
    assert average.taken == 0 and same(values(model), raw)
    with average.swapped():
        assert same(values(model), raw)


def test_a_norm_in_eval_mode_is_left_out_after_a_resume_too():
    model, average = averaged(SWA(Updates(1), Updates(1)), updates=0)
    model[1].eval()
    for update in train(model, updates=2):
        average.take(update)
    assert not average.needs_statistics
    with average.swapped():
        saved = deepcopy((model.state_dict(), average.state_dict()))
    model = normed()
    model.load_state_dict(saved[0])
    average = SWA(Updates(1), Updates(1)).bind(model)
    average.load_state_dict(saved[1])
    with average.swapped():
        assert average.state_dict()["in_eval"] == ["1"]


def test_another_kind_or_another_model_is_refused_and_nothing_is_changed():
    model, average = averaged()
    with average.swapped():
        saved = deepcopy(average.state_dict())
    with pytest.raises(CheckpointError, match=r"another kind of average(.|\n)*EMA\(0.5\)(.|\n)*SWA"):
        SWA(Updates(1), Updates(1)).bind(model).load_state_dict(saved)
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    before, average = values(other), EMA(0.5).bind(other)
    with pytest.raises(CheckpointError, match=r"1\.weight \(checkpoint \(6,\), model \(2, 6\)\)"):
        average.load_state_dict(saved)
    assert average.taken == 0 and same(values(other), before)


def test_other_settings_are_used_and_reported():
    model, average = averaged()
    with average.swapped():
        saved = deepcopy(average.state_dict())
    said = EMA(0.75).bind(model).load_state_dict(saved)
    assert said == "average changed: EMA(0.5) -> EMA(0.75)"
    begins = [SWA().bind(model, Plan(batches=4, epochs=epochs)) for epochs in (4, 8)]
    said = begins[1].load_state_dict(begins[0].state_dict())
    assert said == "average changed: SWA(0.75) from update 12 -> SWA(0.75) from update 24"
