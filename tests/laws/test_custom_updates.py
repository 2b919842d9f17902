"""Updates of users' own lose nothing: loss scale, refusals, hand-written steps, metrics and logged numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import Mean, Observer, Step, StepError, Sum, Trainer, accuracy

from .models import assert_equal
from .own_updates import (
    GAN,
    Scaled,
    assert_pairs,
    critic_loss,
    gan_by_hand,
    generator_loss,
    noise,
    pairs,
    points,
    run,
)
from .test_custom_updates_gan import shared, shared_by_hand
from .window_cases import UNEVEN, Smooth, draw, twins

HUGE = 2.0**126
"""A loss scale under which a gradient of the critic overflows float32 where one of the generator does not."""


def numbers():
    """Uneven batches of inputs and targets that are numbers."""
    return draw(UNEVEN, "numbers")


def check_scale():
    """The scale adapts once per update to all of its steps; one that overflows is held back alone: as in torch."""
    theirs, ours = pairs(dtype=torch.float32)
    data = [30 * batch for batch in points(dtype=torch.float32)]
    precision = Scaled(HUGE)
    scaler = torch.amp.GradScaler("cpu", init_scale=HUGE, growth_interval=4)
    torch.manual_seed(3)
    scales, held = [], []
    for real in data * 4:
        before = [optimizer.state_dict()["state"].get(0, {}).get("step", 0) for optimizer in theirs[1].values()]
        before = [int(step) for step in before]
        gan_by_hand(*theirs, [real], scaler=scaler)
        after = [int(one.state_dict()["state"].get(0, {}).get("step", 0)) for one in theirs[1].values()]
        held.append([then == now for then, now in zip(before, after, strict=True)])
        scales.append(scaler.get_scale())
    torch.manual_seed(3)
    seen = []

    class Own(GAN):
        def update(self, window):
            seen.append(precision.scalers[-1].value)
            super().update(window)

    _, result, updates = run(Own, ours, data, epochs=4, precision=precision)
    assert_pairs(ours, theirs)
    assert [*seen[1:], precision.scalers[-1].value] == scales
    assert [update.skipped for update in updates] == [all(one) for one in held]
    assert result.skipped == sum(all(one) for one in held) and result.updates + result.skipped == len(held)
    assert any(one[0] != one[1] for one in held)


class Written(Trainer):
    """A backward of one's own, and the library's step."""

    def update(self, window):
        (batch,) = window
        self.optimizer.zero_grad()
        loss = self.training_step(batch)
        loss.backward()
        self.apply_gradients()
        return loss


def check_written(clip=None):
    """A hand-written backward with `apply_gradients` is the plain loop, bit for bit."""
    theirs, ours = twins("adamw")
    losses = []
    for x, y in numbers() * 8:
        theirs[1].zero_grad()
        loss = F.mse_loss(theirs[0](x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs[0].parameters(), clip)
        theirs[1].step()
        losses.append(loss.item())
    _, result, updates = run(Written, ours, numbers(), epochs=8, loss=nn.MSELoss(), clip=clip)
    assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
    assert_equal(ours[1].state_dict()["state"], theirs[1].state_dict()["state"])
    assert [update.loss for update in updates] == losses and result.updates == len(losses)


def refused(trainer, pair, data, text):
    """The Trainer refuses to go on with this error, before a weight has moved."""
    before = {name: value.clone() for name, value in pair[0].state_dict().items()}
    with pytest.raises(StepError, match=text):
        run(trainer, pair, data, loss=nn.MSELoss(), precision=Scaled())
    return before


def check_written_refused():
    """Under a loss scale a hand-written backward is refused, by the line to write in its place."""
    _, ours = twins()
    before = refused(Written, ours, numbers(), r"self\.minimize\(loss\), or self\.compute_gradients\(window\)")
    assert_equal(dict(ours[0].state_dict()), before)


class HalfWritten(Trainer):
    """The critic by `minimize`, the generator by hand."""

    def update(self, window):
        real = torch.cat([*window])
        fake = self.model.G(noise(real))
        self.minimize(critic_loss(self.model, real, fake), "D")
        self.optimizers["G"].zero_grad()
        generator_loss(self.model, fake).backward()
        self.apply_gradients("G")


def check_half_written_refused():
    """It is refused beside a `minimize` that was scaled, too: the weights of its optimizer have not moved."""
    _, ours = pairs()
    before = refused(HalfWritten, ours, points(), "backward\\(\\) of your own")
    assert_equal(dict(ours[0].G.state_dict()), {k[2:]: v for k, v in before.items() if k.startswith("G.")})


class Steps(Trainer):
    """One of two optimizers steps by hand."""

    def update(self, window):
        loss = self.compute_gradients(window)
        self.apply_gradients("G")
        self.optimizers["D"].step()
        return loss


class StepsAlone(Trainer):
    """Both step by hand."""

    def update(self, window):
        loss = self.compute_gradients(window)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss


def check_steps(trainer):
    """A step by hand is the plain loop's, and it is counted, once per update."""
    theirs, ours = shared()
    losses, _ = shared_by_hand(*theirs, F.mse_loss, numbers() * 8)
    _, result, updates = run(trainer, ours, numbers(), epochs=8, loss=nn.MSELoss())
    assert_pairs(ours, theirs)
    assert [update.loss for update in updates] == losses
    assert (result.updates, result.skipped) == (len(losses), 0)


def check_step_beside_held_back():
    """An update in which a step by hand was made counts, although the other optimizer was held back."""
    _, ours = pairs()

    class Own(Trainer):
        def update(self, window):
            real = torch.cat([*window])
            fake = self.model.G(noise(real))
            self.optimizers["D"].zero_grad()
            critic_loss(self.model, real, fake).backward()
            self.optimizers["D"].step()
            self.minimize(generator_loss(self.model, fake) * torch.nan, "G")

    _, result, updates = run(Own, ours, points(), nonfinite="skip")
    assert (result.updates, result.skipped) == (7, 0) and not any(update.skipped for update in updates)


def check_unjudged_step_refused():
    """Under a loss scale a step by hand is refused: nobody has looked whether its gradient overflowed."""
    _, ours = shared()
    refused(StepsAlone, ours, numbers(), r"step\(\) of your own(.|\n)*apply_gradients")


class Measured(Trainer):
    """Two minimized losses, one with an output and a target; numbers logged around them."""

    def update(self, window):
        x = torch.cat([x for x, _ in window])
        y = torch.cat([y for _, y in window])
        output = self.model(x)
        self.log("before", float(len(y)))
        self.minimize(Step(F.cross_entropy(output, y), output, y))
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
    told = []
    for start in range(0, len(data), k):
        x, y = (torch.cat(parts) for parts in zip(*data[start : start + k], strict=True))
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits, size = float((output.argmax(1) == y).sum()), output.detach().abs().mean().item()
        told.append({"n": len(y), "loss": loss.item(), "hits": hits, "size": size, "gap": float(y.sum())})
    rows = sum(one["n"] for one in told)
    (row,) = result.history
    assert row.get("accuracy") == sum(one["hits"] for one in told) / rows
    for name in ("loss", "size", "gap"):
        assert row.get(name) == pytest.approx(sum(one[name] * one["n"] for one in told) / rows, rel=1e-14)
        assert [update.values.get(name, update.loss) for update in updates] == [one[name] for one in told]
    assert row["before"] == pytest.approx(sum(one["n"] ** 2 for one in told) / rows, rel=1e-14)


def check_counts(wrap, told_of):
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
            value, count = told_of(model(x), y, n)
            total, counted = total + value.item(), counted + count
    assert result.history[0]["loss_all"] == pytest.approx(total / counted, rel=1e-14)
    assert result.history[0]["loss"] == result.history[0]["loss_all"]


def check_log_between_steps():
    """A number logged before each of several steps of one update is told as the mean of all, not as the last."""

    class Own(GAN):
        def update(self, window):
            for step in range(3):
                self.log("step", float(step))
                super().update(window)

    _, ours = pairs()
    _, result, updates = run(Own, ours, points())
    assert [update.values["step"] for update in updates] == [1.0] * 7
    assert result.history[0]["step"] == 1.0


def check_after_update(precision=None):
    """`after_update` sees the weights after the step, and the gradients that moved them: unscaled and clipped."""
    theirs, ours = shared()
    seen, told = [], []

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
        told.append([[p.grad.clone(), p.detach().clone()] for p in theirs[0].parameters()])
    assert_equal(seen, told)
    assert [update.values["first"] for update in updates] == [one[0][1].flatten()[0].item() for one in told]


class Wants(Observer):
    wants = frozenset({"grad_norm"})


def check_wanted_norms():
    """An observer that wants norms gets that of each named optimizer, where nothing is clipped."""
    theirs, ours = pairs()
    torch.manual_seed(3)
    told = gan_by_hand(*theirs, points(), clip=1e9)
    torch.manual_seed(3)
    seen = []

    class Norms(Wants):
        def on_update(self, update):
            seen.append(update.values.get("grad_norm_D"))
            assert update.grad_norm == update.values.get("grad_norm_G")

    GAN(*ours, console=False, observers=[Norms()]).fit(points(), epochs=1)
    assert seen == [one["norm"] for one in told]


COUNTS = {
    "a tensor": (lambda o, y, n: F.mse_loss(o, y), lambda o, y, n: (F.mse_loss(o, y) * len(y), len(y))),
    "a mean": (lambda o, y, n: Mean(F.mse_loss(o, y), n), lambda o, y, n: (F.mse_loss(o, y) * n, n)),
    "a mean over a tensor": (
        lambda o, y, n: Mean(F.mse_loss(o, y), torch.tensor(n)),
        lambda o, y, n: (F.mse_loss(o, y) * n, n),
    ),
    "a sum": (lambda o, y, n: Sum(o.sum(), n), lambda o, y, n: (o.sum(), n)),
    "a sum over rows": (lambda o, y, n: Sum(o.sum()), lambda o, y, n: (o.sum(), len(y))),
}


def test_the_scale_adapts_once_per_update_and_an_overflow_holds_back_its_own_step():
    check_scale()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_hand_written_backward_is_the_plain_loop(clip):
    check_written(clip)


def test_a_hand_written_backward_is_refused_under_a_loss_scale():
    check_written_refused()


def test_a_hand_written_backward_beside_minimize_is_refused_under_a_loss_scale():
    check_half_written_refused()


@pytest.mark.parametrize("trainer", [Steps, StepsAlone])
def test_a_step_by_hand_is_the_plain_loops_and_is_counted(trainer):
    check_steps(trainer)


def test_a_step_by_hand_beside_one_that_is_held_back_is_an_update():
    check_step_beside_held_back()


def test_a_step_by_hand_is_refused_under_a_loss_scale():
    check_unjudged_step_refused()


@pytest.mark.parametrize("k", [1, 3])
def test_metrics_and_numbers_of_an_update_are_exact_means(k):
    check_numbers(k)


@pytest.mark.parametrize("form", COUNTS)
def test_a_minimized_loss_is_told_by_its_own_count(form):
    check_counts(*COUNTS[form])


def test_a_number_logged_before_each_of_several_steps_is_told_as_their_mean():
    check_log_between_steps()


@pytest.mark.parametrize("precision", [None, Scaled()], ids=["plain", "scaled"])
def test_after_update_sees_the_gradients_that_moved_the_weights(precision):
    check_after_update(precision)


def test_norms_are_told_of_each_optimizer_where_an_observer_wants_them():
    check_wanted_norms()
