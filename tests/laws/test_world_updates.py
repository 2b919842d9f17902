"""World: an update of one's own reads the window's true gradient; every number that a run tells is over all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distributed.pool import pool
from records import Records
from trainwright import MeanLoss, StepOutput, Trainer, accuracy
from trainwright.metrics import F1, R2

from .own_updates import Pair
from .world_runs import apart, flat, perceptron, rows_of_classes

EXACT = 1e-12
ROWS, BATCH, EPOCHS = 25, 4, 3  # the last batch has one row: the others stand in with a dummy


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*perceptron(5, 3)).double()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def data() -> list[tuple[Tensor, Tensor]]:
    x, y = rows_of_classes(ROWS)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def whole(window: Any) -> tuple[Tensor, Tensor]:
    """The rows of a window in one batch."""
    x, y = zip(*window, strict=True)
    return torch.cat(x), torch.cat(y)


def grouped(accumulate: int) -> list[tuple[Tensor, Tensor]]:
    """What one process sees of each window."""
    return [whole(data()[i : i + accumulate]) for i in range(0, len(data()), accumulate)]


# Updates of one's own, and their plain loops.


class Written(Trainer[nn.Module]):
    """A backward by hand; what it clips is the gradient of all rows, after `apply_gradients` has averaged it."""

    def update(self, window: Any) -> Any:
        x, y = whole(window)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.apply_gradients()
        return loss


class Penalised(Trainer[nn.Module]):
    """A penalty on the slope of the output, differentiated twice; the gradient is read before it is applied."""

    def update(self, window: Any) -> Any:
        x, y = whole(window)
        self.minimize(penalised(self.model, x, y))


def penalised(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = module(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, y) + 0.3 * (slope.norm(dim=1) - 1).square().mean()


class Read(Trainer[nn.Module]):
    """Reads the norm of the window's gradient, and scales by it."""

    def update(self, window: Any) -> Any:
        loss = self.compute_gradients(window)
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(norm + 1)
        self.apply_gradients()
        return {"norm": norm, "loss": loss}


OWN = {"written": Written, "penalised": Penalised, "read": Read}


def own(kind: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    module = model()
    loss = nn.CrossEntropyLoss() if kind == "read" else None
    trainer = OWN[kind](module, sgd(module), loss, accumulate=accumulate, clip=clip, console=False)
    result = trainer.fit(data(), epochs=EPOCHS)
    return {"weights": flat(module), "history": result.history}


def own_by_hand(kind: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    module = model()
    optimizer, history = sgd(module), []
    for epoch in range(EPOCHS):
        sums = dict.fromkeys(("norm", "loss") if kind == "read" else ("loss",), 0.0)
        for x, y in grouped(accumulate):
            optimizer.zero_grad()
            loss = penalised(module, x, y) if kind == "penalised" else F.cross_entropy(module(x), y)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            for parameter in module.parameters() if kind == "read" else ():
                parameter.grad = parameter.grad / (norm + 1)  # type: ignore[operator]
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            reported = {"loss": loss.item(), "norm": norm.item()}
            sums = {name: total + reported[name] * len(x) for name, total in sums.items()}
        updates = (epoch + 1) * len(grouped(accumulate))
        numbers = {name: total / ROWS for name, total in sums.items()}
        history.append({"epoch": epoch + 1, "update": updates, **numbers, "lr": 0.1})
    return {"weights": flat(module), "history": history}


@pytest.mark.sample(6)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", OWN)
def test_an_update_of_ones_own_is_that_of_one_process(
    kind: str, accumulate: int, clip: float | None, size: int
) -> None:
    expected = own_by_hand(kind, accumulate, clip)
    outcomes = pool(size).run(own, kind, accumulate, clip)
    for outcome in outcomes:
        named = [{name: row[name] for name in expected["history"][0]} for row in outcome["history"]]
        assert apart({**outcome, "history": named}, expected) <= EXACT
        assert outcome["weights"] == outcomes[0]["weights"]


class Adversarial(Trainer[Pair]):
    """Two optimizers; the noise comes with the rows, so that it is the same on any number of processes."""

    def update(self, window: Any) -> None:
        real, noise = (torch.cat(parts) for parts in zip(*window, strict=True))
        fake = self.model.G(noise)
        self.minimize(critic(self.model, real, fake), "D")
        self.minimize(generator(self.model, fake), "G")


def critic(pair: Pair, real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-pair.D(real)).mean() + F.softplus(pair.D(fake.detach())).mean()


def generator(pair: Pair, fake: Tensor) -> Tensor:
    return F.softplus(-pair.D(fake)).mean()


def adversaries() -> tuple[Pair, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(3)
    pair = Pair().double()
    return pair, {"G": sgd(pair.G), "D": sgd(pair.D)}


def points() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    real, noise = torch.randn(ROWS, 2, dtype=torch.float64), torch.randn(ROWS, 3, dtype=torch.float64)
    return list(zip(real.split(BATCH), noise.split(BATCH), strict=True))


def compete(accumulate: int) -> dict[str, Any]:
    pair, optimizers = adversaries()
    result = Adversarial(pair, optimizers, accumulate=accumulate, console=False).fit(points(), epochs=EPOCHS)
    return {"weights": flat(pair), "history": result.history}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_optimizers_that_minimize_in_turn_are_those_of_one_process(accumulate: int, size: int) -> None:
    pair, optimizers = adversaries()
    history = []
    for epoch in range(EPOCHS):
        total = {"loss_D": 0.0, "loss_G": 0.0}
        batches = points()
        for i in range(0, len(batches), accumulate):
            real, noise = (torch.cat(parts) for parts in zip(*batches[i : i + accumulate], strict=True))
            fake = pair.G(noise)
            for name in ("D", "G"):
                optimizers[name].zero_grad()
                loss = critic(pair, real, fake) if name == "D" else generator(pair, fake)
                loss.backward()
                optimizers[name].step()
                total[f"loss_{name}"] += loss.item() * len(real)
        means = {name: value / ROWS for name, value in total.items()}
        updates = (epoch + 1) * -(-len(batches) // accumulate)
        row = {"epoch": epoch + 1, "update": updates, **means, "loss": sum(means.values())}
        history.append({**row, "lr_G": 0.1, "lr_D": 0.1})
    for outcome in pool(size).run(compete, accumulate):
        same = [{name: row[name] for name in history[0]} for row in outcome["history"]]
        assert apart({**outcome, "history": same}, {"weights": flat(pair), "history": history}) <= EXACT


# Numbers.


class Telling(Trainer[nn.Module]):
    """Named losses over counts of its own, and logged numbers, of rows and of a count of its own."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        output = self.model(x)
        self.log("spread", output.detach().std(1).mean())
        some = x[:, 0][x[:, 0] > -0.5]
        self.log("some", some.sum() / max(1, len(some)), len(some))
        first, second = F.cross_entropy(output, y), output.square().sum(1).mean()
        return StepOutput({"fit": MeanLoss(first, len(x)), "size": MeanLoss(0.1 * second, len(x))}, output, y)


def shape(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output[:, 0], target.double()


class First(R2):
    """R2 of the first score."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*shape(output, target))


def tell(accumulate: int) -> dict[str, Any]:
    module, seen = model(), Records()
    metrics = {"accuracy": accuracy, "f1": F1(), "r2": First()}
    settings = {"metrics": metrics, "accumulate": accumulate, "observers": [seen], "console": False}
    result = Telling(module, sgd(module), **settings).fit(data(), data()[:3], epochs=2)
    reported = [(update.update, update.loss, update.rows, dict(update.values)) for update in seen.updates]
    return {"weights": flat(module), "history": result.history, "reported": reported}


def numbers_of(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """What a window tells, over all of its rows."""
    output = module(x)
    fit, size = F.cross_entropy(output, y).item(), 0.1 * output.square().sum(1).mean().item()
    said = {"loss": fit + size, "fit": fit, "size": size, "spread": output.std(1).mean().item()}
    return said | {"some": x[:, 0][x[:, 0] > -0.5].mean().item()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_named_losses_logged_numbers_and_scores_are_over_the_rows_of_all_processes(accumulate: int, size: int) -> None:
    alone = tell(accumulate)
    outcomes = pool(size).run(tell, accumulate)
    for outcome in outcomes:
        assert apart(outcome, alone) <= EXACT
    module = model()
    expected = numbers_of(module, *grouped(accumulate)[0])
    update, loss, rows, values = outcomes[0]["reported"][0]
    assert (update, rows) == (1, len(grouped(accumulate)[0][0]))
    assert {"loss": loss, **values} == pytest.approx(expected, abs=1e-12)
    assert [reported[:1] + reported[2:3] for reported in outcomes[0]["reported"]] == [
        reported[:1] + reported[2:3] for reported in alone["reported"]
    ]
    for (_, loss, _, values), (_, loss_alone, _, values_alone) in zip(
        outcomes[0]["reported"], alone["reported"], strict=True
    ):
        assert {"loss": loss, **values} == pytest.approx({"loss": loss_alone, **values_alone}, abs=1e-12)
    assert all(outcome["reported"] == [] for outcome in outcomes[1:])
