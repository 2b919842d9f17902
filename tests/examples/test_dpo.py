"""`dpo.py`: its loss and gradient are the paper's by hand; its reference stays; preferences are learned."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from trainwright import adamw, batches


class Table(nn.Module):
    """The scores of the next letter depend on this one alone."""

    def __init__(self, seed, letters=5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scores = nn.Parameter(torch.randn(letters, letters, generator=generator, dtype=torch.float64))

    def forward(self, letters):
        return self.scores[letters].transpose(1, 2)


def drawn(rows=4, prompt=3, answer=2):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 5, (rows, length), generator=generator) for length in (prompt, answer, answer)]


def by_hand(scores, prompt, answer):
    """log pi(y | x), letter by letter: the log of a product of shares."""
    total = 0.0
    before = prompt[-1]
    for letter in answer:
        row = [math.exp(value) for value in scores[before].tolist()]
        total += math.log(row[letter] / sum(row))
        before = letter
    return total


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def numbers(policy, reference, beta):
    """Equation 7 of arXiv 2305.18290, and the weight of each row in its gradient, written out."""
    prompt, chosen, rejected = (part.tolist() for part in drawn())
    losses, weights = [], []
    for x, w, l in zip(prompt, chosen, rejected, strict=True):  # noqa: E741
        ratio_w = by_hand(policy, x, w) - by_hand(reference, x, w)
        ratio_l = by_hand(policy, x, l) - by_hand(reference, x, l)
        losses.append(-math.log(sigmoid(beta * ratio_w - beta * ratio_l)))
        weights.append(sigmoid(beta * ratio_l - beta * ratio_w))
    return sum(losses) / len(losses), weights


def loss_of(example, policy, reference, beta):
    prompt, *answers = drawn()
    ratios = [
        example.log_prob(policy, prompt, answer) - example.log_prob(reference, prompt, answer).detach()
        for answer in answers
    ]
    return example.dpo_loss(*ratios, beta=beta)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_loss_is_equation_7(example, beta):
    policy, reference = Table(0), Table(1)
    expected, _ = numbers(policy.scores.detach(), reference.scores.detach(), beta)
    assert loss_of(example, policy, reference, beta).item() == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_the_reference_itself_is_log_2(example):
    assert loss_of(example, Table(0), Table(0), 0.3).item() == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_gradient_is_the_papers(example, beta):
    """Section 4 of the paper: -beta * E[sigmoid(r(l) - r(w)) * (grad log pi(w) - grad log pi(l))]."""
    policy, reference = Table(0), Table(1)
    loss_of(example, policy, reference, beta).backward()
    scores = policy.scores.detach()
    _, weights = numbers(scores, reference.scores.detach(), beta)
    expected = torch.zeros_like(scores)
    for x, w, l, weight in zip(*(part.tolist() for part in drawn()), weights, strict=True):  # noqa: E741
        for answer, sign in ((w, 1), (l, -1)):
            before = x[-1]
            for letter in answer:  # the gradient of a log-softmax: one at the letter, less the shares
                share = scores[before].exp() / scores[before].exp().sum()
                expected[before] += sign * -beta * weight / len(weights) * (torch.eye(5).double()[letter] - share)
                before = letter
    torch.testing.assert_close(policy.scores.grad, expected, rtol=1e-10, atol=1e-14)


def test_a_step_of_the_trainer_is_that_loss_and_the_reference_stays(example):
    policy, reference = Table(0), Table(1)
    start = copy.deepcopy(reference.state_dict())
    trainer = example.DPO(policy, adamw(lr=0.01), frozen={"reference": reference}, console=False)
    expected, _ = numbers(policy.scores.detach(), reference.scores.detach(), example.BETA)
    trainer.fit(batches(tuple(drawn()), 4), epochs=2)
    assert trainer.history[0]["loss"] == pytest.approx(expected, rel=1e-12)
    assert torch.equal(reference.scores, start["scores"]) and reference.scores.grad is None
    assert not torch.equal(policy.scores, Table(0).scores)


def test_preferences_are_learned(example):
    torch.manual_seed(0)
    few, to_prefer, held_out = (
        tuple(part[:rows] for part in kind) for rows, kind in zip((640, 200, 100), example.pairs(), strict=True)
    )
    writer = example.learn_to_write(few, updates=15)
    trainer = example.DPO(writer, adamw(lr=3e-3), frozen={"reference": copy.deepcopy(writer)}, console=False)
    trainer.fit(batches(to_prefer, 50, shuffle=True, seed=0), batches(held_out, 100), epochs=2)
    assert trainer.history[-1]["val_rewarded"] > 0.9 and trainer.history[-1]["val_loss"] < 0.5
    assert "of pairs" in example.describe(writer, held_out)
