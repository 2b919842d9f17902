"""adamw: groups by decay and by part, equal to AdamW grouped by hand, and what cannot work refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from trainwright import Cosine, SettingError
from trainwright.core.plan import Plan
from trainwright.optim.optimizers import adamw
from trainwright.schedules.bound import group_name


def groups(model, **settings):
    """The names of the parameters in each group, by the group's name."""
    optimizer = adamw(**{"lr": 0.1, **settings})(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(group["params"] for group in optimizer.param_groups)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    return {group["name"]: [names[p] for p in group["params"]] for group in optimizer.param_groups}


def rates(model, **settings):
    return {group["name"]: group["lr"] for group in adamw(**{"lr": 0.1, **settings})(model).param_groups}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.embedding.weight


def test_the_weights_of_an_mlp_decay_and_its_biases_do_not():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    assert groups(model) == {"decay": ["0.weight", "2.weight"], "no_decay": ["0.bias", "2.bias"]}
    optimizer = adamw(lr=0.1, weight_decay=0.3)(model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_batch_norm_does_not_decay():
    no_decay = ["backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "head.bias"]
    assert groups(Net()) == {"decay": ["backbone.0.weight", "head.weight"], "no_decay": no_decay}


def test_the_weights_of_a_transformer_decay_and_its_norms_do_not():
    found = groups(nn.TransformerEncoderLayer(4, 2, 8))
    assert found["decay"] == [
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    ]
    assert {"norm1.weight", "norm2.bias", "self_attn.in_proj_bias"} <= set(found["no_decay"])


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4)), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)]
)
def test_a_norm_does_not_decay_whatever_shape_its_weight_has(norm):
    assert list(groups(nn.Sequential(norm))) == ["no_decay"]


def test_a_single_number_does_not_decay():
    model = nn.Linear(2, 2, bias=False)
    model.scale = nn.Parameter(torch.tensor(1.0))
    assert groups(model) == {"decay": ["weight"], "no_decay": ["scale"]}


def test_a_tied_embedding_is_given_once_and_decays():
    assert groups(Tied()) == {"decay": ["embedding.weight"], "no_decay": ["decoder.bias"]}
    assert groups(Tied(), lrs={"decoder": 0.01}) == {
        "decoder.decay": ["embedding.weight"],
        "decoder.no_decay": ["decoder.bias"],
    }


def test_parts_have_their_own_rates_behind_the_common_one():
    found = rates(Net(), lrs={"backbone": 1e-3})
    assert found == {"decay": 0.1, "no_decay": 0.1, "backbone.decay": 1e-3, "backbone.no_decay": 1e-3}
    assert next(iter(found)) == "decay"
    assert groups(Net(), lrs={"*.bias": 1.0})["*.bias.no_decay"] == ["backbone.0.bias", "backbone.1.bias", "head.bias"]


def test_the_longest_name_wins_whatever_the_order():
    lrs = {"backbone.0.bias": 3.0, "backbone": 1.0, "backbone.0": 2.0}
    for given in (lrs, dict(reversed(lrs.items()))):
        found = groups(Net(), lrs=given)
        assert found["backbone.0.bias.no_decay"] == ["backbone.0.bias"]
        assert found["backbone.0.decay"] == ["backbone.0.weight"]
        assert found["backbone.no_decay"] == ["backbone.1.weight", "backbone.1.bias"]
    assert groups(Net(), lrs={"backbone": 1.0, "*.bias": 2.0})["backbone.no_decay"][0] == "backbone.0.bias"
    assert groups(Net(), lrs={"backb*": 1.0, "*.[b]ias": 2.0})["backb*.no_decay"][0] == "backbone.0.bias"


def by_hand(model, fused):
    conv, norm, head = model.backbone[0], model.backbone[1], model.head
    return torch.optim.AdamW(
        [
            {"params": [head.weight], "weight_decay": 0.2},
            {"params": [head.bias], "weight_decay": 0.0},
            {"params": [conv.weight], "weight_decay": 0.2, "lr": 1e-3},
            {"params": [conv.bias, norm.weight, norm.bias], "weight_decay": 0.0, "lr": 1e-3},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=fused,
    )


@pytest.mark.parametrize("fused", [True, False, "auto"])
def test_updates_equal_those_of_an_adamw_grouped_by_hand(fused):
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    ours = adamw(lr=0.01, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6, lrs={"backbone": 1e-3}, fused=fused)(model)
    theirs = by_hand(twin, fused is not False)
    x = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    for _ in range(5):
        for one, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(group["fused"] is (fused is not False) for group in ours.param_groups)


def test_fused_is_left_out_where_a_kernel_is_missing():
    assert not adamw(lr=0.1)(nn.Linear(2, 2, device="meta")).defaults["fused"]
    assert not adamw(lr=0.1)(nn.Linear(2, 2, dtype=torch.complex64)).defaults["fused"]
    assert adamw(lr=0.1)(nn.Linear(2, 2, dtype=torch.bfloat16)).defaults["fused"]


def test_a_torch_that_names_no_fused_devices_gets_plain_kernels(monkeypatch):
    monkeypatch.delattr("torch.utils._foreach_utils._get_fused_kernels_supported_devices")
    assert not adamw(lr=0.1)(nn.Linear(2, 2)).defaults["fused"]


def test_the_state_is_restored_with_names():
    model = Net()
    optimizer = adamw(lr=0.1, lrs={"backbone": 1e-3})(model)
    model(torch.randn(4, 1, 4, 4)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = adamw(lr=5.0, lrs={"backbone": 5.0})(model)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert [group["name"] for group in again.param_groups] == [
        "decay",
        "no_decay",
        "backbone.decay",
        "backbone.no_decay",
    ]
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.1, 1e-3, 1e-3]
    assert again.param_groups[2]["param_names"] == ["backbone.0.weight"]
    assert again.state[model.head.bias]["step"] == 1


def test_a_checkpoint_fits_whatever_the_decay_is():
    model = Net()
    without = adamw(lr=0.1, weight_decay=0)(model)
    adamw(lr=0.1)(model).load_state_dict(without.state_dict())
    assert [group["name"] for group in without.param_groups] == ["decay", "no_decay"]


def test_a_schedule_scales_each_group_and_names_it():
    optimizer = adamw(lr=0.1, lrs={"backbone": 1e-3})(Net())
    table = Cosine().bind(optimizer, Plan(max_updates=10))
    table.apply(5)
    first, *_, last = (group["lr"] for group in optimizer.param_groups)
    assert 0 < first < 0.1
    assert last == pytest.approx(first / 100)
    assert group_name(2, optimizer.param_groups[2]) == "group 2 ('backbone.decay')"
    optimizer.param_groups[2]["lr"] = 1.0
    with pytest.raises(SettingError, match=r"lr of group 2 \('backbone\.decay'\) was set by hand"):
        table.apply(6)


def test_the_settings_are_shown_copied_and_pickled():
    lrs = {"backbone": 1e-3}
    made = adamw(lr=0.1, lrs=lrs)
    lrs["head"] = 1.0
    shown = "adamw(lr=0.1, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-08, lrs={'backbone': 0.001}, fused='auto')"
    assert repr(made) == repr(pickle.loads(pickle.dumps(made))) == shown
    assert adamw(lr=1, betas=(0, 0.9))(nn.Linear(1, 1)).defaults["betas"] == (0.0, 0.9)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, r"adamw\(lr=-1\.0\)\n  want  a number at least 0"),
        ({"lr": float("nan")}, r"adamw\(lr=nan\)"),
        ({"lr": "0.1"}, r"adamw\(lr='0\.1'\)"),
        ({"weight_decay": -0.1}, r"adamw\(weight_decay=-0\.1\)"),
        ({"eps": float("inf")}, r"adamw\(eps=inf\)"),
        ({"betas": (0.9, 1.0)}, r"adamw\(betas=\(0\.9, 1\.0\)\)\n  want  a number at least 0 and below 1"),
        ({"betas": 0.9}, r"adamw\(betas=0\.9\)\n  want  two numbers"),
        ({"lrs": {"head": -1.0}}, r"adamw\(lrs=\{'head': -1\.0\}\)"),
        ({"lrs": [0.1]}, "a dict of names and rates"),
        ({"lrs": {0: 0.1}}, "a dict of names and rates"),
        ({"fused": "yes"}, r"adamw\(fused='yes'\)"),
        ({"fused": 1}, r"adamw\(fused=1\)"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_given(settings, said):
    with pytest.raises(SettingError, match=said):
        adamw(**{"lr": 0.1, **settings})


@pytest.mark.parametrize(
    ("lrs", "said"),
    [
        ({"hed": 1.0}, r"adamw\(lrs=\{'hed': \.\.\.\}\) matches nothing in Net\. Did you mean 'head'\?"),
        ({"backbone.2": 1.0}, r"'backbone\.2': \.\.\.\}\): it has no parameters"),
        ({"head": 1.0, "head.weight": 2.0, "head.bias": 3.0}, r"'head': .*other names match all"),
        ({"head": 1.0, "*bias": 2.0}, r"'head' and '\*bias' are equally long .*\n  have  1 and 2"),
    ],
)
def test_a_name_that_matches_no_parameter_is_refused(lrs, said):
    with pytest.raises(SettingError, match=said):
        adamw(lr=0.1, lrs=lrs)(Net())


def test_a_model_that_cannot_be_grouped_is_refused():
    with pytest.raises(SettingError, match="ReLU has no parameters"):
        adamw(lr=0.1)(nn.ReLU())
    with pytest.raises(SettingError, match="'weight' has no shape yet"):
        adamw(lr=0.1)(nn.LazyLinear(2))
