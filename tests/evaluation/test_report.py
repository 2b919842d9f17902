"""Reports: scikit-learn's numbers of what the trainer predicts, for targets that count; what is unclear is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import classification_report, confusion_matrix, r2_score
from torch import nn

from trainwright import NonFiniteError, SettingError, StepOutput, Trainer
from trainwright.data.opening import open_source
from trainwright.evaluation.reports import report


class Given(nn.Module):
    """Its output is its input: what is compared is what the test wrote."""

    def forward(self, x):
        return x


def of(output, target, loss=None, *, batch_size=5, cls=Trainer, **settings):
    trainer = cls(Given(), None, loss, console=False)
    return report(trainer, open_source((output, target), batch_size=batch_size), **settings)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# --- classes


def test_a_report_of_classes_is_scikit_learns():
    output, target = normal(43, 4), whole(4, 43)
    made = of(output, target, nn.CrossEntropyLoss())
    guess = output.argmax(1)
    assert made.kind == "classes"
    assert str(made) == made.text == classification_report(target, guess, zero_division=0).rstrip("\n")
    numbers = made.to_dict()
    assert numbers.pop("confusion_matrix") == confusion_matrix(target, guess).tolist()
    assert numbers == classification_report(target, guess, output_dict=True, zero_division=0)
    assert torch.equal(made.output, output) and torch.equal(made.target, target)


def test_its_numbers_are_plain_data_and_a_copy():
    made = of(normal(43, 4), whole(4, 43), nn.CrossEntropyLoss())
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
    made.to_dict()["confusion_matrix"][0][0] = 99
    made.to_dict()["0"]["precision"] = 99
    assert made.to_dict()["confusion_matrix"][0][0] != 99 and made.to_dict()["0"]["precision"] != 99


def test_a_model_that_never_guesses_a_class_gives_no_warning():
    output = torch.zeros(9, 3).index_fill(1, torch.tensor(0), 1.0)
    assert of(output, whole(3, 9), nn.CrossEntropyLoss()).to_dict()["1"]["precision"] == 0.0


def test_names_are_shown_in_the_text_the_dict_and_the_plot():
    made = of(normal(43, 3), whole(2, 43), nn.CrossEntropyLoss(), names=["cat", "dog", "eel"])
    assert made.names == ("cat", "dog", "eel")
    assert "eel" in made.text and made.to_dict()["eel"]["support"] == 0
    assert len(made.to_dict()["confusion_matrix"]) == 3
    labels = [label.get_text() for label in made.plot().axes[0].get_yticklabels()]
    assert labels == ["cat", "dog", "eel"]


@pytest.mark.parametrize("names", ["cat", ["a", "b"], ["a", "b", "c", "d"], [1, 2, 3]])
def test_names_that_do_not_fit_are_refused(names):
    with pytest.raises(SettingError, match="names="):
        of(normal(43, 3), whole(3, 43), nn.CrossEntropyLoss(), names=names)


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(), -100),
        (nn.CrossEntropyLoss(ignore_index=0), 0),
        (partial(F.cross_entropy, ignore_index=2), 2),
    ],
)
def test_targets_that_the_loss_ignores_are_left_out(loss, ignored):
    output, target = normal(43, 4, 3), whole(4, 43, 3)
    target[::2] = ignored
    kept = target != ignored
    numbers = of(output, target, loss).to_dict()
    assert numbers["macro avg"]["support"] == int(kept.sum())
    expected = classification_report(target[kept], output.argmax(1)[kept], output_dict=True, zero_division=0)
    assert numbers["weighted avg"] == expected["weighted avg"]


@pytest.mark.parametrize("shape", [(43,), (43, 1)])
@pytest.mark.parametrize(
    ("loss", "threshold", "what"),
    [(nn.BCEWithLogitsLoss(), 0.0, "logit"), (nn.BCELoss(), 0.5, "prob"), (F.binary_cross_entropy, 0.5, "prob")],
)
def test_one_output_per_row_is_a_yes_or_no(shape, loss, threshold, what):
    output = normal(*shape) if threshold == 0 else normal(*shape).sigmoid()
    target = whole(2, *shape)
    made = of(output, target.float(), loss)
    guess = (output.flatten() > threshold).long()
    assert made.to_dict()["confusion_matrix"] == confusion_matrix(target.flatten(), guess).tolist()
    assert f"a {what}" in made.text and f"is above {threshold:g}" in made.text
    assert "lie from 0 to 1" not in made.text


def test_logits_that_look_like_probabilities_are_pointed_out():
    assert "(output > 0.5).long()" in of(normal(43).sigmoid(), whole(2, 43).float(), nn.BCEWithLogitsLoss()).text


def test_targets_that_are_shares_of_classes_are_taken_for_the_largest():
    output, target = normal(43, 4), normal(43, 4, seed=2).softmax(1)
    numbers = of(output, target, nn.CrossEntropyLoss()).to_dict()
    assert numbers["confusion_matrix"] == confusion_matrix(target.argmax(1), output.argmax(1)).tolist()


def test_whole_numbers_are_guesses_already():
    guess, target = whole(3, 43), whole(3, 43, seed=2)
    assert of(guess, target).to_dict()["confusion_matrix"] == confusion_matrix(target, guess).tolist()


def test_nan_scores_are_no_guess():
    output = normal(43, 3)
    output[7, 1] = math.nan
    with pytest.raises(NonFiniteError, match=r"1 of 129 outputs are NaN"):
        of(output, whole(3, 43), nn.CrossEntropyLoss())


# --- values


@pytest.mark.parametrize("shape", [(43,), (43, 1)])
def test_a_report_of_values_holds_r2_mae_and_rmse(shape):
    output, target = normal(*shape).double(), normal(*shape, seed=1).double()
    made = of(output, target, nn.MSELoss())
    error = output - target
    mae, rmse = float(error.abs().mean()), float(error.square().mean().sqrt())
    expected = {"R2": r2_score(target.numpy(), output.numpy()), "MAE": mae, "RMSE": rmse}
    assert made.kind == "values" and made.to_dict() == pytest.approx({**expected, "rows": 43}, rel=1e-12)
    assert f"{made.to_dict()['RMSE']:.5g}" in made.text
    drawn = made.plot().axes[0].collections[0].get_offsets()
    assert drawn.tolist() == torch.stack([target.flatten(), output.flatten()], 1).tolist()


def test_several_columns_are_scored_one_by_one_and_together():
    output, target = normal(43, 2).double(), normal(43, 2, seed=1).double()
    made = of(output, target, nn.L1Loss(), names=["height", "weight"])
    numbers = made.to_dict()
    assert list(numbers["columns"]) == ["height", "weight"]
    assert numbers["columns"]["weight"]["R2"] == pytest.approx(
        r2_score(target[:, 1].numpy(), output[:, 1].numpy()), rel=1e-12
    )
    assert numbers["R2"] == pytest.approx(r2_score(target.numpy(), output.numpy()), rel=1e-12)
    assert "height" in made.text and "all 2 columns" in made.text
    assert [axes.get_title() for axes in made.plot().axes] == ["height", "weight"]


def test_rows_of_other_lengths_are_compared_element_by_element():
    batches = [(normal(4, n), normal(4, n, seed=n)) for n in (3, 5)]
    made = report(Trainer(Given(), None, nn.MSELoss(), console=False), open_source(batches))
    error = torch.cat([(x - y).flatten() for x, y in batches]).double()
    assert made.to_dict()["MAE"] == pytest.approx(float(error.abs().mean()), rel=1e-6)
    assert made.to_dict()["rows"] == 8
    assert isinstance(made.output, list)


def test_a_nan_value_shows_in_every_number():
    output = normal(43)
    output[7] = math.nan
    made = of(output, normal(43, seed=1), nn.MSELoss())
    assert all(math.isnan(made.to_dict()[name]) for name in ("R2", "MAE", "RMSE")) and "nan" in made.text


def test_values_of_shapes_that_would_be_broadcast_are_refused():
    with pytest.raises(SettingError, match=r"y\[:, None\]"):
        of(normal(43, 1), normal(43), nn.MSELoss())


# --- which kind


@pytest.mark.parametrize(
    ("output", "target", "kind"),
    [
        (normal(43, 3), whole(3, 43), "classes"),
        (normal(43, 3, 2), whole(3, 43, 2), "classes"),
        (normal(43), whole(2, 43).bool(), "classes"),
        (normal(43), normal(43), "values"),
        (normal(43, 2), normal(43, 2), "values"),
    ],
)
def test_without_a_known_loss_dtypes_and_shapes_decide(output, target, kind):
    assert of(output, target, lambda output, target: output.sum()).kind == kind


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (normal(43), whole(2, 43)),  # logits, or counts
        (normal(43), whole(9, 43)),
        (normal(43), whole(2, 43).float()),  # logits, or values that are 0 and 1
        (normal(43, 3), normal(43, 3).softmax(1)),  # shares of classes, or values
    ],
)
def test_what_may_be_either_is_refused_naming_both_kinds(output, target):
    with pytest.raises(SettingError, match=r'kind="classes".*kind="values"'):
        of(output, target)
    assert of(output, target, kind="values").kind == "values"
    if target.max() <= 1:
        assert of(output, target, kind="classes").kind == "classes"


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(SettingError, match='"auto", "classes" or "values"'):
        of(normal(4), normal(4), kind="class")


@pytest.mark.parametrize(
    ("output", "target", "fix"),
    [
        (normal(8, 5, 3), whole(3, 8, 5), r"output.movedim\(-1, 1\)"),
        (normal(8), whole(9, 8), 'kind="values"'),
        (normal(8, 3), whole(3, 8, 2), "override predict_step"),
    ],
)
def test_classes_of_shapes_that_do_not_fit_are_refused(output, target, fix):
    with pytest.raises(SettingError, match=fix):
        of(output, target, kind="classes")


def test_several_labels_per_row_are_refused_with_what_to_write():
    with pytest.raises(SettingError, match="one label at a time"):
        of(normal(8, 3), whole(2, 8, 3).float(), nn.BCEWithLogitsLoss())


# --- the trainer


class TakesOut(Trainer):
    """A split that can be asked once per batch only, and draws."""

    def split(self, batch):
        inputs = batch.pop("x") + torch.randn(())
        return (inputs,), inputs.argmax(1)


def test_a_split_of_the_users_own_is_asked_once_per_batch():
    made = report(
        TakesOut(Given(), None, nn.CrossEntropyLoss(), console=False), open_source([{"x": normal(9, 3)} for _ in "ab"])
    )
    assert made.to_dict()["accuracy"] == 1.0


class Whole(Trainer):
    def predict_step(self, batch):
        x, y = batch
        return StepOutput(None, self.model(x) * 2, y - 1)


def test_a_step_tells_output_and_target():
    made = of(normal(9, 3), whole(3, 9) + 1, nn.CrossEntropyLoss(), cls=Whole)
    assert torch.equal(made.output, normal(9, 3) * 2) and torch.equal(made.target, whole(3, 9))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, adjacency):
        return adjacency @ self.layer(x)


class OnNodes(Trainer):
    """Trains on some rows of each batch (x, adjacency, y, nodes)."""

    def training_step(self, batch):
        x, adjacency, y, nodes = batch
        return self.loss(self.model(x, adjacency)[nodes], y[nodes])


class PredictsNodes(OnNodes):
    def predict_step(self, batch):
        x, adjacency, _, nodes = batch
        return self.model(x, adjacency)[nodes]


class TellsNodes(OnNodes):
    def predict_step(self, batch):
        x, adjacency, y, nodes = batch
        return StepOutput(None, self.model(x, adjacency)[nodes], y[nodes])


class OnNodesBySplit(PredictsNodes):
    def training_step(self, batch):
        (x, adjacency, _), nodes = self.split(batch)
        return self.loss(self.model(x, adjacency)[nodes], nodes)


NODES = [(normal(6, 4), torch.eye(6), whole(3, 6), torch.tensor([5, 1, 4]))]


@pytest.mark.parametrize(
    ("role", "fix"), [("report", "return StepOutput(None, output, target)"), ("predict", "return output")]
)
def test_a_step_that_selects_rows_is_no_ground_to_call_the_last_item_the_target(role, fix):
    trainer = OnNodes(Graph(), None, nn.CrossEntropyLoss(), console=False)
    with pytest.raises(TypeError) as failed:
        getattr(trainer, role)(NODES)
    (note,) = failed.value.__notes__
    assert "Graph.forward takes (x, adjacency)" in note
    assert f"def predict_step(self, batch): ...; {fix}" in note
    assert "split(" not in note and "batch[-1]" not in note


def test_predictions_of_selected_rows_are_not_compared_with_the_last_item_of_the_batch():
    trainer = PredictsNodes(Graph(), None, nn.CrossEntropyLoss(), console=False)
    with pytest.raises(
        SettingError, match=r"which of the 4 items(.|\n)*StepOutput\(None, output, target\) from predict_step"
    ):
        trainer.report(NODES)
    assert trainer.predict(NODES).shape == (3, 3)
    reported = TellsNodes(trainer.model, None, nn.CrossEntropyLoss(), console=False).report(NODES)
    assert torch.equal(reported.target, NODES[0][2][NODES[0][3]])


def test_a_training_step_that_splits_confirms_the_last_item_as_the_target():
    made = OnNodesBySplit(Graph(), None, nn.CrossEntropyLoss(), console=False).report(NODES)
    assert torch.equal(made.target, NODES[0][3])


class InADict(Trainer):
    def predict_step(self, batch):
        return {"scores": batch[0]}


def test_an_output_that_is_no_tensor_is_refused_with_what_to_write():
    with pytest.raises(SettingError, match=r"the output of a batch is a dict(.|\n)*StepOutput\(None, output, target\)"):
        of(normal(9, 3), whole(3, 9), cls=InADict)


def test_a_batch_without_a_target_is_refused_with_what_to_write():
    trainer = Trainer(Given(), None, nn.CrossEntropyLoss(), console=False)
    with pytest.raises(SettingError, match=r"no target(.|\n)*override split"):
        report(trainer, open_source(normal(9, 3), batch_size=3))
    assert trainer._hooks.split((1, 2)) == ((1,), 2)


def test_what_goes_wrong_in_the_model_is_reported_with_the_batch():
    trainer = Trainer(nn.Linear(4, 3), None, nn.CrossEntropyLoss(), console=False)
    with pytest.raises(RuntimeError) as failed:
        report(trainer, open_source((normal(9, 3), whole(3, 9)), batch_size=5))
    (note,) = failed.value.__notes__
    assert "report batch 1" in note and "(5, 3)" in note


def test_a_report_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    model[2].eval()
    hooks, before = trainer._hooks, {name: value.clone() for name, value in model.state_dict().items()}
    modes, rng = [module.training for module in model.modules()], torch.get_rng_state()
    made = report(trainer, open_source((normal(43, 3), whole(3, 43)), batch_size=5))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng) and trainer._hooks is hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not made.output.requires_grad
    model.eval()
    with torch.no_grad():
        assert torch.equal(made.output, torch.cat([model(x) for x in normal(43, 3).split(5)]))


FIRST_IMPORT = """
import random, sys, torch

class Draws:
    def find_spec(self, name, path, target=None):
        if name.startswith("sklearn"):
            random.random()

from torch import nn
from trainwright import Trainer
from trainwright.tools import cross_validate
sys.meta_path.insert(0, Draws())
x, y = torch.randn(12, 4), torch.arange(12) % 3

def make():
    model = nn.Linear(4, 3)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)

trainer = make()
before = random.getstate()
CALL
print("sklearn.metrics" in sys.modules, random.getstate() == before)
"""


@pytest.mark.parametrize(
    "call",
    ["trainer.report((x, y))", "cross_validate(make, (x, y), folds=2, epochs=1, batch_size=4)"],
)
def test_the_first_import_of_scikit_learn_draws_no_number_of_the_run(call):
    """Where rich is installed, scikit-learn 1.9 imports it, and it draws from Python's `random`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_IMPORT.replace("CALL", call)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True True\n", done.stderr


def test_a_report_runs_under_the_trainers_precision():
    trainer = Trainer(nn.Linear(3, 3), None, nn.CrossEntropyLoss(), precision="bf16", console=False)
    made = report(trainer, open_source((normal(43, 3), whole(3, 43)), batch_size=5))
    assert made.output.dtype is torch.bfloat16 and made.to_dict()["macro avg"]["support"] == 43
