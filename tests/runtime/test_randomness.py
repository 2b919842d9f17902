"""Random states: taken as plain data, put back whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from trainwright.runtime.randomness import random_state, set_random_state, unmoved


def draw():
    return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def test_a_state_put_back_gives_the_same_draws():
    draw()
    state = random_state()
    first = draw()
    draw()
    set_random_state(state)
    assert draw() == first


def test_a_state_is_a_copy():
    state = random_state()
    first = state["torch"].clone()
    draw()
    assert torch.equal(state["torch"], first)


def test_whatever_is_drawn_inside_nothing_moves_outside_also_after_an_error():
    state = random_state()
    expected = draw()
    set_random_state(state)
    with unmoved():
        draw()
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)
    with pytest.raises(RuntimeError), unmoved():
        draw()
        raise RuntimeError
    assert draw() == expected


def test_a_generator_that_is_named_is_put_back_too():
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    with unmoved([generator]):
        torch.rand(5, generator=generator)
    assert torch.equal(torch.rand(2, generator=generator), expected)
