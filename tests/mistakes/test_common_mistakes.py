"""Thirty common mistakes with training loops, from a list that was written without a look at the code.

Each is refused before the first update, or, where it is no error, said in words. Asserted for each: the cause (what was
given, and what is expected), the fix, and the line of the script. The list includes what users of Lightning, Keras,
Accelerate and the Trainer of transformers write.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, EarlyStopping, OneCycle, Trainer, accuracy, batches

FILE = "test_common_mistakes.py"
G = torch.Generator().manual_seed(0)
X = torch.randn(96, 8, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
TRAIN, VAL = (X[:64], Y[:64]), (X[64:], Y[64:])
FIT: dict[str, Any] = {"epochs": 2, "batch_size": 16}
LOSS = nn.CrossEntropyLoss()


class Run:
    """The objects of one script, and the number of optimizer steps that it has made."""

    def __init__(self, directory: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.model = self.net(16)
        self.optimizer = self.sgd(self.model)
        self.steps = 0

    def net(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *_: Any) -> None:
        self.steps += 1


# The scripts. The line that is named must have the comment HERE.


def max_epochs(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, max_epochs=3)  # HERE


def shuffle_forgotten(run: Run) -> None:
    order = TRAIN[1].argsort()
    by_class = TensorDataset(TRAIN[0][order], TRAIN[1][order])
    Trainer(run.model, run.optimizer, LOSS).fit(DataLoader(by_class, 16), batches(VAL, 16), epochs=2)


def callbacks(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, callbacks=[EarlyStopping("val_loss", patience=2)])  # HERE


def bf16(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, bf16=True)  # HERE


def accelerator_and_devices(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, accelerator="gpu", devices=2)  # HERE


def inputs_and_targets_apart(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit(X, Y, epochs=2, batch_size=16)  # HERE


def no_length(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit(TRAIN, VAL, batch_size=16)  # HERE


def train_method(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).train()  # HERE


def ckpt_path(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit(TRAIN, VAL, ckpt_path="last", **FIT)  # HERE


def metrics_by_name(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, metrics=["accuracy"])  # HERE


def compute_metrics_of_one_argument(run: Run) -> None:
    def compute_metrics(eval_pred):  # type: ignore[no-untyped-def]
        logits, labels = eval_pred
        return {"accuracy": (logits.argmax(-1) == labels).float().mean()}

    Trainer(run.model, run.optimizer, LOSS, metrics={"acc": compute_metrics})  # HERE


def a_monitor_that_is_not_there(run: Run) -> None:
    stops = EarlyStopping("val_acc", mode="max", patience=2)
    trainer = Trainer(run.model, run.optimizer, LOSS, metrics={"accuracy": accuracy}, early_stopping=stops)
    trainer.fit(TRAIN, VAL, **FIT)  # HERE


def clip_by_name(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, clip="norm")  # HERE


def accumulate_zero(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, accumulate=0)  # HERE


def optimizer_of_another_model(run: Run) -> None:
    Trainer(run.model, run.sgd(run.net(16)), LOSS).fit(TRAIN, VAL, **FIT)  # HERE


def softmax_before_cross_entropy(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.Softmax(dim=1))
    Trainer(model, run.sgd(model), LOSS).fit(TRAIN, VAL, **FIT)  # HERE


def targets_that_broadcast(run: Run) -> None:
    model = nn.Linear(8, 1)
    Trainer(model, run.sgd(model), nn.MSELoss()).fit((X, X[:, 0]), **FIT)  # HERE


def float_classes(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit((X, Y.float()), **FIT)  # HERE


def classes_from_one(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit((X, Y + 1), **FIT)  # HERE


def bytes_as_inputs(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit(((X * 20 + 100).to(torch.uint8), Y), **FIT)  # HERE


def two_schedules(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)

    class Mine(Trainer):
        def training_step(self, batch: Any) -> Any:
            scheduler.step()
            return LOSS(self.model(batch[0]), batch[1])

    Mine(run.model, run.optimizer, schedule=OneCycle(max_lr=0.1)).fit(TRAIN, **FIT)  # HERE


def steps_in_training_step(run: Run) -> None:
    class Mine(Trainer):
        def training_step(self, batch: Any) -> Any:
            loss = LOSS(self.model(batch[0]), batch[1])
            loss.backward()
            self.optimizer.step()  # HERE
            return loss

    Mine(run.model, run.optimizer).fit(TRAIN, **FIT)


def return_forgotten(run: Run) -> None:
    class Mine(Trainer):
        def training_step(self, batch: Any) -> Any:  # HERE
            LOSS(self.model(batch[0]), batch[1])

    Mine(run.model, run.optimizer).fit(TRAIN, **FIT)


def loss_as_a_number(run: Run) -> None:
    class Mine(Trainer):
        def training_step(self, batch: Any) -> Any:  # HERE
            return LOSS(self.model(batch[0]), batch[1]).item()

    Mine(run.model, run.optimizer).fit(TRAIN, **FIT)


def detached_loss(run: Run) -> None:
    class Mine(Trainer):
        def training_step(self, batch: Any) -> Any:  # HERE
            return LOSS(self.model(batch[0]), batch[1]).detach()

    Mine(run.model, run.optimizer).fit(TRAIN, **FIT)


def generator_as_training_data(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS).fit((batch for batch in batches(TRAIN, 16)), epochs=3)  # HERE


def generator_as_validation_data(run: Run) -> None:
    trainer = Trainer(run.model, run.optimizer, LOSS)
    trainer.fit(batches(TRAIN, 16), (batch for batch in batches(VAL, 16)), epochs=3)  # HERE


def mean_of_batch_values(run: Run) -> None:
    f1 = lambda output, target: f1_score(target, output.argmax(1), average="macro")  # noqa: E731
    Trainer(run.model, run.optimizer, LOSS, metrics={"f1": f1}).fit(TRAIN, VAL, **FIT)  # HERE


def resume_of_a_changed_model(run: Run) -> None:
    Trainer(run.model, run.optimizer, LOSS, checkpoint=Checkpoint(run.directory)).fit(
        TRAIN, VAL, epochs=1, batch_size=16
    )
    run.steps = 0
    wide = run.net(32)
    trainer = Trainer(wide, run.sgd(wide), LOSS, checkpoint=Checkpoint(run.directory))
    trainer.fit(TRAIN, VAL, resume="auto", **FIT)  # HERE


def model_in_eval_mode(run: Run) -> None:
    run.model.eval()
    Trainer(run.model, run.optimizer, LOSS).fit(TRAIN, VAL, **FIT)


@dataclass(frozen=True)
class Expected:
    """What a user must read: texts of the cause and of the fix; `error` is None for what is said in words."""

    error: type[BaseException] | None
    cause: tuple[str, ...]
    fix: str
    has_line: bool = True


MISTAKES: dict[Callable[[Run], None], Expected] = {
    max_epochs: Expected(TypeError, ("Trainer takes no 'max_epochs'", "by name"), "Write fit(..., epochs=3)"),
    shuffle_forgotten: Expected(None, ("64 rows in 4 batches of 16",), "from a DataLoader, in order", has_line=False),
    callbacks: Expected(TypeError, ("Trainer takes no 'callbacks'",), "early_stopping=EarlyStopping(...)"),
    bf16: Expected(TypeError, ("Trainer takes no 'bf16'",), 'precision="bf16"'),
    accelerator_and_devices: Expected(
        TypeError, ("no 'accelerator'", 'device="cpu", "cuda"', "no 'devices'"), "torchrun --nproc-per-node 2 train.py"
    ),
    inputs_and_targets_apart: Expected(
        ValueError, ("second is taken as validation data", "inputs and targets in one tuple"), "fit((x, y), ...)"
    ),
    no_length: Expected(ValueError, ("without an end", "epochs, max_updates or max_seconds"), "epochs=10"),
    train_method: Expected(AttributeError, ("no attribute 'train'",), "trainer.fit(train, val, epochs=10)"),
    ckpt_path: Expected(TypeError, ("takes no 'ckpt_path'",), 'fit(..., resume="auto")'),
    metrics_by_name: Expected(TypeError, ("metrics=['accuracy']", "a dict"), 'metrics={"accuracy": accuracy}'),
    compute_metrics_of_one_argument: Expected(
        ValueError, ("compute_metrics(eval_pred)", "a function of (output, target)"), "lambda output, target: ..."
    ),
    a_monitor_that_is_not_there: Expected(
        ValueError, ("watches 'val_acc'", "one of accuracy, loss, val_accuracy, val_loss"), "watch 'val_accuracy'"
    ),
    clip_by_name: Expected(ValueError, ("clip='norm'", "ClipNorm(...), ClipValue(...)"), "clip=1.0"),
    accumulate_zero: Expected(ValueError, ("accumulate=0", "at least 1"), "accumulate=4"),
    optimizer_of_another_model: Expected(
        ValueError, ("trains no parameter of this model", "over model.parameters()"), "from the same model object"
    ),
    softmax_before_cross_entropy: Expected(
        None, ("outputs are probabilities", "logits"), "leave the softmax out of the model"
    ),
    targets_that_broadcast: Expected(
        ValueError, ("output (16, 1) and a target (16,)", "of one shape"), "target.unsqueeze(1) in split(self, batch)"
    ),
    float_classes: Expected(RuntimeError, ("takes class numbers as int64", "are float32"), "target.long() in split"),
    classes_from_one: Expected(IndexError, ("largest target is 3", "the classes 0 to 2"), "target - 1 in split"),
    bytes_as_inputs: Expected(RuntimeError, ("weights are float32", "inputs uint8"), "inputs.float() in split"),
    two_schedules: Expected(
        ValueError, ("schedule= beside a torch scheduler", "one of them"), "schedule=TorchSchedule("
    ),
    steps_in_training_step: Expected(
        RuntimeError, ("calls backward() and the optimizer's step() itself", "the loop calls"), "return loss, and no"
    ),
    return_forgotten: Expected(RuntimeError, ("a step returned None", "a loss tensor"), "return loss"),
    loss_as_a_number: Expected(RuntimeError, ("a step returned float", "a loss tensor"), "return loss"),
    detached_loss: Expected(RuntimeError, ("depends on no weight that is trained",), "no detach(), item()"),
    generator_as_training_data: Expected(
        ValueError, ("a generator of batches can be iterated only once", "iterated again"), "lambda epoch: make_batches"
    ),
    generator_as_validation_data: Expected(
        ValueError, ("val data: 3 validations, and a generator", "iterated again"), "pass a list of the batches"
    ),
    mean_of_batch_values: Expected(
        None, ("metric 'f1' is no mean over rows", "for each batch", "of all rows"), "metrics={'f1': over_all(...)}"
    ),
    resume_of_a_changed_model: Expected(
        RuntimeError, ("is from another model", "0.weight (16, 8), the model's is (32, 8)"), "build the model as when"
    ),
    model_in_eval_mode: Expected(None, ("from eval",), "switched from eval to train mode", has_line=False),
}


def read(mistake: Callable[[Run], None], run: Run, capsys: Any) -> tuple[type[BaseException] | None, str]:
    """Run a script; return the class of its error, and all that its user reads."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = None
        try:
            mistake(run)
        except Exception as raised:
            error = raised
    notes = [] if error is None else [str(error), *getattr(error, "__notes__", [])]
    texts = [*notes, *(str(one.message) for one in warned), *([] if error else [capsys.readouterr().out])]
    return type(error) if error else None, "\n".join(texts)


def marked_line(mistake: Callable[[Run], None]) -> int:
    """The number of the line with the comment HERE."""
    lines, first = inspect.getsourcelines(mistake)
    return first + next(index for index, line in enumerate(lines) if "# HERE" in line)


def test_there_are_thirty() -> None:
    assert len(MISTAKES) == 30


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_common_mistake_says_its_cause_its_fix_and_the_line(
    mistake: Callable[[Run], None], tmp_path: Any, capsys: Any
) -> None:
    run, expected = Run(tmp_path), MISTAKES[mistake]
    error, text = read(mistake, run, capsys)
    assert (error is None) == (expected.error is None), text
    if expected.error is not None:
        assert error is not None and issubclass(error, expected.error)
        assert run.steps == 0
    for part in expected.cause:
        assert part in text
    assert expected.fix in text
    if expected.has_line:
        assert re.search(rf"\b{FILE}:{marked_line(mistake)}\b", text), text
