"""Mistakes that train without an error: one warning each at the first batch, and none for what is right."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics
from sklearn.metrics import f1_score
from torch import nn
from torch.overrides import _get_current_function_mode

from trainwright import MeanLoss, NonFiniteError, OneCycle, StepOutput, SumLoss, Trainer, accuracy, over_all
from trainwright.schedules import BoundSchedule, Cosine, Cyclic
from trainwright.tools.sklearn_wrapper import SklearnClassifier

G = torch.Generator().manual_seed(0)
X = torch.randn(16, 4, generator=G)
Y = torch.randint(0, 3, (16,), generator=G)
YES = torch.randint(0, 2, (16, 1), generator=G).float()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def warned(model, loss, target=Y, cls=Trainer, *, epochs=2, batch_size=8, x=X, **settings):
    """The first lines of what a fit warns of."""
    trainer = cls(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, console=False, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit((x, target), (x, target), epochs=epochs, batch_size=batch_size)
    assert _get_current_function_mode() is None
    return [str(one.message) for one in caught]


def net(*end, outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, outputs), *end)


class OwnStep(Trainer):
    def training_step(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])


class OwnUpdate(Trainer):
    def update(self, window):
        (batch,) = window
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.minimize(loss)
        return loss


class Divided(nn.Module):
    """Probabilities that no softmax has made."""

    def forward(self, x):
        return x.exp() / x.exp().sum(1, keepdim=True)


class ByPosition(nn.Module):
    """Scores (N, C, d) as probabilities."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 12)

    def forward(self, x):
        return self.linear(x).reshape(-1, 4, 3).softmax(2).transpose(1, 2)


# The mistakes.

TWICE = "the outputs are probabilities, and cross entropy expects logits"


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1)]
)
@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 2}, {"precision": "bf16"}, {"metrics": {"accuracy": accuracy}}]
)
def test_probabilities_under_cross_entropy_are_reported_once_with_the_cure(loss, settings):
    (text,) = warned(net(nn.Softmax(1)), loss, **settings)
    assert (
        text.startswith(TWICE) and "fix   leave the softmax out of the model" in text and "test_in_silence.py" in text
    )


@pytest.mark.parametrize("cls", [OwnStep, OwnUpdate])
def test_steps_and_updates_of_ones_own_are_looked_at_too(cls):
    (text,) = warned(net(nn.Softmax(1)), nn.CrossEntropyLoss(), cls=cls)
    assert text.startswith(TWICE)


@pytest.mark.parametrize("model", [net(Divided()), ByPosition(), net(nn.Softmax(1), nn.Unflatten(1, (3,)))])
def test_probabilities_are_reported_however_they_were_made(model):
    target = Y if isinstance(model, nn.Sequential) else torch.randint(0, 3, (16, 4), generator=G)
    (text,) = warned(model, nn.CrossEntropyLoss(), target)
    assert text.startswith(TWICE)


def test_a_softmax_is_reported_for_batches_of_one_row():
    (text,) = warned(net(nn.Softmax(1)), nn.CrossEntropyLoss(), batch_size=1, epochs=1)
    assert text.startswith(TWICE)


@pytest.mark.parametrize("end", [(), (nn.Softmax(1),)], ids=["scores", "probabilities"])
@pytest.mark.parametrize("loss", [nn.NLLLoss(), F.nll_loss])
def test_nll_on_what_are_no_log_probabilities_is_reported(end, loss):
    (text,) = warned(net(*end), loss)
    assert text.startswith("NLLLoss expects log-probabilities, but some outputs") and "nn.CrossEntropyLoss()" in text


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits])
def test_probabilities_under_bce_with_logits_are_reported(loss):
    (text,) = warned(net(nn.Sigmoid(), outputs=1), loss, YES)
    assert (
        text.startswith("the outputs are probabilities, and BCEWithLogitsLoss expects logits")
        and "nn.BCELoss()" in text
    )


def hits(output, target):
    return (output.argmax(1) == target).sum()


COUNTS = {
    "a tensor": hits,
    "a number": lambda output, target: hits(output, target).item(),
    "a float": lambda output, target: hits(output, target).float(),
    "rows": lambda output, target: len(target),
}


@pytest.mark.parametrize("metric", COUNTS.values(), ids=COUNTS)
def test_a_metric_that_counts_is_reported_once_by_its_name(metric):
    (text,) = warned(net(), nn.CrossEntropyLoss(), metrics={"right": metric}, batch_size=16)
    assert (
        text.startswith("metric 'right' returned ")
        and "a count or a sum, not a mean" in text
        and "SumLoss(total" in text
    )


def f1(output, target):
    return f1_score(target, output.argmax(1), average="macro")


def by_name(output, target):
    return metrics.f1_score(target, output.argmax(1), average="weighted")


def imported_inside():
    from sklearn.metrics import recall_score

    return lambda output, target: recall_score(target, output.argmax(1), average="micro")


@pytest.mark.parametrize(
    "metric", [f1, by_name, partial(f1), imported_inside(), lambda o, t: f1_score(t, o.argmax(1), average="micro")]
)
def test_a_score_that_is_no_mean_over_rows_is_reported_with_over_all(metric):
    (text,) = warned(net(), nn.CrossEntropyLoss(), metrics={"score": metric})
    assert text.startswith("metric 'score' is no mean over rows: it calls ") and "test_in_silence.py" in text
    assert "fix   metrics={'score': over_all(...)}" in text
    assert warned(net(), nn.CrossEntropyLoss(), metrics={"score": over_all(metric)}) == []


def test_a_metric_that_only_validation_feeds_is_reported_too():
    class Validates(Trainer):
        def training_step(self, batch):
            return self.loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch):
            output = self.model(batch[0])
            return StepOutput(self.loss(output, batch[1]), output, batch[1])

    (text,) = warned(net(), nn.CrossEntropyLoss(), cls=Validates, metrics={"right": hits})
    assert text.startswith("metric 'right'")


def test_the_classifier_of_scikit_learn_tells_them_too():
    def build(features, outputs):
        return nn.Sequential(nn.Linear(features, outputs), nn.Softmax(1))

    with pytest.warns(UserWarning, match=TWICE) as caught:
        SklearnClassifier(build, epochs=2, random_state=0).fit(X.numpy(), Y.numpy())
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=TWICE):
        SklearnClassifier(build, epochs=1, random_state=0).fit(X.numpy(), Y.numpy(), sample_weight=[1.0, 2.0] * 8)


# What is right.


class Uniform(nn.Module):
    """Scores that are alike, and happen to sum to 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x):
        return (x @ self.weight).exp() / 3


class OneRow(nn.Module):
    """Scores of a row that happen to sum to 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.25, 0.25, 0.5]))

    def forward(self, x):
        return (self.weight * 1.0).expand(len(x), 3)


class Chance(nn.Linear):
    """A linear layer whose outputs happen to be 0.5 and 0.5, or between 0 and 1."""

    def __init__(self, outputs):
        super().__init__(4, outputs)
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, 1 / max(outputs, 2))


def squared(output, target):
    return float(round(((output - target) ** 2).sum().item()))


RIGHT = {
    "scores": (net, nn.CrossEntropyLoss(), Y, {}),
    "scores of a half": (lambda: Chance(2), nn.CrossEntropyLoss(), Y % 2, {}),
    "uniform": (Uniform, nn.CrossEntropyLoss(), Y, {}),
    "alike": (OneRow, nn.CrossEntropyLoss(), Y, {}),
    "one row": (OneRow, nn.CrossEntropyLoss(), Y, {"batch_size": 1}),
    "log-probabilities": (lambda: net(nn.LogSoftmax(1)), nn.NLLLoss(), Y, {}),
    "logarithms of probabilities": (lambda: net(nn.Softmax(1), Log()), nn.NLLLoss(), Y, {}),
    "soft targets": (net, nn.CrossEntropyLoss(), torch.randn(16, 3, generator=G).softmax(1), {}),
    "a logit": (lambda: net(outputs=1), nn.BCEWithLogitsLoss(), YES, {}),
    "logits that lie between 0 and 1": (lambda: Chance(1), nn.BCEWithLogitsLoss(), YES, {}),
    "rectified logits": (lambda: net(nn.Hardtanh(0, 1), outputs=1), nn.BCEWithLogitsLoss(), YES, {}),
    "BCE": (lambda: net(nn.Sigmoid(), outputs=1), nn.BCELoss(), YES, {}),
    "regression": (lambda: net(outputs=1), nn.MSELoss(), X.sum(1, keepdim=True), {}),
    "regression on shares": (lambda: net(nn.Softmax(1)), nn.MSELoss(), torch.full((16, 3), 1 / 3), {}),
    "distillation": (
        lambda: net(nn.LogSoftmax(1)),
        nn.KLDivLoss(reduction="batchmean"),
        torch.full((16, 3), 1 / 3),
        {},
    ),
}


class Log(nn.Module):
    def forward(self, x):
        return x.log()


@pytest.mark.parametrize(("build", "loss", "target", "settings"), RIGHT.values(), ids=RIGHT)
def test_a_loss_that_is_given_what_it_takes_gets_no_warning(build, loss, target, settings):
    assert warned(build(), loss, target, epochs=1, **settings) == []


MEANS = {
    "accuracy": accuracy,
    "a mean of hits": lambda output, target: (output.argmax(1) == target).float().mean(),
    "an accuracy of exactly 1.0": lambda output, target: 1.0,
    "a perplexity of exactly 4": lambda output, target: 4.0,
    "a maximum": lambda output, target: float((target + 1).max()),
    "a maximum of one row": lambda output, target: float((torch.arange(len(target)) == 0).max() * 3),
    "a median": lambda output, target: (target + 2).median(),
    "an absolute error of exactly 2": lambda output, target: (target - (target + 2)).abs().float().mean(),
    "a number of classes": lambda output, target: output.shape[1],
    "one value per row": lambda output, target: target.float() + 2,
    "SumLoss": lambda output, target: SumLoss((output.argmax(1) == target).sum(), len(target)),
    "MeanLoss": lambda output, target: MeanLoss(torch.tensor(4.0), len(target)),
    "only of whole batches": lambda output, target: {8: 5.0}[len(target)],
}


@pytest.mark.parametrize("metric", MEANS.values(), ids=MEANS)
def test_a_metric_that_is_a_mean_gets_no_warning_although_it_may_be_whole_and_above_1(metric):
    assert warned(net(), nn.CrossEntropyLoss(), metrics={"number": metric}) == []


def test_a_count_of_one_row_tells_nothing():
    assert warned(net(), nn.CrossEntropyLoss(), metrics={"right": hits}, batch_size=1, epochs=1) == []


# What it costs.


def test_nothing_is_looked_at_after_the_first_update():
    seen = []

    class Sees(Trainer):
        def training_step(self, batch):
            seen.append(_get_current_function_mode())
            return super().training_step(batch)

    calls = []
    metrics = {"right": lambda output, target: calls.append(len(target)) or hits(output, target).float().mean()}
    trainer = Sees(
        model := net(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        metrics=metrics,
        console=False,
    )
    trainer.fit((X, Y), epochs=2, batch_size=4)
    trainer.fit((X, Y), epochs=1, batch_size=4)
    assert [one is not None for one in seen] == [True] + [False] * 11
    assert calls == [4] * 12


def test_an_error_in_the_first_update_leaves_nothing_switched_on():
    model = net()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    with pytest.raises(NonFiniteError):
        trainer.fit((X / 0, Y), epochs=1, batch_size=4)
    assert _get_current_function_mode() is None
    with pytest.raises(RuntimeError):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False).fit(
            (X[:, :2], Y), epochs=1, batch_size=4
        )
    assert _get_current_function_mode() is None


def test_draws_of_a_metric_that_is_asked_again_are_put_back():
    def noisy(output, target):
        torch.rand(())
        return float(len(target))

    with pytest.warns(UserWarning, match="a count or a sum"):
        model = net()
        torch.manual_seed(3)
        Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            metrics={"n": noisy},
            console=False,
        ).fit([(X, Y)], epochs=2)
    drawn = torch.rand(())
    torch.manual_seed(3)
    assert [torch.rand(()) for _ in range(3)][2] == drawn


class OwnPeak:
    """A schedule of the user's own."""

    max_lr = 0.5

    def bind(self, optimizer, plan):
        return BoundSchedule()


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (OneCycle(max_lr=0.5), "OneCycle(max_lr=0.5) replaces the rates of all groups, 0.01, 0.1: max_lr=[0.01, 0.1]"),
        (Cyclic(0.1, 1), "Cyclic(max_lr=1) replaces the rates of all groups, 0.01, 0.1: max_lr=[0.01, 0.1]"),
        (OneCycle(max_lr=[0.05, 0.5]), ""),
        (Cosine(), ""),
        (OwnPeak(), ""),  # what its max_lr means, only its author knows
    ],
)
def test_one_rate_for_groups_of_different_rates_is_warned_of_where_the_trainer_is_made(schedule, text):
    model = net(nn.ReLU(), nn.Linear(3, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, optimizer, nn.CrossEntropyLoss(), schedule=schedule, console=False)
    assert [Path(one.filename) for one in caught] == ([Path(__file__)] if text else [])
    assert all(str(one.message).startswith(text) for one in caught)
    alike = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(model, alike, nn.CrossEntropyLoss(), schedule=OneCycle(max_lr=0.5), console=False)
