"""What a batch of an evaluation and of a prediction costs in Python calls, counted, so that it holds on any machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from test_update_cost import PACKAGE, Batches, calls, model_and_optimizer, ready
from torch import nn

from trainwright import Trainer, accuracy

MOST_OF_EVALUATION, MOST_OF_PREDICTION, MOST_OF_ACCURACY, MOST_OF_PASS = 9, 5, 13, 200


def evaluated(data: Batches) -> Counter[str]:
    """Calls of an evaluation with the default settings."""
    trainer = Trainer(model_and_optimizer()[0], None, nn.CrossEntropyLoss(), console=False)
    return calls(lambda: trainer.evaluate(data))


def measured(data: Batches) -> Counter[str]:
    """Calls of an evaluation with a metric."""
    model = model_and_optimizer()[0]
    trainer = Trainer(model, None, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False)
    return calls(lambda: trainer.evaluate(data))


def predicted(data: Batches) -> Counter[str]:
    """Calls of a prediction."""
    trainer = Trainer(model_and_optimizer()[0], None, nn.CrossEntropyLoss(), console=False)
    return calls(lambda: trainer.predict(data))


def by_hand(data: Batches) -> Counter[str]:
    """Calls of the forward and the loss alone."""
    model = model_and_optimizer()[0].eval()

    def loop() -> None:
        with torch.no_grad():
            for inputs, target in data:
                nn.functional.cross_entropy(model(inputs), target, reduction="sum")

    return calls(loop)


def forward(data: Batches) -> Counter[str]:
    """Calls of the forward alone."""
    model = model_and_optimizer()[0].eval()

    def loop() -> None:
        with torch.no_grad():
            for inputs, _ in data:
                model(inputs)

    return calls(loop)


def per_batch(run: Callable[[Batches], Counter[str]]) -> Counter[str]:
    """Calls that one more batch costs; what a pass costs once cancels out."""
    run(ready(2))
    few, many = run(ready(10)), run(ready(20))
    return Counter({name: n for name in many if (n := (many[name] - few[name]) / 10)})


@pytest.mark.slow
def test_a_batch_of_an_evaluation_costs_few_calls_over_forward_and_loss() -> None:
    extra = per_batch(evaluated)
    assert extra.total() - per_batch(by_hand).total() <= MOST_OF_EVALUATION, extra.most_common()


@pytest.mark.slow
def test_a_metric_costs_few_calls() -> None:
    extra = per_batch(measured)
    assert extra.total() - per_batch(evaluated).total() <= MOST_OF_ACCURACY, extra.most_common()


@pytest.mark.slow
def test_a_batch_of_a_prediction_costs_few_calls_over_the_forward() -> None:
    extra = per_batch(predicted)
    assert extra.total() - per_batch(forward).total() <= MOST_OF_PREDICTION, extra.most_common()


def test_a_pass_without_a_trace_costs_few_calls_of_its_own() -> None:
    evaluated(ready(2))
    one = evaluated(ready(1))
    own = Counter({name: n for name, n in one.items() if name.startswith(PACKAGE)})
    assert one.total() <= MOST_OF_PASS, one.most_common()
    assert own.total() < one.total()
