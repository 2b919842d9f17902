"""Clipping: once per update, on the unscaled gradient of the whole window."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import ClipNorm, ClipValue, MixedPrecision, Observer, SettingError, Trainer


class Norms(Observer):
    wants = frozenset({"grad_norm"})

    def __init__(self):
        self.seen = []

    def on_update(self, update):
        self.seen.append(update.grad_norm)


class Silent(Norms):
    wants = frozenset()


def data():
    generator = torch.Generator().manual_seed(0)
    return [
        (10 * torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in (5, 5, 2, 5, 1)
    ]


def make(**settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def by_hand(clip, accumulate):
    """One clip per window, on the gradient of all its rows."""
    model = make().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for start in range(0, 5, accumulate):
        window = data()[start : start + accumulate]
        optimizer.zero_grad()
        x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        clip(list(model.parameters()))
        optimizer.step()
    return model, norms


CLIPS = {
    "norm": (ClipNorm(0.5), lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
    "number": (0.5, lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
    "norm 1": (ClipNorm(0.5, norm_type=1), lambda p: nn.utils.clip_grad_norm_(p, 0.5, 1)),
    "norm inf": (ClipNorm(0.5, norm_type=float("inf")), lambda p: nn.utils.clip_grad_norm_(p, 0.5, float("inf"))),
    "value": (ClipValue(0.2), lambda p: nn.utils.clip_grad_value_(p, 0.2)),
    "own": (lambda p: nn.utils.clip_grad_value_(p, 0.2), lambda p: nn.utils.clip_grad_value_(p, 0.2)),
}


@pytest.mark.parametrize("accumulate", [1, 2, 5])
@pytest.mark.parametrize("name", CLIPS)
def test_the_whole_windows_gradient_is_clipped_once(name, accumulate):
    setting, clip = CLIPS[name]
    trainer = make(clip=setting, accumulate=accumulate)
    trainer.fit(data(), epochs=1)
    model, _ = by_hand(clip, accumulate)
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        if accumulate == 1:
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", [None, MixedPrecision("fp16", init_scale=2.0**10)])
@pytest.mark.parametrize(("setting", "clip"), [CLIPS["norm"], CLIPS["value"], (None, lambda p: None)])
def test_the_norm_that_is_told_is_that_of_the_unscaled_gradient_before_clipping(setting, clip, precision):
    norms = Norms()
    make(clip=setting, observers=[norms], accumulate=2, precision=precision).fit(data(), epochs=1)
    assert norms.seen == pytest.approx(by_hand(clip, 2)[1], rel=1e-5 if precision is None else 1e-2, abs=1e-6)


def test_the_norm_is_not_computed_where_nothing_asks_for_it():
    silent = Silent()
    make(observers=[silent]).fit(data(), epochs=1)
    assert silent.seen == [None] * 5


@pytest.mark.parametrize("wrong", [0, -1.0, True, "1", ClipNorm, float("nan")])
def test_a_clip_that_cannot_work_is_refused_when_it_is_given(wrong):
    with pytest.raises(SettingError, match=r"clip=|ClipNorm"):
        make(clip=wrong)
    with pytest.raises(SettingError, match="above 0"):
        ClipValue(0)


@pytest.mark.parametrize("clip", [ClipValue(0.1), ClipNorm(0.1)])
def test_an_optimizer_without_any_gradient_has_nothing_to_clip(clip):
    clip([nn.Parameter(torch.ones(2))])
