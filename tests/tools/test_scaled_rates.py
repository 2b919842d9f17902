"""Rates for other batch sizes, by the two rules."""

from __future__ import annotations

import math

import pytest
import torch

from trainwright import SettingError
from trainwright.tools.batch_search import linear_scaled, sqrt_scaled


def test_the_rules_are_those_of_their_papers():
    assert linear_scaled(0.1, batch=256, to=8192) == pytest.approx(3.2)  # Goyal et al., section 2.1
    assert linear_scaled(0.1, batch=256, to=64) == pytest.approx(0.025)
    assert sqrt_scaled(1e-3, batch=64, to=1024) == pytest.approx(4e-3)
    assert sqrt_scaled(1e-3, batch=64, to=64) == 1e-3


def test_k_small_steps_are_about_one_large_step_at_the_linear_rate():
    """The argument of the rule: gradients hardly change over k steps."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(512, 8, generator=generator), torch.zeros(8)
    targets = inputs.sum(1)

    def gradient(at, rows):
        return 2 * inputs[rows].T @ (inputs[rows] @ at - targets[rows]) / len(targets[rows])

    small, rate = weight, 1e-4
    for rows in torch.arange(512).split(64):
        small = small - rate * gradient(small, rows)
    large = weight - linear_scaled(rate, batch=64, to=512) * gradient(weight, torch.arange(512))
    assert (small - large).norm() < 0.01 * large.norm()


def test_at_the_square_root_rate_an_update_keeps_its_variance():
    noise = torch.randn(512 * 1024, generator=torch.Generator().manual_seed(0))

    def spread(batch, rate):
        return (rate * noise.view(-1, batch).mean(1)).std().item()

    assert spread(512, sqrt_scaled(0.1, batch=64, to=512)) == pytest.approx(spread(64, 0.1), rel=0.1)


@pytest.mark.parametrize("rule", [linear_scaled, sqrt_scaled])
@pytest.mark.parametrize(
    ("lr", "settings"),
    [(-0.1, {}), (math.nan, {}), (True, {}), (0.1, {"batch": 0}), (0.1, {"to": 0.5}), (0.1, {"to": True})],
)
def test_what_is_no_rate_or_no_batch_is_refused(rule, lr, settings):
    with pytest.raises(SettingError, match=rule.__name__):
        rule(lr, **{"batch": 64, "to": 512, **settings})
