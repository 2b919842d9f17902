"""`trainwright.testing`: each check passes good objects, and refuses an object for each rule with what to write."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from trainwright import (
    ClipNorm,
    ClipValue,
    Cosine,
    Journal,
    Observer,
    OneCycle,
    Plateau,
    StepLR,
    TensorBoardLogger,
    TorchSchedule,
    Updates,
    accuracy,
    over_all,
    top_k,
)
from trainwright.metrics import F1
from trainwright.observers import Profile, Statistics, Throughput
from trainwright.schedules import BoundSchedule, Exponential, MultiStep
from trainwright.testing import (
    ProtocolError,
    check_clip,
    check_metric,
    check_observer,
    check_schedule,
    check_stateful,
)


def refused(check, *given) -> str:
    """Return the text of the error, with its lines of what is wanted and of the user's line."""
    with pytest.raises(ProtocolError) as caught:
        check(*given)
    text = str(caught.value)
    assert "\n  want  " in text and f"\n  where {__file__.rpartition('/')[2]}:" in text
    assert isinstance(caught.value, AssertionError)
    return text


# Clip


class ScaledTo:
    """A clip to a norm, with one mistake at most."""

    def __init__(self, mistake=""):
        self.mistake = mistake

    def __call__(self, parameters):
        wrong = self.mistake
        gradients = [one.grad for one in parameters if wrong == "none" or one.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients]))
        factor = (1.0 / norm).clamp(max=1.0)
        if wrong == "reads" and norm.item() < 1.0:
            return norm
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if wrong == "replaces":
                parameter.grad = parameter.grad * factor
            elif wrong == "hides":
                parameter.grad.mul_(factor).nan_to_num_()
            else:
                parameter.grad.mul_(1 / norm if wrong == "raises" else factor)
            if wrong == "weights":
                parameter.data.mul_(0.5)
        if wrong == "shape":
            return norm[None]
        return norm * factor if wrong == "after" else norm


@pytest.mark.parametrize("clip", [ScaledTo(), ClipNorm(1.0), ClipNorm(1.0, norm_type=1.0), ClipValue(0.1)])
def test_clips_that_hold_to_the_protocol_pass(clip):
    check_clip(clip)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("none", "fails on a parameter without a gradient"),
        ("reads", "reads a value of a tensor"),
        ("replaces", "sets another tensor as .grad"),
        ("weights", "changes a parameter"),
        ("raises", "raises the norm of the gradients"),
        ("shape", "returns a tensor of shape (1,)"),
        ("after", "returns another number than the norm before clipping"),
        ("hides", "hides a NaN"),
    ],
)
def test_a_clip_is_refused_for_each_rule_that_it_breaks(mistake, text):
    assert text in refused(check_clip, ScaledTo(mistake))


def test_a_class_or_a_number_is_no_clip():
    assert "ScaledTo is no clip" in refused(check_clip, ScaledTo)
    assert "float is no clip" in refused(check_clip, 1.0)


# Schedule


@dataclass
class Halved:
    """The rate is halved after each validation that is worse than the one before, with one mistake at most."""

    mistake: str = ""
    bound: int = 0

    def bind(self, optimizer, plan):
        self.bound += self.mistake == "settings"
        return object() if self.mistake == "returns" else HalvedRates(optimizer, self.mistake, self.bound)


class HalvedRates(BoundSchedule):
    monitor = "val_loss"

    def __init__(self, optimizer, mistake, bound):
        self.optimizer, self.mistake = optimizer, mistake
        self.groups = optimizer.param_groups
        self.own = [group["lr"] for group in optimizer.param_groups]
        self.last, self.factor, self.calls = float("inf"), 1.0 / max(1, bound), 0

    def apply(self, updates):
        self.calls += 1
        groups = self.groups if self.mistake == "groups" else self.optimizer.param_groups
        for group, own in zip(groups, self.own, strict=True):
            group["lr"] = own * self.factor
            group["lr"] /= self.calls if self.mistake == "counts" else 1
            group["lr"] -= updates if self.mistake == "negative" else 0

    def observe(self, metrics):
        self.factor *= 0.5 if metrics[self.monitor] > self.last else 1.0
        self.last = metrics[self.monitor]

    def restore_groups(self):
        for group, own in zip(self.optimizer.param_groups, self.own, strict=True):
            group["lr"] = group["lr"] if self.mistake == "restores" else own

    def state_dict(self):
        if self.mistake == "stored":
            return {"optimizer": self.optimizer}
        return {} if self.mistake == "stateless" else {"last": self.last, "factor": self.factor, "own": self.own}

    def load_state_dict(self, tree):
        vars(self).update(tree)


@pytest.mark.parametrize(
    "schedule",
    [
        *(Halved(), OneCycle(max_lr=0.1), StepLR(Updates(5)), Cosine(), Exponential(0.9)),
        Plateau("val_loss", patience=0),
        MultiStep((Updates(3), Updates(9)), gamma=0.5),
        TorchSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)),
    ],
)
def test_schedules_that_hold_to_the_protocol_pass(schedule):
    check_schedule(schedule)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("returns", "Halved.bind(optimizer, plan) returns object"),
        ("settings", "Halved gives other rates when it is bound again"),
        ("counts", "called twice sets two rates"),
        ("negative", "sets the rate -0.9"),
        ("restores", "restore_groups of HalvedRates does not restore the rate"),
        ("stored", "the state of HalvedRates cannot be stored"),
        ("stateless", "Halved gives other rates when the run is resumed at update"),
        ("groups", "Halved gives other rates when the run is resumed at update"),
    ],
)
def test_a_schedule_is_refused_for_each_rule_that_it_breaks(mistake, text):
    assert text in refused(check_schedule, Halved(mistake))


def test_a_function_is_no_schedule_object():
    assert "is no schedule" in refused(check_schedule, lambda update, total: 1.0)


# Metric


class Worst:
    """The largest absolute error of all rows, with one mistake at most."""

    def __init__(self, mistake=""):
        self.mistake, self.worst = mistake, 0.0
        self.kept = (lambda: 0) if mistake == "stored" else None

    def update(self, output, target):
        if self.mistake == "inputs":
            output -= target
        worst = float((output - target).abs().max())
        self.worst = worst if self.mistake == "last batch" else max(self.worst, worst)

    def compute(self):
        worst, self.worst = self.worst, 0.0 if self.mistake == "compute" else self.worst
        return "large" if self.mistake == "text" else worst

    def reset(self):
        self.worst = self.worst if self.mistake == "reset" else 0.0

    def merge(self, other):
        self.worst = self.worst if self.mistake == "merge" else max(self.worst, other.worst)


class Saved(Worst):
    def state_dict(self):
        return {} if self.mistake == "state" else {"worst": self.worst}

    def load_state_dict(self, tree):
        self.worst = tree["largest"] if self.mistake == "load" else tree.get("worst", 0.0)


class SharedMean:
    """The mean error, in a list of the class that all copies share."""

    sums = [0.0, 0]  # noqa: RUF012

    def update(self, output, target):
        self.sums[:] = self.sums[0] + float((output - target).sum()), self.sums[1] + len(target)

    def compute(self):
        return self.sums[0] / self.sums[1]

    def reset(self):
        self.sums[:] = 0.0, 0

    def state_dict(self):
        return list(self.sums)

    def load_state_dict(self, tree):
        self.sums[:] = tree


def rows():
    """Errors that fall: the first row's is the largest."""
    return torch.arange(11.0, 1.0, -1.0), torch.ones(10)


@pytest.mark.parametrize("metric", [Worst(), Saved(), over_all(lambda output, target: float((output - target).max()))])
def test_metrics_that_hold_to_the_protocol_pass(metric):
    check_metric(metric, *rows())


@pytest.mark.parametrize("metric", [accuracy, top_k(2), F1()])
def test_metrics_of_classes_pass(metric):
    torch.manual_seed(0)
    check_metric(metric, torch.randn(12, 3), torch.randint(0, 3, (12,)))


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Worst("text"), "Worst gives no number"),
        (Worst("inputs"), "changes the output or the target"),
        (Worst("last batch"), "gives another number for batches of 1 and 9 rows\n  have  9 instead of 10"),
        (Worst("compute"), "gives another number where compute ran between batches"),
        (Worst("reset"), "gives another number after reset"),
        (Worst("merge"), "gives another number merged from two ranks"),
        (Worst("stored"), "the state of Worst cannot be stored"),
        (Saved("state"), "gives another number where it was saved between batches"),
        (Saved("load"), "Saved cannot continue from a saved state"),
        (SharedMean(), "gives another number where a copy of it was updated"),
        (lambda output, target: (output - target).abs().max(), "for batches of 1 and 9 rows"),
    ],
)
def test_a_metric_is_refused_for_each_rule_that_it_breaks(metric, text):
    assert text in refused(check_metric, metric, *rows())


def test_what_is_no_metric_is_refused():
    class Half:
        def update(self, output, target): ...

        def compute(self): ...

    assert "Half has no method reset" in refused(check_metric, Half(), *rows())
    assert "Worst is no metric" in refused(check_metric, Worst, *rows())
    assert "a target of 3 rows" in refused(check_metric, accuracy, torch.randn(3, 2), torch.zeros(3))


# Stateful


class Baseline:
    """A running mean of draws, with one mistake at most."""

    def __init__(self, mistake=""):
        self.mistake, self.mean, self.updates = mistake, torch.zeros(2), 0

    def change(self):
        self.updates += 1
        self.mean += (torch.rand(2) - self.mean) / self.updates

    def state_dict(self):
        self.updates += self.mistake == "reads"
        states = {"stored": {"mean": self}, "constant": {"mean": 1}, "some": {"mean": self.mean}}
        return states.get(self.mistake, {"mean": self.mean, "updates": self.updates})

    def load_state_dict(self, tree):
        if self.mistake == "fails":
            raise KeyError("updates")
        self.mean = tree["mean"].clone()
        self.updates = tree.get("updates", self.updates) if self.mistake != "forgets" else self.updates


def test_objects_with_a_state_that_hold_to_the_protocol_pass():
    baseline = Baseline()
    check_stateful(baseline, baseline.change)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def update():
        optimizer.zero_grad()
        model(torch.ones(2)).backward()
        optimizer.step()

    check_stateful(optimizer, update)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("stored", "the state of Baseline cannot be stored"),
        ("reads", "state_dict() of Baseline changes the state at updates"),
        ("constant", "state_dict() of Baseline is the same after the change"),
        ("fails", "load_state_dict of Baseline fails on what state_dict() returned"),
        ("forgets", "load_state_dict of Baseline does not restore the state at updates"),
        ("some", "the same change leads Baseline to another state after a load, at mean"),
    ],
)
def test_an_object_with_a_state_is_refused_for_each_rule_that_it_breaks(mistake, text):
    baseline = Baseline(mistake)
    assert text in refused(check_stateful, baseline, baseline.change)


def test_an_object_without_a_state_is_refused():
    assert "object has no method state_dict" in refused(check_stateful, object(), lambda: None)


# Observer


class Sampling(Observer):
    """Draws at every update, from its own generator or from the one of the process."""

    def __init__(self, draws):
        self.draws = draws

    def on_update(self, update):
        self.draws()


OBSERVERS = {
    "Observer": lambda directory: Observer(),
    "Sampling": lambda directory: Sampling(random.Random(0).random),
    "Journal": lambda directory: Journal(directory / "run.jsonl"),
    "Profile": lambda directory: Profile(directory, after=2, updates=4, memory=True, shapes=True, stacks=True, rows=0),
    "Statistics": lambda directory: Statistics(every=Updates(1)),
    "TensorBoardLogger": lambda directory: TensorBoardLogger(directory, every=Updates(1)),
    "Throughput": lambda directory: Throughput(every=Updates(1), peak=1e9),
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_observers_that_hold_to_the_protocol_pass(name, tmp_path):
    check_observer(OBSERVERS[name](tmp_path))


@pytest.mark.parametrize("draws", [random.random, lambda: torch.rand(1)])
def test_an_observer_that_draws_from_the_random_state_of_the_process_is_refused(draws):
    assert "a run with Sampling ends with another random state" in refused(check_observer, Sampling(draws))


def test_an_observer_that_changes_the_model_is_refused():
    class Changing(Observer):
        def on_update(self, update):  # it finds the model, as one that was given it at its construction would have it
            found = [one for one in gc.get_objects() if type(one) is nn.Sequential]  # those of other tests too
            with torch.no_grad():
                [one[0].weight.mul_(0.5) for one in found if len(one) and type(one[0]) is nn.Linear]

    assert "a run with Changing ends with another weights['0.weight']" in refused(check_observer, Changing())


def test_what_is_no_observer_is_refused():
    assert "object is no observer" in refused(check_observer, object())
    assert "Observer is no observer" in refused(check_observer, Observer)
