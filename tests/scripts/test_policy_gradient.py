"""Policy gradient: the data of each update are episodes played with the weights that the update before has left."""

from __future__ import annotations

from itertools import pairwise

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights
from torch import nn

from trainwright import Trainer

LENGTH = 12
"""Steps of an episode."""


def start():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def adam(policy):
    return torch.optim.Adam(policy.parameters(), lr=0.05)


def play(policy, rows=16):
    """States, actions and what followed from each: a point is pushed left or right, and shall stay near 0."""
    place, speed = torch.rand(rows, dtype=torch.float64) * 2 - 1, torch.zeros(rows, dtype=torch.float64)
    states, actions, rewards = [], [], []
    with torch.no_grad():
        for _ in range(LENGTH):
            states.append(torch.stack([place, speed], 1))
            actions.append(torch.distributions.Categorical(logits=policy(states[-1])).sample())
            speed = speed + 0.2 * (actions[-1] * 2 - 1)
            place = place + 0.2 * speed
            rewards.append(-place.abs())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    returns = (returns - returns.mean(1, keepdim=True)) / LENGTH
    return torch.cat(states), torch.cat(actions), returns.flatten()


def episodes(policy):
    while True:
        yield play(policy)


def loss_of(policy, batch):
    states, actions, returns = batch
    return -(torch.distributions.Categorical(logits=policy(states)).log_prob(actions) * returns).mean()


def by_hand(policy, updates, accumulate=1):
    optimizer = adam(policy)
    stream = episodes(policy)
    total = 0.0
    for _ in range(updates):
        optimizer.zero_grad()
        for batch in [next(stream) for _ in range(accumulate)]:
            loss = loss_of(policy, batch) / accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.02)
        optimizer.step()
    return [{"loss": total / updates}]


def by_trainer(policy, updates, accumulate=1):
    class Reinforce(Trainer):
        def training_step(self, batch):
            return loss_of(self.model, batch)

    trainer = Reinforce(policy, adam(policy), accumulate=accumulate, clip=0.02, console=False)
    return trainer.fit(episodes(policy), max_updates=updates).history


def test_policy_gradient_gives_what_its_plain_loop_gives():
    plain = start()
    reported = by_hand(plain, 40)
    policy = start()
    assert_near_history(by_trainer(policy, 40), reported)
    assert_same_weights(policy, plain)
    with torch.no_grad():
        before, after = (play(one, 500)[0][-500:, 0].abs().mean() for one in (start(), policy))
    assert after < before / 2


def test_policy_gradient_over_two_plays_of_one_policy_gives_what_its_plain_loop_gives():
    plain = start()
    reported = by_hand(plain, 10, accumulate=2)
    policy = start()
    assert_near_history(by_trainer(policy, 10, accumulate=2), reported)
    assert_same_weights(policy, plain)


def test_the_next_episodes_are_asked_for_after_the_update_before():
    policy, asked = start(), []

    class Reinforce(Trainer):
        def training_step(self, batch):
            return loss_of(self.model, batch)

    trainer = Reinforce(policy, adam(policy), console=False)

    def stream():
        while True:
            asked.append((trainer.progress.updates, next(policy.parameters()).detach().clone()))
            yield play(policy)

    trainer.fit(stream(), max_updates=5)
    assert [updates for updates, _ in asked] == [0, 1, 2, 3, 4]
    assert all(not torch.equal(one, other) for (_, one), (_, other) in pairwise(asked))


def test_policy_gradient_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
