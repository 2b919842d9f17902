"""Numbers of updates of users' own: metrics, logged and returned numbers, losses by their counts, what hooks see."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import MeanLoss, Observer, SettingError, StepOutput, SumLoss, Trainer, accuracy

from .models import assert_equal
from .own_updates import GAN, Scaled, gan_by_hand, numbers, pairs, points, run
from .test_custom_updates_gan import shared, shared_by_hand
from .window_cases import Smooth, twins


class Measured(Trainer):
    """Two minimized losses, one with an output and a target; numbers logged around them."""

    def update(self, window):
        x = torch.cat([x for x, _ in window])
        y = torch.cat([y for _, y in window])
        output = self.model(x)
        self.log("before", float(len(y)))
        self.minimize(StepOutput(F.cross_entropy(output, y), output, y))
        self.log("size", output.detach().abs().mean(), count=len(y))
        return {"gap": float(y.sum())}


def classes():
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 1, 6, 2, 3, 5, 2)
    x = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (sum(sizes),), generator=generator)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def check_numbers(k=3):
    """Metrics, logged and returned numbers of an update of one's own are exact means over the rows."""
    theirs, ours = twins("sgd")
    data = classes()
    _, result, updates = run(Measured, ours, data, accumulate=k, metrics={"accuracy": accuracy})
    model, optimizer = theirs
    reported = []
    for start in range(0, len(data), k):
        x, y = (torch.cat(parts) for parts in zip(*data[start : start + k], strict=True))
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits, size = float((output.argmax(1) == y).sum()), output.detach().abs().mean().item()
        reported.append({"n": len(y), "loss": loss.item(), "hits": hits, "size": size, "gap": float(y.sum())})
    rows = sum(one["n"] for one in reported)
    (row,) = result.history
    assert row.get("accuracy") == sum(one["hits"] for one in reported) / rows
    for name in ("loss", "size", "gap"):
        assert row.get(name) == pytest.approx(sum(one[name] * one["n"] for one in reported) / rows, rel=1e-14)
        assert [update.values.get(name, update.loss) for update in updates] == [one[name] for one in reported]
    assert row["before"] == pytest.approx(sum(one["n"] ** 2 for one in reported) / rows, rel=1e-14)


def check_counts(wrap, reported_of):
    """A minimized loss that tells its own count is weighed by it in the epoch's mean, by rows where it tells none."""

    class Own(Trainer):
        def update(self, window):
            ((x, y),) = window
            self.minimize(wrap(self.model(x), y, 1 + self.progress.updates), "all")

    torch.manual_seed(7)
    model = Smooth().double()
    optimizers = {"all": torch.optim.SGD(model.parameters(), lr=0.0)}
    data = numbers()
    _, result, _ = run(Own, (model, optimizers), data)
    total = counted = 0.0
    with torch.no_grad():
        for n, (x, y) in enumerate(data, 1):
            value, count = reported_of(model(x), y, n)
            total, counted = total + value.item(), counted + count
    assert result.history[0]["loss_all"] == pytest.approx(total / counted, rel=1e-14)
    assert result.history[0]["loss"] == result.history[0]["loss_all"]


class EachBatch(Trainer):
    """An update of several steps: one for each micro-batch."""

    def update(self, window):
        for batch in window:
            self.minimize(self.training_step(batch))


class ByHand(Trainer):
    """Accumulation by hand, after a first pass of the library's that is thrown away."""

    def update(self, window):
        self.compute_gradients(window)
        self.optimizer.zero_grad()
        for batch in window:
            (self.training_step(batch) / len(window)).backward()
        self.apply_gradients()


class Unfed(Trainer):
    """Minimizes a bare loss."""

    def update(self, window):
        ((x, y),) = window
        self.minimize(F.cross_entropy(self.model(x), y))


def check_after_update(precision=None):
    """`after_update` sees the weights after the step, and the gradients that moved them: unscaled and clipped."""
    theirs, ours = shared()
    seen, reported = [], []

    class Own(Trainer):
        def update(self, window):
            loss = self.compute_gradients(window)
            self.apply_gradients("G")
            self.apply_gradients("D")
            return loss

        def after_update(self):
            parameters = list(self.model.parameters())
            seen.append([[p.grad if p.grad is None else p.grad.clone(), p.detach().clone()] for p in parameters])
            self.log("first", parameters[0].detach().flatten()[0])

    settings = {"clip": {"D": 0.1}, "precision": precision, "loss": nn.MSELoss()}
    _, _, updates = run(Own, ours, numbers(), **settings)
    for batch in numbers():
        shared_by_hand(*theirs, F.mse_loss, [batch], clip=0.1)
        reported.append([[p.grad.clone(), p.detach().clone()] for p in theirs[0].parameters()])
    assert_equal(seen, reported)
    assert [update.values["first"] for update in updates] == [one[0][1].flatten()[0].item() for one in reported]


class Wants(Observer):
    wants = frozenset({"grad_norm"})


COUNTS = {
    "a tensor": (lambda o, y, n: F.mse_loss(o, y), lambda o, y, n: (F.mse_loss(o, y) * len(y), len(y))),
    "a mean": (lambda o, y, n: MeanLoss(F.mse_loss(o, y), n), lambda o, y, n: (F.mse_loss(o, y) * n, n)),
    "a mean over a tensor": (
        lambda o, y, n: MeanLoss(F.mse_loss(o, y), torch.tensor(n)),
        lambda o, y, n: (F.mse_loss(o, y) * n, n),
    ),
    "a sum": (lambda o, y, n: SumLoss(o.sum(), n), lambda o, y, n: (o.sum(), n)),
    "a sum over rows": (lambda o, y, n: SumLoss(o.sum()), lambda o, y, n: (o.sum(), len(y))),
}


@pytest.mark.parametrize("k", [1, 3])
def test_metrics_and_numbers_of_an_update_are_exact_means(k):
    check_numbers(k)


@pytest.mark.parametrize("form", COUNTS)
def test_a_minimized_loss_is_reported_by_its_own_count(form):
    check_counts(*COUNTS[form])


@pytest.mark.parametrize("trainer", [EachBatch, ByHand])
def test_a_step_that_an_update_calls_gives_the_plain_mean_of_its_batch(trainer, k=3):
    """The default step called in an update gives the plain mean of its batch, whatever window that lies in."""
    theirs, ours = twins()
    data = numbers()
    for start in range(0, len(data), k):
        window = data[start : start + k]
        for group in [window] if trainer is ByHand else [[batch] for batch in window]:
            theirs[1].zero_grad()
            for x, y in group:
                (F.mse_loss(theirs[0](x), y) / len(group)).backward()
            theirs[1].step()
    _, result, _ = run(trainer, ours, data, accumulate=k, loss=nn.MSELoss())
    assert result.updates == len(range(0, len(data), k))
    assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))


def test_a_metric_is_weighed_by_the_rows_of_what_was_minimized(k=3):
    """A metric that gives a mean is weighed by the rows of the batch that was minimized, not by the window's."""

    def hits(output, target):
        return (output.argmax(1) == target).double().mean()

    theirs, ours = twins()
    right = rows = 0
    for x, y in classes():
        output = theirs[0](x)
        theirs[1].zero_grad()
        F.cross_entropy(output, y).backward()
        theirs[1].step()
        right, rows = right + int((output.argmax(1) == y).sum()), rows + len(y)
    _, result, _ = run(EachBatch, ours, classes(), accumulate=k, loss=nn.CrossEntropyLoss(), metrics={"hits": hits})
    assert result.history[0]["hits"] == pytest.approx(right / rows, rel=1e-14)


def test_metrics_that_no_update_feeds_are_refused():
    """Metrics that no update ever feeds are refused by name, where no validation feeds them."""
    _, ours = twins()
    with pytest.raises(
        SettingError, match=r"metric 'accuracy' is never fed(.|\n)*minimize\(StepOutput\(loss, output, target\)\)"
    ):
        run(Unfed, ours, classes(), metrics={"accuracy": accuracy})


def test_a_number_logged_before_each_of_several_steps_is_reported_as_their_mean():
    """A number logged before each of several steps of one update is reported as the mean of all, not as the last."""

    class Own(GAN):
        def update(self, window):
            for step in range(3):
                self.log("step", float(step))
                super().update(window)

    _, ours = pairs()
    _, result, updates = run(Own, ours, points())
    assert [update.values["step"] for update in updates] == [1.0] * 7
    assert result.history[0]["step"] == 1.0


@pytest.mark.parametrize("precision", [None, Scaled()], ids=["plain", "scaled"])
def test_after_update_sees_the_gradients_that_moved_the_weights(precision):
    check_after_update(precision)


def test_norms_are_reported_of_each_optimizer_where_an_observer_wants_them():
    """An observer that wants norms gets that of each named optimizer, where nothing is clipped."""
    theirs, ours = pairs()
    torch.manual_seed(3)
    reported = gan_by_hand(*theirs, points(), clip=1e9)
    torch.manual_seed(3)
    seen = []

    class Norms(Wants):
        def on_update(self, update):
            seen.append(update.values.get("grad_norm_D"))
            assert update.grad_norm == update.values.get("grad_norm_G")

    GAN(*ours, console=False, observers=[Norms()]).fit(points(), epochs=1)
    assert seen == [one["norm"] for one in reported]
