"""What `optimizer=`, `schedule=` and `clip=` may be, and what is refused with what to write."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from trainwright import (
    Checkpoint,
    Cosine,
    SettingError,
    Trainer,
    adamw,
    batches,
)
from trainwright.optim.fused import dtype_broken_in_sgd

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.G, self.D = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.D(self.G(x))


def made(optimizer, **settings):
    model = Two()
    given = optimizer(model) if optimizer.__class__.__name__ == "Needs" else optimizer
    return Trainer(model, given, nn.CrossEntropyLoss(), **{"console": False} | settings)


class Needs:
    """Marks an optimizer that is built from the model by the test itself."""

    def __init__(self, build):
        self.build = build

    def __call__(self, model):
        return self.build(model)


ONE = {
    "instance": Needs(lambda model: SGD(model.parameters(), lr=0.1)),
    "function": lambda model: SGD(model.parameters(), lr=0.1),
    "class": partial(SGD),
    "partial": partial(SGD, lr=0.1),
}
EACH = {
    "instances": Needs(lambda model: {"G": SGD(model.G.parameters(), lr=0.1), "D": SGD(model.D.parameters(), lr=0.1)}),
    "functions": {"G": lambda m: SGD(m.G.parameters(), lr=0.1), "D": lambda m: SGD(m.D.parameters(), lr=0.1)},
    "partials": {"G": partial(SGD, lr=0.1), "D": partial(SGD, lr=0.1)},
    "mixed": {"D": partial(SGD, lr=0.1), "G": lambda model: SGD(model.G.parameters(), lr=0.1)},
}


def by_hand(lr=0.1):
    model = Two()
    optimizer = SGD(model.parameters(), lr=lr)
    for a, b in zip(x.split(4), y.split(4), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    return model


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("form", [*ONE, *EACH])
def test_every_form_trains_as_the_loop_by_hand(form):
    trainer = made((ONE | EACH)[form])
    trainer.fit(batches((x, y), 4), epochs=1)
    assert equal(trainer.model, by_hand(0.001 if form == "class" else 0.1))  # SGD's own default rate


def test_a_bare_class_is_called_with_named_parameters():
    trainer = made(AdamW)
    assert type(trainer.optimizer) is AdamW
    assert trainer.optimizer.state_dict()["param_groups"][0]["param_names"] == [n for n, _ in Two().named_parameters()]


def test_adamw_in_a_dict_groups_the_parameters_of_its_part():
    trainer = made({"G": adamw(lr=0.1, weight_decay=0.5), "D": adamw(lr=0.01)})
    trainer.fit(batches((x, y), 4), epochs=1)
    for name, rate in (("G", 0.1), ("D", 0.01)):
        groups = trainer.optimizers[name].param_groups
        mine = {id(p) for p in getattr(trainer.model, name).parameters()}
        assert {id(p) for group in groups for p in group["params"]} == mine
        assert {group["lr"] for group in groups} == {rate}
        for group in groups:
            assert all((p.ndim == 1) == (group["weight_decay"] == 0) for p in group["params"])


def test_the_optimizer_of_several_is_asked_for_by_name():
    trainer = made(EACH["partials"])
    with pytest.raises(SettingError, match=r"several: 'G', 'D'(.|\n)*self\.optimizers\['G'\]"):
        _ = trainer.optimizer
    assert set(trainer.optimizers) == {"G", "D"}
    assert made(None).optimizer is None and list(made(ONE["partial"]).optimizers) == ["optimizer"]


@pytest.mark.parametrize(
    ("optimizer", "error", "match"),
    [
        ("adam", TypeError, r"want  an Optimizer, a torch class or a partial"),
        (3, TypeError, r"an Optimizer, a torch class"),
        (lambda model: None, TypeError, r"optimizer="),
        (lambda model: model.parameters(), TypeError, r"gave a generator"),
        (nn.Linear, TypeError, r"an Optimizer"),
        ({}, SettingError, r"names no optimizer"),
        ({"G": "adam"}, TypeError, r"optimizer\['G'\]='adam'"),
        ({3: partial(SGD)}, SettingError, r"identifier"),
        ({"a b": partial(SGD)}, SettingError, r"identifier"),
        ({"head": partial(SGD, lr=0.1)}, SettingError, r"no submodule of this name(.|\n)*lambda model"),
        ({"head": adamw(lr=0.1)}, SettingError, r"adamw\(\.\.\.\): whose parameters"),
        ([partial(SGD)], TypeError, r"an Optimizer"),
        (adamw, SettingError, r"and not its result(.|\n)*optimizer=adamw\(lr=1e-3\)"),
        (partial(adamw, lr=0.1), SettingError, r"adamw\(lr=1e-3\)"),
    ],
)
def test_a_value_that_is_no_optimizer_is_refused(optimizer, error, match):
    with pytest.raises(error, match=match):
        made(optimizer)


def test_one_optimizer_under_two_names_is_refused():
    model = Two()
    one = SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="two names"):
        Trainer(model, {"G": one, "D": one})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"schedule": Cosine()}, r"several optimizers: which is meant(.|\n)*schedule=\{'G': Cosine"),
        ({"clip": 1.0}, r"several optimizers: which is meant(.|\n)*clip=\{'G': 1\.0, 'D': 1\.0\}"),
        ({"schedule": {"g": Cosine()}}, r"no optimizer has this name"),
        ({"schedule": {"GG": Cosine()}}, r"Did you mean 'G'"),
        ({"clip": {"generator": 1.0}}, r"one of \['G', 'D'\]"),
        ({"clip": {"G": -1.0}}, r"clip|ClipNorm"),
        ({"clip": {"G": "norm"}}, r"clip"),
        ({"schedule": {"G": "cosine"}}, r"schedule"),
    ],
)
def test_a_wrong_schedule_or_clip_of_several_is_refused(settings, match):
    with pytest.raises((SettingError, TypeError), match=match):
        made(EACH["partials"], **settings)


def test_a_dict_for_one_optimizer_is_refused():
    for settings in ({"schedule": {"G": Cosine()}}, {"clip": {"optimizer": 1.0}}):
        with pytest.raises(SettingError, match="for one optimizer without a name"):
            made(ONE["partial"], **settings)


def test_a_checkpoint_does_not_switch_a_kernel_on_that_is_wrong_here(tmp_path):
    """As one does that was saved where the weights lay on a GPU."""
    rows = [(a.bfloat16(), b) for a, b in zip(x.split(4), y.split(4), strict=True)]
    if dtype_broken_in_sgd([rows[0][0]]) is None:
        pytest.skip("the kernel of this torch is right")

    def trainer():
        model = Two().bfloat16()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Trainer(model, optimizer, nn.CrossEntropyLoss(), checkpoint=Checkpoint(tmp_path), console=False)

    def says_fused(_, state):
        state["param_groups"] = [group | {"fused": True} for group in state["param_groups"]]
        return state

    saved = trainer()  # by the kernel that is right: what the other one leaves may be anything
    saved.optimizer.register_state_dict_post_hook(says_fused)
    saved.fit(rows, max_updates=2)
    again = trainer()
    before = again.model.G.weight.clone()
    with pytest.warns(UserWarning, match=r"fused=True of SGD is the checkpoint's, False is used"):
        again.fit(rows, max_updates=6, resume="auto")
    assert again.optimizer.param_groups[0]["fused"] is False
    assert not torch.equal(before.float()[:, 0], again.model.G.weight.float()[:, 0])
