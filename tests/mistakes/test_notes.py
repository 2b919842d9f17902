"""Exceptions of a step keep type, message and traceback, and gain one note: which batch, and its shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from refusals import entry, make, noted, pieces
from torch.utils.data import DataLoader, Dataset

from trainwright import DataError, MeanLoss, MixedPrecision, SettingError, Trainer

X, Y = pieces(1)[0]


# Which batch, and who failed.


def bad_at(index, number=6):
    data = pieces(number)
    return [(x, y.float() if at == index else y) for at, (x, y) in enumerate(data)]


@pytest.mark.parametrize("precision", [None, MixedPrecision("bf16")])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("index", [0, 2, 5])
def test_the_batch_is_counted_over_the_windows_of_an_epoch(accumulate, index, precision):
    with pytest.raises(RuntimeError) as caught:
        make(accumulate=accumulate, precision=precision).fit(bad_at(index), epochs=1)
    assert f"failed on train batch {index + 1} of epoch 1\n" in caught.value.__notes__[0]


def test_the_epoch_is_counted_over_the_stages():
    trainer = make()
    trainer.fit(pieces(), epochs=2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(lambda epoch: bad_at(1) if epoch else pieces(), epochs=2)
    assert "failed on train batch 2 of epoch 4\n" in caught.value.__notes__[0]


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "report"])
def test_a_batch_of_an_evaluation_or_prediction_is_named_once(call):
    trainer, data = make(), [(X, Y), (torch.randn(4, 5), Y)]
    calls = {
        "fit": lambda: trainer.fit(pieces(), iter(data), epochs=1),
        "evaluate": lambda: trainer.evaluate(data, name="test"),
        "predict": lambda: trainer.predict(data),
        "report": lambda: trainer.report(data),
    }
    with pytest.raises(RuntimeError) as caught:
        calls[call]()
    (note,) = caught.value.__notes__
    role = {"fit": "val", "evaluate": "test", "predict": "predict", "report": "report"}[call]
    assert note.splitlines()[:2] == [
        f"trainwright: Linear failed on {role} batch 2",
        "  batch    ((4, 5) float32 cpu, (4,) int64 cpu)",
    ]
    assert "output" not in note


class Counting:
    def update(self, output, target):
        raise KeyError("mine")

    def compute(self):
        return 0.0

    def reset(self):
        pass


def fails(output, target):
    raise KeyError("mine")


@pytest.mark.parametrize("metric", [fails, Counting()], ids=["function", "object"])
def test_a_metric_that_fails_is_named(metric):
    metrics = {"first": lambda output, target: output.mean(), "mine": metric}
    note = noted(make(metrics=metrics), pieces(), KeyError)
    assert note.startswith("trainwright: metric 'mine' failed on train batch 1 of epoch 1\n")
    assert entry(note, "output") == "(4, 3) float32 cpu"
    assert "why" not in note


def test_an_error_that_nobody_knows_has_the_shapes_alone():
    class Mine(Trainer):
        def training_step(self, batch):
            output = {"logits": self.model(batch["x"])}
            raise LookupError(f"mine, with {list(output)}")

    long = {"x": X, "y": Y, "ids": [1, 2], "mask": X, "text": "a", "deep": [[[[X]]]]}
    note, step = noted(make(Mine), [long], LookupError), Mine.training_step
    assert note.splitlines() == [
        "trainwright: Mine.training_step failed on train batch 1 of epoch 1",
        "  batch    {'x': (4, 4) float32 cpu, 'y': (4,) int64 cpu, 'ids': [int, int], 'mask': (4, 4) float32 cpu, "
        "and 2 more}",
        "  output   {'logits': (4, 3) float32 cpu}",
        f"  where    {step.__qualname__} (test_notes.py:{step.__code__.co_firstlineno + 2})",
    ]


# What is left alone.


class Interrupts(Trainer):
    error: BaseException = KeyboardInterrupt()

    def training_step(self, batch):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), SettingError("ours"), DataError("ours")])
def test_interrupts_and_errors_of_the_library_get_no_note(error):
    trainer = make(Interrupts)
    trainer.error = error
    with pytest.raises(type(error)) as caught:
        trainer.fit(pieces(), epochs=1)
    assert not hasattr(caught.value, "__notes__")


def test_a_note_of_the_users_own_stays_before_ours():
    error = ValueError("mine")
    error.add_note("look at the data")
    trainer = make(Interrupts)
    trainer.error = error
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(pieces(), epochs=1)
    assert error.__notes__[0] == "look at the data"
    assert len(error.__notes__) == 2


class Torn(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise KeyError(f"row {index}")
        return X[0], Y[0]


def test_an_error_of_the_data_keeps_what_torch_says_of_it_and_gets_no_shapes():
    with pytest.raises(KeyError, match="row 5") as caught:
        make().fit(DataLoader(Torn(), 4), epochs=1)
    assert not hasattr(caught.value, "__notes__")


def test_an_error_in_a_worker_names_the_worker_and_its_rows_alone():
    with pytest.raises(KeyError, match="row 5") as caught:
        make().fit(DataLoader(Torn(), 4, num_workers=1), epochs=1)
    (note,) = caught.value.__notes__
    assert "worker 0" in note and "4, 5, 6, 7" in note and "float32" not in note


class Spiteful(dict):
    """A batch that fails when it is looked at."""

    def items(self):
        raise RuntimeError("not now")


def test_a_batch_that_cannot_be_shown_does_not_replace_the_error():
    class Mine(Trainer):
        def training_step(self, batch):
            raise LookupError("mine")

        def count(self, batch):
            return 4

    with pytest.raises(LookupError, match="mine") as caught:
        make(Mine).fit([Spiteful(x=X)], epochs=1)
    assert caught.value.__notes__ == [
        "trainwright: the values of the failed step cannot be shown: RuntimeError: not now"
    ]


def test_nothing_is_noted_where_nothing_fails(monkeypatch):
    monkeypatch.setattr("trainwright.diagnostics.explain._note", lambda failure: pytest.fail("nothing has failed"))

    class Fine(Trainer):
        def training_step(self, batch):
            return MeanLoss(self.loss(self.model(batch[0]), batch[1]), 4)

    assert make(Fine).fit(pieces(), pieces(1), epochs=1).updates == 4


def test_the_rules_are_loaded_by_an_error_alone():
    program = """
import sys
import torch
from trainwright import Trainer

model = torch.nn.Linear(4, 3)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss(), console=False)
batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 1])
trainer.fit([batch], [batch], epochs=1)
names = ("rules", "causes", "frames", "not_finite")
assert not {f"trainwright.diagnostics.{name}" for name in names} & set(sys.modules)
try:
    trainer.fit([(batch[0], batch[1].float())], epochs=1)
except RuntimeError as error:
    assert "why" in error.__notes__[0]
assert "trainwright.diagnostics.rules" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
