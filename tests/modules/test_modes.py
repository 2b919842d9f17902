"""Modes: each module's own is kept over an evaluation; a model left in eval mode is woken, what is frozen is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.core.trees import inside, parameters_of
from trainwright.modules.modes import evaluating, running_statistics, wake


def network():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), inner)


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("asleep", [(), (1,), (2,), (0, 1)])
def test_each_module_has_its_own_mode_again_also_after_an_error(asleep):
    model = network()
    for index in asleep:
        model[index].eval()
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model))
    assert modes(model) == before
    with pytest.raises(RuntimeError), evaluating(model):
        raise RuntimeError
    assert modes(model) == before


def test_a_module_with_a_train_of_its_own_hears_of_both_changes():
    received = []

    class Merges(nn.Linear):
        def train(self, mode=True):
            received.append(mode)
            return super().train(mode)

    model = nn.Sequential(Merges(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    with evaluating(model):
        pass
    assert received == [False, True]
    assert modes(model) == [True, True, False]


def test_ways_of_its_own_to_change_the_mode_are_taken():
    received = []

    class Evaluates(nn.Linear):
        def eval(self):
            received.append("eval")
            return super().eval()

    class Sets(nn.Linear):
        def __setattr__(self, name, value):
            if name == "training":
                received.append(value)
            super().__setattr__(name, value)

    root, inner, reported = Evaluates(2, 2), Sets(2, 2), nn.Linear(2, 2)
    reported.train = lambda mode=True: received.append(f"train({mode})")
    received.clear()
    for module, wanted in ((root, ["eval"]), (inner, [False, True]), (reported, ["train(False)"])):
        with evaluating(nn.Sequential(module) if module is not root else root):
            pass
        assert received == wanted and module.training
        received.clear()


def test_a_compiled_model_and_its_own_share_their_modes():
    model = network()
    model[1].eval()
    before, compiled = modes(model), torch.compile(model, backend="eager")
    with evaluating(compiled):
        assert not any(modes(model)) and not compiled.training
    assert modes(model) == before


def test_what_lies_in_a_module_is_what_torch_says_in_its_order():
    shared, model = nn.Linear(2, 2), network()
    model[2].add_module("again", model[0])
    model.add_module("nothing", None)
    model.add_module("first", nn.ModuleList([shared, nn.Sequential(shared, model[2])]))
    model.add_module("tied", nn.Linear(2, 2))
    model.tied.weight = shared.weight
    model.tied.register_parameter("none", None)
    assert inside(model) == list(model.modules())
    assert list(map(id, parameters_of(model))) == list(map(id, model.parameters()))


def test_a_model_wholly_in_eval_mode_is_woken_but_for_what_is_frozen():
    model = network()
    model[2].requires_grad_(False)
    model.eval()
    assert set(wake(model)) == {"Sequential", "0", "1"}
    assert modes(model) == [True, True, True, False, False, False]


def test_a_module_without_parameters_goes_with_what_contains_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    wake(model)
    assert model[1].training


def test_a_model_with_any_module_in_train_mode_is_left_alone():
    model = network()
    model[1].eval()
    before = modes(model)
    assert wake(model) == []
    assert modes(model) == before


def test_running_statistics_are_the_buffers_that_a_forward_moves():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(8, 2))
    moved = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    found = running_statistics(model)
    assert len(found) == len(moved) == 3
    assert all(any(buffer is one for one in found) for name, buffer in model.named_buffers() if name in moved)
