"""Groups by name: no decay, rates by part, rates by layer; for `sgd`, and for any optimizer that takes groups."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from trainwright import SettingError, adamw, sgd
from trainwright.optim import Lamb, param_groups
from trainwright.optim.fused import dtype_broken_in_sgd


class Net(nn.Module):
    """A stem, three blocks and a head; the head is defined first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.stem = nn.Linear(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1, 4))

    def forward(self, x):
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def table(model, **settings):
    """The rate and the decay of every parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = param_groups(model, **{"lr": 1.0, "weight_decay": 0.1} | settings)
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert all(name == names[p] for group in groups for name, p in group["params"])
    return {name: (group["lr"], group["weight_decay"]) for group in groups for name, _ in group["params"]}


def rates(model, **settings):
    return {name: rate for name, (rate, _) in table(model, **settings).items()}


def test_the_rate_decays_from_the_output_to_the_input():
    found = rates(Net(), layer_decay=0.5, layers=["stem", "blocks"])
    assert found["head.weight"] == found["scale"] == 1.0  # in no layer
    assert [found[f"blocks.{i}.0.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["blocks.1.1.bias"] == 0.25 and found["stem.weight"] == found["stem.bias"] == 0.0625


def test_layers_may_be_named_one_by_one_and_by_a_glob():
    layers = ["stem", "blocks.0.*", "blocks.[12].*", "head"]
    found = rates(Net(), layer_decay=0.5, layers=layers)
    assert found["head.bias"] == 0.5 and found["blocks.1.0.weight"] == found["blocks.2.0.weight"] == 0.25
    assert found["blocks.0.1.weight"] == 0.125 and found["stem.bias"] == 0.0625 and found["scale"] == 1.0
    assert rates(Net(), layer_decay=0.5, layers="blocks")["stem.bias"] == 1.0


def test_a_layers_factor_is_for_rates_by_name_too():
    found = rates(Net(), lrs={"blocks.1": 3.0, "*.bias": 5.0}, layer_decay=0.5, layers=["stem", "blocks"])
    assert found["blocks.1.0.weight"] == 0.75 and found["blocks.1.0.bias"] == 0.75 and found["blocks.2.0.bias"] == 2.5
    assert found["head.bias"] == 5.0 and found["stem.bias"] == 5.0 / 16


def test_a_layer_decay_of_one_changes_no_rate():
    assert set(rates(Net(), layer_decay=1.0, layers=["stem", "blocks"]).values()) == {1.0}


def test_modules_without_parameters_are_no_layers():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear(2, 1))
    found = rates(model, layer_decay=0.5, layers="0")
    assert found["0.0.weight"] == 0.25 and found["0.2.weight"] == 0.5 and found["1.weight"] == 1.0


def test_a_tied_weight_lies_in_the_first_of_its_layers():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    found = rates(model, layer_decay=0.5, layers=["0", "1", "2"])
    assert found == {"0.weight": 0.125, "0.bias": 0.125, "1.weight": 0.25, "1.bias": 0.25, "2.bias": 0.5}


def test_named_parameters_do_not_decay():
    found = table(Net(), no_decay=["scale", "head"])
    assert found["scale"] == found["head.weight"] == (1.0, 0.0) and found["stem.weight"] == (1.0, 0.1)
    assert table(Net())["scale"] == (1.0, 0.1)
    assert table(Net(), no_decay="*.0.weight")["blocks.0.0.weight"] == (1.0, 0.0)


def test_groups_are_named_and_those_of_the_common_rate_come_first():
    groups = param_groups(Net(), lr=1.0, lrs={"*.bias": 2.0}, layer_decay=0.5, layers=["stem"])
    names = [group["name"] for group in groups]
    assert names == ["decay", "no_decay", "*.bias.no_decay", "stem.decay", "stem:*.bias.no_decay"]


def test_every_helper_and_any_optimizer_take_the_same_groups():
    settings = {"lrs": {"head": 0.5}, "no_decay": "scale", "layer_decay": 0.5, "layers": ["stem", "blocks"]}
    model = Net()
    expected = [
        (g["name"], g["lr"], g["weight_decay"]) for g in param_groups(model, lr=1, weight_decay=0.1, **settings)
    ]
    for made in (
        adamw(lr=1, weight_decay=0.1, **settings)(model),
        sgd(lr=1, weight_decay=0.1, **settings)(model),
        Lamb(param_groups(model, lr=1, weight_decay=0.1, **settings), lr=1),
        torch.optim.RMSprop(param_groups(model, lr=1, weight_decay=0.1, **settings), lr=1),
    ):
        assert [(g["name"], g["lr"], g["weight_decay"]) for g in made.param_groups] == expected


def train(model, optimizer, steps=5):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("fused", [True, False, "auto"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_is_torchs_grouped_by_hand(nesterov, fused):
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    ours = sgd(lr=0.1, weight_decay=0.2, nesterov=nesterov, layer_decay=0.5, layers=["stem", "blocks"], fused=fused)
    factors = {"stem": 1 / 16, "blocks.0": 1 / 8, "blocks.1": 1 / 4, "blocks.2": 1 / 2}
    by_hand = [
        {
            "params": [parameter],
            "lr": 0.1 * next((f for layer, f in factors.items() if name.startswith(layer)), 1.0),
            "weight_decay": 0.2 if parameter.dim() > 1 else 0.0,
        }
        for name, parameter in twin.named_parameters()
    ]
    theirs = torch.optim.SGD(by_hand, momentum=0.9, nesterov=nesterov, fused=fused is not False)
    for a, b in zip(train(model, ours(model)), train(twin, theirs), strict=True):
        assert torch.equal(a, b)


def test_sgd_is_fused_where_the_kernel_is_right():
    assert sgd(lr=0.1)(nn.Linear(2, 2)).defaults["fused"]
    assert not sgd(lr=0.1)(nn.Linear(2, 2, device="meta")).defaults["fused"]
    for dtype in (torch.bfloat16, torch.float16):
        cast = nn.Linear(2, 2, dtype=dtype)
        assert bool(sgd(lr=0.1)(cast).defaults["fused"]) == (dtype_broken_in_sgd(cast.parameters()) is None)
    assert not sgd(lr=0.1)(nn.Embedding(4, 2, sparse=True)).defaults["fused"]


def test_what_is_set_is_shown_and_pickled():
    made = sgd(lr=0.1, no_decay="scale", layer_decay=0.5, layers=["stem"])
    shown = (
        "sgd(lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=False, lrs=None, "
        "no_decay=('scale',), layer_decay=0.5, layers=('stem',), fused='auto')"
    )
    assert repr(made) == repr(pickle.loads(pickle.dumps(made))) == shown


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(sgd, lr=-1.0), r"sgd\(lr=-1\.0\)"),
        (partial(sgd, lr=0.1, momentum=-0.1), r"sgd\(momentum=-0\.1\)"),
        (partial(sgd, lr=0.1, momentum=0, nesterov=True), r"True with a momentum"),
        (partial(sgd, lr=0.1, fused="no"), r"sgd\(fused='no'\)"),
        (partial(adamw, lr=0.1, layer_decay=0.5), r"adamw: a layer_decay goes with its layers"),
        (partial(adamw, lr=0.1, layers=["stem"]), r"adamw: a layer_decay goes with its layers"),
        (
            partial(adamw, lr=0.1, layers=["stem"], layer_decay=1.5),
            r"layer_decay=1\.5\)\n  want  a number above 0 and at",
        ),
        (partial(adamw, lr=0.1, no_decay=3), r"adamw\(no_decay=3\)"),
        (partial(param_groups, Net(), lr=0.1, no_decay=["scal"]), r"param_groups\(no_decay=.* Did you mean 'scale'"),
        (partial(param_groups, Net(), lr=0.1, layer_decay=0.5, layers=["stm"]), r"\['stm', .* Did you mean 'stem'"),
        (
            partial(param_groups, Net(), lr=0.1, layer_decay=0.5, layers=["blocks", "blocks.1"]),
            r"'blocks\.1\.0' is in",
        ),
        (
            partial(param_groups, nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), lr=0.1, layer_decay=0.5, layers="0"),
            "no par",
        ),
        (partial(param_groups, nn.ReLU(), lr=0.1), r"param_groups: ReLU has no parameters"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(make, said):
    with pytest.raises(SettingError, match=said):
        make()
