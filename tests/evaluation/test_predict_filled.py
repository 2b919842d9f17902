"""Predictions of known rows: one tensor, made once and filled; as they came, where they do not fit into one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import StepOutput, Trainer, batches
from trainwright.evaluation import predictions
from trainwright.evaluation.predictions import PreallocatedOutputs, join

x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(predictions, "PIECE", 64)


def predicted(step=None):
    class Own(Trainer):
        def predict_step(self, batch):
            output = super().predict_step(batch)
            return output if step is None else step(output)

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    outputs = Own(model, console=False).predict(batches(x, 8))
    return outputs, torch.cat([model(one) for one in x.split(8)]).detach()


def test_outputs_are_put_into_one_tensor_of_all_rows(monkeypatch) -> None:
    made, given = [], predictions.torch.empty

    def noted(*args, **named):
        made.append(given(*args, **named))
        return made[-1]

    monkeypatch.setattr(predictions.torch, "empty", noted)
    outputs, wanted = predicted()
    assert torch.equal(outputs, wanted)
    assert [one.data_ptr() for one in made if one.shape == (50, 3)] == [outputs.data_ptr()]
    assert not outputs.requires_grad


@pytest.mark.parametrize("size", [1, 63, 64, 200, 10_000])
def test_a_piece_of_any_size_gives_the_same(size, monkeypatch) -> None:
    monkeypatch.setattr(predictions, "PIECE", size)
    outputs, wanted = predicted()
    assert torch.equal(outputs, wanted)


def test_fewer_rows_than_announced_hold_no_more_memory() -> None:
    outputs, wanted = predicted(lambda output: output[: len(output) // 2])
    assert torch.equal(outputs, torch.cat([one[: len(one) // 2] for one in wanted.split(8)]))
    assert outputs.untyped_storage().nbytes() == outputs.nbytes


def test_more_rows_than_announced_are_all_there() -> None:
    outputs, wanted = predicted(lambda output: torch.cat([output, output]))
    assert torch.equal(outputs, torch.cat([torch.cat([one, one]) for one in wanted.split(8)]))


def test_outputs_of_a_step_with_its_loss_are_its_outputs() -> None:
    outputs, wanted = predicted(lambda output: StepOutput(None, output))
    assert torch.equal(outputs, wanted)


@pytest.mark.parametrize("place", [0, 1, 5, 6])
@pytest.mark.parametrize(
    "other",
    [
        lambda one: one[:, :2],
        lambda one: one.double(),
        lambda one: one.requires_grad_(),
        lambda one: one.sum(),
    ],
    ids=["shape", "dtype", "gradient", "scalar"],
)
def test_one_output_of_another_form_leaves_all_as_they_came(other, place) -> None:
    pieces = [one.clone() for one in x.split(8)]
    pieces[place] = other(pieces[place])
    outputs = PreallocatedOutputs(50)
    with torch.no_grad():
        for one in pieces:
            outputs.append(one)
        assert outputs.as_tensor() is None
    assert all(torch.equal(one, two) for one, two in zip(outputs.in_order(), pieces, strict=True))
    assert outputs.in_order()[place].requires_grad == pieces[place].requires_grad


def test_nested_outputs_are_joined_by_their_columns() -> None:
    outputs, wanted = predicted(lambda output: {"scores": output, "guess": output.argmax(1)})
    assert torch.equal(outputs["scores"], wanted) and torch.equal(outputs["guess"], wanted.argmax(1))


def test_little_is_laid_together_at_the_end() -> None:
    outputs = PreallocatedOutputs(6)
    outputs.append(x[:2])
    assert outputs.as_tensor() is None
    assert torch.equal(join(outputs.in_order()), x[:2])
