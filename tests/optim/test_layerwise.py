"""LARS and LAMB: step by step those of a published package and of the papers, in groups, resumed, with fp16 scales."""

from __future__ import annotations

import copy
import importlib
import io
from functools import partial

import pytest
import torch
from torch import nn

from trainwright import SettingError
from trainwright.optim import Lamb, Lars, param_groups


class Net(nn.Module):
    """A matrix, a bias, a norm, weights that are zero, and a parameter that no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        nn.init.zeros_(self.head.weight)
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(x))))


def pair(*, seed=0):
    torch.manual_seed(seed)
    model = Net().double()
    return model, copy.deepcopy(model)


def course(model, optimizer, steps=12, *, rate=None):
    """The weights after each step; the rate changes on the way."""
    generator = torch.Generator().manual_seed(1)
    seen = []
    for number in range(steps):
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        (10**number * 1e-4 * nn.functional.cross_entropy(model(x), y)).backward()
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(number)
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        for p, q in zip(a, b, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert any(not torch.equal(p, q) for p, q in zip(one[0], one[-1], strict=True))


def published(name):
    return getattr(importlib.import_module("pytorch_optimizer"), name)


# Against the package pytorch_optimizer, whose conventions are its own.


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_lars_is_that_of_a_published_package(momentum, nesterov):
    """There, parameters with fewer than two dimensions never decay; here that is a matter of groups."""
    ours, theirs = pair()
    settings = {"momentum": momentum, "nesterov": nesterov}
    groups = param_groups(ours, lr=1.0, weight_decay=0.05)
    mine = Lars(groups, lr=1.0, trust=0.02, **settings)
    other = published("LARS")(theirs.parameters(), lr=1.0, weight_decay=0.05, trust_coefficient=0.02, **settings)
    rate = lambda number: 1.0 / (1 + number)  # noqa: E731
    assert_same(course(ours, mine, rate=rate), course(theirs, other, rate=rate))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_that_of_a_published_package(decay):
    """There, moments are not corrected, all parameters are adapted, |w| is at most 10, and eps is added to |u| too.

    Its rate is divided by the correction of the first moment, unless it is given `adam_debias`.
    """
    ours, theirs = pair()
    with torch.no_grad():
        for model in (ours, theirs):
            model.first.weight.mul_(20)  # more than 10
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": decay, "eps": 1e-16}
    mine = Lamb(ours.parameters(), **settings, bias_correction=False, clamp=(0, 10), adapt="all")
    other = published("Lamb")(theirs.parameters(), **settings, weight_decouple=False, adam_debias=True)
    rate = lambda number: 0.01 / (1 + number)  # noqa: E731
    assert_same(course(ours, mine, rate=rate), course(theirs, other, rate=rate))


# Against the papers.


def by_the_paper_lars(model, steps=12, *, lr, m, b, eta):
    """Algorithm 1 of arXiv 1708.03888, with the rate inside of v."""
    optimizer, v = torch.optim.SGD(model.parameters(), lr=0.0), {}

    def step():
        for p in model.parameters():
            if p.grad is not None:
                below = p.grad.norm() + b * p.norm()
                local = eta * p.norm() / below if p.norm() > 0 else 1.0
                v[p] = m * v.get(p, 0.0) + lr * local * (p.grad + b * p.detach())
                p.data -= v[p]

    optimizer.step = step
    return course(model, optimizer, steps)


def test_lars_for_all_parameters_at_a_steady_rate_is_algorithm_1():
    ours, theirs = pair()
    mine = Lars(ours.parameters(), lr=0.5, momentum=0.8, weight_decay=0.1, trust=0.02, adapt="all")
    assert_same(course(ours, mine), by_the_paper_lars(theirs, lr=0.5, m=0.8, b=0.1, eta=0.02))


def by_the_paper_lamb(model, *, lr, beta1, beta2, eps, b):
    """Algorithm 2 of arXiv 1904.00962."""
    optimizer, state = torch.optim.SGD(model.parameters(), lr=0.0), {}

    def step():
        for p in model.parameters():
            if p.grad is not None:
                m, v, t = state.get(p, (0.0, 0.0, 0))
                m, v, t = beta1 * m + (1 - beta1) * p.grad, beta2 * v + (1 - beta2) * p.grad**2, t + 1
                state[p] = m, v, t
                u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + b * p.detach()
                p.data -= lr * (p.norm() / u.norm() if p.norm() > 0 else 1.0) * u

    optimizer.step = step
    return course(model, optimizer)


def test_lamb_for_all_parameters_is_algorithm_2():
    ours, theirs = pair()
    mine = Lamb(ours.parameters(), lr=0.03, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.2, adapt="all")
    assert_same(course(ours, mine), by_the_paper_lamb(theirs, lr=0.03, beta1=0.7, beta2=0.9, eps=1e-6, b=0.2))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (partial(Lars, momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
        (partial(Lars, momentum=0.9, nesterov=True), partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
        (partial(Lamb, eps=1e-8, weight_decay=0.0), partial(torch.optim.AdamW, eps=1e-8, weight_decay=0.0)),
    ],
)
def test_biases_and_norms_are_stepped_as_by_sgd_and_adam(ours, theirs):
    one, other = pair()
    for model in (one, other):
        for p in (model.first.weight, model.head.weight, model.unused):
            p.requires_grad_(False)
    assert_same(course(one, ours(one.parameters(), lr=0.1)), course(other, theirs(other.parameters(), lr=0.1)))


def test_a_gradient_of_zero_makes_a_plain_step():
    weight = nn.Parameter(torch.ones(2, 2))
    for optimizer in (Lars([weight]), Lamb([weight], weight_decay=0.0)):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert torch.equal(weight, torch.ones(2, 2))


# In a run.


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 5, generator=generator), torch.randint(0, 3, (24,), generator=generator)


KINDS = {"lars": partial(Lars, trust=0.02), "lamb": Lamb}


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_through_a_file_and_through_copies(kind):
    def step(model, optimizer):
        torch.manual_seed(5)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()

    model = Net()
    optimizer = KINDS[kind](param_groups(model, lr=0.1), lr=0.1)
    step(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = Net()
    other.load_state_dict(weights)
    again = KINDS[kind](param_groups(other, lr=5.0), lr=5.0)
    again.load_state_dict(state)
    both, copied = copy.deepcopy((model, optimizer))
    for one, way in ((model, optimizer), (other, again), (both, copied)):
        step(one, way)
    for a, b, c in zip(model.parameters(), other.parameters(), both.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_reduced_precision_is_normed_in_float32():
    weight = nn.Parameter(torch.full((300, 300), 200.0, dtype=torch.float16))  # its norm of 60,000 squared is no half
    optimizer = Lars([weight], lr=1.0, trust=0.5, momentum=0.0)
    weight.grad = torch.full_like(weight, 300.0)
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 100.0))  # 0.5 * |w| / |g| * g = w / 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_stay_as_they_are(kind):
    model = Net()
    optimizer = KINDS[kind](model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(4, 5)).square().sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(a is None or torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(Lars, lr=-1.0), r"Lars\(lr=-1\.0\)"),
        (partial(Lars, momentum=1.0), r"Lars\(momentum=1\.0\)"),
        (partial(Lars, trust=0.0), r"Lars\(trust=0\.0\)"),
        (partial(Lars, nesterov=True, momentum=0.0), "want  a momentum"),
        (partial(Lars, adapt="weight"), r'Lars\(adapt=.weight.\)\n  want  "weights" or "all"'),
        (partial(Lamb, betas=(0.9, 1.0)), r"Lamb\(betas=\(0\.9, 1\.0\)\)"),
        (partial(Lamb, eps=-1.0), r"Lamb\(eps=-1\.0\)"),
        (partial(Lamb, clamp=10), r"Lamb\(clamp=10\)\n  want  two numbers or None"),
        (partial(Lamb, clamp=(10, 0)), r"Lamb\(clamp=\(10, 0\)\)"),
        (partial(Lamb, weight_decay=float("nan")), r"Lamb\(weight_decay=nan\)"),
        (partial(Lamb, bias_correction="yes"), r"Lamb\(bias_correction='yes'\)"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(make, said):
    with pytest.raises(SettingError, match=said):
        make(nn.Linear(2, 2).parameters())


def test_a_sparse_gradient_is_refused():
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(SettingError, match="Lamb: a gradient that is sparse"):
        Lamb(embedding.parameters()).step()
