"""Each class of `custom_steps.py` beside its plain loop: the same weights bit for bit, and no more lines."""

from __future__ import annotations

import ast
import inspect
from functools import partial
from textwrap import dedent

import pytest
import torch
from loading import load
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F

from trainwright import batches

steps = load("custom_steps")


def plain_gan(model, optimizers, data, *, epochs):
    for _ in range(epochs):
        for real, _ in data:
            fake = model(torch.randn(len(real), steps.NOISE))
            judged = F.softplus(-model.D(real)) + F.softplus(model.D(fake.detach()))
            optimizers["D"].zero_grad()
            judged.mean().backward()
            optimizers["D"].step()
            optimizers["G"].zero_grad()
            F.softplus(-model.D(fake)).mean().backward()
            optimizers["G"].step()


def plain_penalized(model, optimizer, data, *, epochs):
    for _ in range(epochs):
        for batch in data:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch[0]), batch[1]) + steps.PENALTY * model.weight.square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)


def plain_student(model, optimizer, data, *, epochs, teacher):
    for _ in range(epochs):
        for images, classes in data:
            optimizer.zero_grad()
            output, hints = model(images), teacher(images).detach()
            soft = F.kl_div(
                (output / steps.HEAT).log_softmax(1), (hints / steps.HEAT).softmax(1), reduction="batchmean"
            )
            loss = F.cross_entropy(output, classes) + steps.HEAT**2 * soft
            loss.backward()
            optimizer.step()


def plain_sam(model, optimizer, data, *, epochs):
    for _ in range(epochs):
        for images, classes in data:
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            weights = list(model.parameters())
            gradients = [weight.grad for weight in weights]
            uphill = torch._foreach_mul(gradients, steps.RADIUS / nn.utils.get_total_norm(gradients))
            before = [weight.detach().clone() for weight in weights]
            with torch.no_grad():
                torch._foreach_add_(weights, uphill)
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            with torch.no_grad():
                torch._foreach_copy_(weights, before)
            optimizer.step()


def check(make, optimizer_of, *, data, epochs, cls, plain, loss=None, frozen=None):
    """Train twins, the one by hand and the other by the class; the weights and the random state end equal."""
    weights, states, results = [], [], []
    for ours in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = optimizer_of(model)
        torch.manual_seed(1)
        if ours:
            trainer = cls(model, optimizer, loss, frozen=frozen, console=False)
            results.append(trainer.fit(data(), epochs=epochs))
        else:
            plain(model, optimizer, data(), epochs=epochs, **(frozen or {}))
        weights.append(model.state_dict())
        states.append(torch.get_rng_state())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert torch.equal(*states)
    return results[0]


def digits(rows=200):
    return steps.first(steps.digits()[0], rows)


def test_the_gan_ends_with_the_weights_of_its_plain_loop():
    def adams(model):
        return {name: torch.optim.Adam(getattr(model, name).parameters(), lr=2e-3) for name in "GD"}

    result = check(steps.Draws, adams, data=digits, epochs=5, cls=steps.GAN, plain=plain_gan)
    assert result.updates == 20 and {"loss_G", "loss_D", "lr_G", "lr_D"} <= set(result.history[-1])


def test_lbfgs_ends_with_the_weights_of_its_plain_loop():
    table, targets = load_breast_cancer(return_X_y=True)
    data = (torch.tensor((table - table.mean(0)) / table.std(0)), torch.tensor(targets))
    make = partial(nn.Linear, 30, 2, dtype=torch.float64)

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    result = check(make, lbfgs, data=lambda: batches(data, 569), epochs=3, cls=steps.Penalized, plain=plain_penalized)
    assert result.history[-1]["loss"] < 0.07


def test_the_student_ends_with_the_weights_of_its_plain_loop():
    torch.manual_seed(2)
    frozen = {"teacher": steps.network(32)}
    make = partial(steps.network, 16)
    adam = lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3)  # noqa: E731
    result = check(make, adam, data=digits, epochs=5, cls=steps.Student, plain=plain_student, frozen=frozen)
    row = result.history[-1]
    assert row["loss"] == pytest.approx(row["hard"] + row["soft"], rel=1e-6)


def test_sam_ends_with_the_weights_of_its_plain_loop():
    make = partial(steps.network, 64)
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    check(make, sgd, data=digits, epochs=5, cls=steps.SharpnessAware, plain=plain_sam, loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("cls", "plain"),
    [
        (steps.GAN, plain_gan),
        (steps.Penalized, plain_penalized),
        (steps.Student, plain_student),
        (steps.SharpnessAware, plain_sam),
    ],
)
def test_a_class_is_no_longer_than_its_plain_loop(cls, plain):
    assert lines(cls) <= lines(plain), f"{lines(cls)} and {lines(plain)} lines"


def lines(thing):
    """Lines of a class or a function without docstring, blank lines and comments, each statement on one line."""
    (node,) = ast.parse(dedent(inspect.getsource(thing))).body
    if ast.get_docstring(node):
        node.body = node.body[1:]
    return sum(bool(line) for line in ast.unparse(node).splitlines())
