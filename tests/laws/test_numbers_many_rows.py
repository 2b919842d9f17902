"""The Numbers law over many rows: counts go on where float32 stops counting, and where memory is used again."""

from __future__ import annotations

import pytest
import torch

from trainwright import MeanLoss, StepOutput, SumLoss, Trainer, accuracy

from .numbers_runs import trainer


class Constant(Trainer):
    """The loss of a batch is its first number, over as many rows as it has; no row is touched."""

    count_as = staticmethod(int)

    def training_step(self, batch):
        loss = batch[0][0] + 0 * self.model.weight.sum()
        return StepOutput(MeanLoss(loss, self.count_as(len(batch[0]))), batch[0], batch[0])


def check_more_rows_than_a_float32_counts(count_as=int):
    many = [(torch.zeros(1).expand(2**24),), (torch.ones(1),), (torch.ones(1),), (torch.ones(1),)]
    expected = 3 / (2**24 + 3)

    class Counted(Constant):
        pass

    Counted.count_as = staticmethod(count_as)
    metrics = {
        "mean": lambda output, target: output[0],
        "counted": lambda output, target: MeanLoss(output[0], count_as(len(output))),
        "summed": lambda output, target: SumLoss(output[0] * len(output), len(output)),
    }
    made = trainer(cls=Counted, metrics=metrics, lr=0.0)
    row = made.fit(many, many, epochs=1).history[0]
    names = ("loss", "val_loss", "val_mean", "val_counted", "val_summed", "mean", "counted", "summed")
    assert {name: row[name] for name in names} == dict.fromkeys(names, expected)


@pytest.mark.parametrize("count_as", [int, torch.tensor], ids=["host", "tensor"])
def test_rows_beyond_two_to_the_24_are_all_counted(count_as):
    check_more_rows_than_a_float32_counts(count_as)


def test_a_metric_of_one_value_per_row_counts_beyond_two_to_the_24():
    class One(Trainer):
        def validation_step(self, batch):
            return StepOutput(None, batch[0], batch[0])

    hits = [(torch.ones(1, dtype=torch.bool).expand(2**24),), (torch.zeros(1, dtype=torch.bool),)]
    made = trainer(cls=One, metrics={"hit": lambda output, target: output})
    assert made.evaluate(hits)["val_hit"] == 2**24 / (2**24 + 1)


class OneBuffer:
    """Gives every batch in the same memory; a third of the targets is ignored, in the first batches only."""

    def __init__(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        self.inputs, self.target = inputs, target

    def __iter__(self):
        buffers = torch.empty_like(self.inputs[:4]), torch.empty_like(self.target[:4])
        for start in range(0, len(self.target), 4):
            buffers[0].copy_(self.inputs[start : start + 4])
            buffers[1].copy_(self.target[start : start + 4])
            yield buffers


def test_batches_that_are_given_in_one_memory_are_counted_as_they_were():
    torch.manual_seed(0)
    inputs, target = torch.randn(24, 5), torch.randint(0, 3, (24,))
    target[:8] = -100
    model = torch.nn.Linear(5, 3)
    trainer = Trainer(model, None, torch.nn.CrossEntropyLoss(), console=False, metrics={"accuracy": accuracy})
    found = trainer.evaluate(OneBuffer(inputs, target))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(inputs), target).item()
        right = (model(inputs).argmax(1) == target)[8:].double().mean().item()
    assert found["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert found["val_accuracy"] == pytest.approx(right)
