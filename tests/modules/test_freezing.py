"""Freezing: no gradients, and normalization that stays in eval mode through train(), copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from trainwright.core.errors import SettingError
from trainwright.modules.freezing import freeze, held, unfreeze
from trainwright.modules.modes import evaluating, training_mode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU()),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout(0.5)),
        )
        self.head = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x):
        return self.head(self.backbone(x))


def modes(model):
    return {name for name, module in model.named_modules() if module.training}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def marked(model):
    return {name for name, module in model.named_modules() if held(module)}


def moved(model):
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(8, 2))
    return {
        name.rpartition(".")[0]
        for name, buffer in model.named_buffers()
        if name.endswith("mean") and not torch.equal(buffer, before[name])
    }


BACKBONE = ["backbone.0.0.weight", "backbone.0.0.bias", "backbone.0.1.weight", "backbone.0.1.bias"]
BACKBONE += ["backbone.1.0.weight", "backbone.1.0.bias"]
NORMS = {"backbone.0.1", "backbone.1.1"}


def test_a_frozen_submodule_has_no_gradients_and_its_statistics_stay_through_train():
    model = Net()
    everything = trained(model)
    assert freeze(model, "backbone") is model
    assert (
        trained(model) == everything - set(BACKBONE) == {"head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"}
    )
    for _ in range(2):
        model.train()
        assert marked(model) == NORMS
        assert modes(model).isdisjoint(NORMS)
        assert {"", "backbone.1.2", "head.1"} <= modes(model)
        assert moved(model) == {"head.1"}
        model.eval()
        assert modes(model) == set()


def test_norm_train_leaves_modes_alone():
    model = Net()
    freeze(model, norm="train")
    assert trained(model) == set()
    assert moved(model) == {*NORMS, "head.1"}


def test_a_layer_with_one_trained_parameter_keeps_its_mode_until_the_last_is_frozen():
    model = Net()
    freeze(model, "*.bias")
    assert trained(model) == {name for name, _ in model.named_parameters() if not name.endswith("bias")}
    assert marked(model) == set()
    freeze(model, "backbone.0.1.weight")
    assert marked(model) == {"backbone.0.1"}
    freeze(model, "backbone.*")
    assert marked(model) == NORMS


def test_a_layer_frozen_by_hand_elsewhere_is_left_alone():
    model = Net()
    model.backbone.requires_grad_(False)
    freeze(model, "head")
    assert marked(model) == {"head.1"}
    freeze(model.backbone)
    assert marked(model) == {*NORMS, "head.1"}


def test_normalization_without_statistics_is_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2, affine=True))
    freeze(model)
    assert marked(model) == set()
    assert trained(model) == set()


def test_a_layer_without_parameters_may_be_named_itself():
    model = Net()
    assert trained(freeze(model, "backbone.1.1")) == trained(Net())
    assert marked(model) == {"backbone.1.1"}
    unfreeze(model, "head")
    assert marked(model) == {"backbone.1.1"}
    unfreeze(model, "backbone.1.1")
    assert marked(model) == set()
    freeze(model, "backbone.1.1")
    unfreeze(model, "backbone")
    assert marked(model) == set()
    freeze(model)
    unfreeze(model, "backbone.1.1")
    assert marked(model) == {"backbone.0.1", "head.1"}


def test_a_name_does_not_mean_another_one_that_begins_alike():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(11)))
    assert {"0.weight", "10.weight"} <= trained(freeze(model, "1")) and "1.weight" not in trained(model)


def test_a_left_over_gradient_does_not_move_what_is_frozen():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 2)).square().sum().backward()
    freeze(model, "backbone")
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert same == [True] * 6 + [False] * 4


def test_unfreezing_is_the_inverse():
    model = Net()
    everything, running = trained(model), modes(model)
    freeze(model)
    assert (marked(model), trained(model)) == ({*NORMS, "head.1"}, set())
    assert unfreeze(model) is model
    assert (trained(model), modes(model), marked(model)) == (everything, running, set())
    assert not any("train" in vars(module) for module in model.modules())
    assert moved(model) == {*NORMS, "head.1"}


def test_a_part_may_be_unfrozen():
    model = Net()
    freeze(model)
    unfreeze(model, "head")
    assert marked(model) == NORMS
    unfreeze(model, "backbone.1")
    assert marked(model) == {"backbone.0.1"}
    assert moved(model) == {"backbone.1.1", "head.1"}
    unfreeze(model, "*.0.1.bias")
    assert marked(model) == set()
    assert "backbone.0.0.weight" not in trained(model)


def test_a_layer_without_parameters_is_released_when_what_contains_it_is_trained_again():
    model = Net()
    freeze(model, "backbone")
    unfreeze(model, "backbone.0.0")
    assert marked(model) == NORMS
    unfreeze(model, "backbone.1.0.weight")
    assert marked(model) == {"backbone.0.1"}


def test_unfrozen_layers_get_the_mode_of_what_is_around_them():
    model = Net()
    freeze(model)
    model.eval()
    unfreeze(model)
    assert modes(model) == set()
    freeze(model.head[1])
    unfreeze(model.head[1])
    assert modes(model) == {"head.1"}


def test_integer_parameters_stay_without_a_gradient():
    model = nn.Sequential(nn.Linear(2, 2))
    model.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    assert trained(freeze(model)) == set()
    assert trained(unfreeze(model)) == {"0.weight", "0.bias"}
    with pytest.raises(SettingError, match=r"^unfreeze: codes can hold no gradient\n  have  torch\.int8"):
        unfreeze(model, "codes")


def test_a_tied_parameter_is_found_under_each_of_its_names():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
    model[1].weight = model[0].weight
    assert trained(freeze(model, "1")) == set()
    assert trained(unfreeze(model)) == {"0.weight", "1.bias"}


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "made",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["copy", "pickle", "save"],
)
def test_a_copy_stays_frozen_by_itself(made):
    model = Net()
    freeze(model)
    twin = made(model)
    unfreeze(model)
    assert marked(twin) == {*NORMS, "head.1"}
    assert marked(model) == set()
    twin.eval()
    assert "head.1" in modes(model)
    twin.train()
    assert moved(twin) == set()
    unfreeze(twin, "head")
    assert marked(twin) == NORMS
    assert moved(twin) == {"head.1"}


def test_the_state_dict_does_not_change():
    model = Net()
    before = list(model.state_dict())
    freeze(model)
    assert list(model.state_dict()) == before
    Net().load_state_dict(model.state_dict())


def test_a_parent_with_a_train_of_its_own_does_not_wake_what_is_frozen():
    class Own(Net):
        def train(self, mode=True):
            return super().train(mode)

    model = Own()
    freeze(model, "backbone")
    before = modes(model)
    with evaluating(model):
        pass
    assert modes(model) == before


def test_what_is_frozen_inside_an_evaluation_stays_frozen():
    model = Net()
    with evaluating(model):
        freeze(model, "backbone")
    assert modes(model).isdisjoint(NORMS)
    assert moved(model) == {"head.1"}


def test_an_average_of_a_frozen_model_is_frozen_too():
    model = Net()
    freeze(model, "backbone")
    average = torch.optim.swa_utils.AveragedModel(model)
    average.train()
    assert marked(average.module) == NORMS
    assert moved(average) == {"module.head.1"}


@pytest.mark.parametrize("function", [freeze, unfreeze])
def test_what_matches_nothing_is_refused_with_the_nearest_name(function):
    with pytest.raises(SettingError, match=r"matches nothing in Net\. Did you mean 'backbone'\?"):
        function(Net(), "bakbone")
    with pytest.raises(SettingError, match=r"Did you mean 'head\.0\.weight'\?"):
        function(Net(), "head.0.weigth")
    with pytest.raises(SettingError, match="matches nothing"):
        function(Net(), "")
    with pytest.raises(TypeError, match=r"want  a torch\.nn\.Module"):
        function("backbone")
    with pytest.raises(TypeError, match="want  a string"):
        function(Net(), ["backbone"])


@pytest.mark.parametrize("function", [freeze, unfreeze])
@pytest.mark.parametrize("module", [nn.ReLU(), nn.Identity(), nn.Sequential(), nn.BatchNorm1d(2, affine=False)])
def test_a_module_without_parameters_has_nothing_to_freeze(function, module):
    assert function(module) is module


def test_a_part_without_parameters_has_nothing_to_freeze():
    model = Net()
    assert trained(freeze(model, "backbone.0.2")) == trained(Net()) == trained(unfreeze(model, "backbone.0.2"))


def test_a_teacher_is_frozen_where_it_is_named():
    teacher = freeze(Net())
    assert trained(teacher) == set() and teacher(torch.randn(3, 2)).shape == (3, 3)


def test_an_unknown_norm_is_refused_before_anything_is_frozen():
    model = Net()
    with pytest.raises(SettingError, match='"eval" or "train"'):
        freeze(model, norm="frozen")
    assert len(trained(model)) == 10


def test_a_mode_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="True or False"), training_mode(Net(), "eval"):
        pass
