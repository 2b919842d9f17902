"""Random states: taken as plain data, put back whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from trainwright.core.rng import random_state, rng_preserved, set_random_state


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
    with rng_preserved():
        draw()
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)
    with pytest.raises(RuntimeError), rng_preserved():
        draw()
        raise RuntimeError
    assert draw() == expected


def test_a_generator_that_is_named_is_put_back_too():
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    with rng_preserved([generator]):
        torch.rand(5, generator=generator)
    assert torch.equal(torch.rand(2, generator=generator), expected)


def test_numpy_state_is_what_numpy_says_whatever_was_drawn_in_between() -> None:
    steps = random.Random(1)
    saved = np.random.get_state()
    draws = [
        lambda: None,
        np.random.normal,  # caches a second one, and takes it the next time without moving the twister
        lambda: np.random.normal(size=3),
        lambda: np.random.rand(624 * steps.randrange(3)),
        lambda: np.random.seed(steps.randrange(3)),
        lambda: np.random.set_state(saved),
    ]
    for step in range(2000):
        draws[steps.randrange(len(draws))]()
        reported, real = random_state()["numpy"], np.random.get_state()
        assert (reported[0], *reported[2:]) == (real[0], *real[2:]), step
        assert (reported[1] == real[1]).all(), step
        if steps.random() < 0.3:
            kept = random_state()
            expected = np.random.normal(size=3)
            set_random_state(kept)
            assert (np.random.normal(size=3) == expected).all(), step


def test_a_second_normal_deviate_that_was_put_back_is_reported() -> None:
    np.random.seed(0)
    np.random.normal()  # NumPy makes two at once and keeps the other
    with rng_preserved():
        np.random.normal()  # the other: nothing else moves
        random_state()
    assert random_state()["numpy"][3:] == np.random.get_state()[3:]
    assert np.random.get_state()[3] == 1


def test_pythons_second_normal_deviate_is_part_of_the_state() -> None:
    draws = [lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), random.random, lambda: random.seed(3)]
    with rng_preserved():
        for draw in draws:  # the first leaves a second deviate, the next takes it without a draw
            before = random_state()
            draw()
            after = random.getstate()
            assert random_state()["python"] == after
            set_random_state(before)
            draw()
            assert random.getstate() == after
