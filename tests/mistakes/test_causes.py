"""The causes that a note knows: each is named by what is there, and what it says to write works."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from refusals import entry, make, noted, pieces, settings, with_method
from torch import nn
from torch.utils.data import DataLoader

from trainwright import MeanLoss, StepOutput, Trainer, accuracy

X, Y = pieces(1)[0]


def binary(loss, x=X, y=None, **settings):
    """One output per row."""
    return make(model=nn.Linear(4, 1), loss=loss, **settings), [(x, y)]


class Recurrent(Trainer):
    """Carries a state from batch to batch."""

    carried = 0.0
    detaches = False

    def training_step(self, batch):
        output = self.model(batch[0]) + self.carried
        self.carried = output.tanh().detach() if self.detaches else output.tanh()
        return self.loss(output, batch[1])


class Returns(Trainer):
    """Returns a loss that no gradient flows through."""

    def training_step(self, batch):
        output = self.model(batch[0])
        return StepOutput(torch.tensor(self.loss(output, batch[1]).item()), output, batch[1])


class Detached(Trainer):
    def training_step(self, batch):
        return self.loss(self.model(batch[0]), batch[1]).detach()


class Full(Trainer):
    """Runs out of memory above 2 rows."""

    def training_step(self, batch):
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch)


class Own(Trainer):
    def update(self, window):
        self.optimizer.zero_grad()
        for inputs, target in window:
            loss = F.cross_entropy(self.model(inputs), target.float())
            loss.backward()
        self.optimizer.step()


WORDS = torch.randint(0, 3, (4, 3), generator=torch.Generator().manual_seed(0))
IMAGES = (torch.randn(4, 8, 8, 1), Y)


class Widens(Trainer):
    def update(self, window):
        inputs, target = window[0]
        self.minimize(F.cross_entropy(self.model(inputs.double()), target))


class Keyed(nn.Linear):
    def forward(self, x):
        return {"hidden": x, "logits": super().forward(x)}


def sequence(*layers):
    return nn.Sequential(*layers)


CASES = {
    "rows mixed with features": (
        *(lambda: (make(model=sequence(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Linear(2, 3))), pieces()),),
        *(ValueError, "CrossEntropyLoss", "CrossEntropyLoss got an output of 8 rows and a target of 4"),
        "x.flatten(1) in forward for a view or reshape that mixes rows with features",
    ),
    "a target for each word": (
        *(lambda: (make(model=sequence(nn.Embedding(3, 3), nn.Flatten(0, 1))), [(WORDS, WORDS)]), ValueError),
        *("CrossEntropyLoss", "CrossEntropyLoss got an output of 12 rows and a target of 4"),
        "target.flatten() in split(self, batch)",
    ),
    "fractions for classes": (
        *(lambda: (make(), [(X, torch.rand(4))]), RuntimeError, "CrossEntropyLoss"),
        "the targets are float32 and hold fractions, so they are no classes",
        "nn.MSELoss() for numbers in place of classes",
    ),
    "int32 classes": (
        *(lambda: (make(), [(X, Y.int())]), RuntimeError, "CrossEntropyLoss"),
        "takes class numbers as int64; the targets are int32",
        "target.long() in split(self, batch)",
    ),
    "classes in a column": (
        *(lambda: (make(), [(X, Y[:, None])]), RuntimeError, "CrossEntropyLoss"),
        "one class number per row, (rows,); the targets are (4, 1)",
        "target.squeeze(1) in split(self, batch)",
    ),
    "one-hot classes": (
        *(lambda: (make(), [(X, F.one_hot(Y, 3))]), RuntimeError, "CrossEntropyLoss"),
        "the targets are (4, 3), one-hot",
        "target.argmax(1) in split(self, batch)",
    ),
    "a class that is too large": (
        *(lambda: (make(), [(X, torch.tensor([1, 2, 3, 1]))]), IndexError, "CrossEntropyLoss"),
        "the largest target is 3, and the model has 3 outputs, for the classes 0 to 2",
        "a last layer of 4 outputs, or target - 1 in split(self, batch)",
    ),
    "a class below 0": (
        *(lambda: (make(), [(X, torch.tensor([1, 2, -1, 1]))]), IndexError, "CrossEntropyLoss"),
        "the smallest target is -1; classes are numbered from 0",
        "loss=nn.CrossEntropyLoss(ignore_index=-1), if these do not count",
    ),
    "whole numbers for yes and no": (
        *(lambda: binary(nn.BCEWithLogitsLoss(), y=Y[:, None] % 2), RuntimeError, "BCEWithLogitsLoss"),
        "takes targets of the output's dtype, float32; they are int64",
        "target.float() in split(self, batch)",
    ),
    "logits for probabilities": (
        *(lambda: binary(nn.BCELoss(), 9 * X, torch.zeros(4, 1)), RuntimeError, "BCELoss"),
        "BCELoss takes probabilities; the outputs go from",
        "nn.BCEWithLogitsLoss() in place of nn.BCELoss()",
    ),
    "a dict of outputs": (
        *(lambda: (make(model=Keyed(4, 3)), pieces()), TypeError, "CrossEntropyLoss"),
        "Keyed returned a dict of 2: {'hidden': (4, 4) float32 cpu, 'logits': (4, 3) float32 cpu}",
        "Trainer(..., loss=lambda output, target: nn.CrossEntropyLoss()(output['logits'], target))",
    ),
    "float64 inputs": (
        *(lambda: (make(), [(X.double(), Y)]), RuntimeError, "Linear"),
        "the weights are float32, and the inputs float64, NumPy's own type",
        "x = x.float() in the Dataset, or inputs.float() in split(self, batch)",
    ),
    "inputs that the user's own code has widened": (
        *(lambda: (make(Widens), pieces()), RuntimeError, "Linear"),
        "the weights are float32, and the inputs float64",
        "inputs.float() in update(self, window)",
    ),
    "bytes as inputs": (
        *(lambda: (make(), [(X.byte(), Y)]), RuntimeError, "Linear"),
        "the weights are float32, and the inputs uint8",
        "inputs.float() in split(self, batch)",
    ),
    "other features": (
        *(
            lambda: (make(model=sequence(nn.ReLU(), nn.Linear(5, 3))), pieces()),
            RuntimeError,
            "Linear '1' of Sequential",
        ),
        "Linear '1' takes 5 features; it got 4, in (4, 4)",
        "nn.Linear(4, 3) in place of nn.Linear(5, 3)",
    ),
    "inputs to be flattened": (
        *(lambda: (make(), [(X.view(4, 2, 2), Y)]), RuntimeError, "Linear"),
        "Linear takes 4 features; it got 2, in (4, 2, 2)",
        "nn.Flatten() before it",
    ),
    "channels at the end": (
        *(lambda: (make(model=sequence(nn.Conv2d(1, 3, 8), nn.Flatten())), [IMAGES]), RuntimeError),
        *("Conv2d '0' of Sequential", "Conv2d '0' takes (rows, 1 channels, ...); it got (4, 8, 8, 1)"),
        "inputs.movedim(-1, 1) in split(self, batch)",
    ),
    "no channels": (
        *(lambda: (make(model=sequence(nn.Conv2d(1, 3, 8), nn.Flatten())), [(IMAGES[0][..., 0], Y)]), RuntimeError),
        *("Conv2d '0' of Sequential", "it got (4, 8, 8)"),
        "inputs.unsqueeze(1) in split(self, batch)",
    ),
    "a lone row": (
        *(lambda: (make(model=sequence(nn.Linear(4, 3), nn.BatchNorm1d(3))), [(X[:1], Y[:1])]), ValueError),
        *("BatchNorm1d '1' of Sequential", "BatchNorm1d '1' takes a mean over the rows of a batch, and this one has 1"),
        "drop_last=True in batches(...) or DataLoader(...), or a batch_size that leaves no lone row",
    ),
    "words that are not in the table": (
        *(lambda: (make(model=nn.Embedding(3, 3)), [(torch.tensor([0, 7]), Y[:2])]), IndexError, "Embedding"),
        "Embedding has 3 rows, 0 to 2; the inputs go from 0 to 7",
        "nn.Embedding(8, 3)",
    ),
    "more inputs than forward takes": (
        *(lambda: (make(), [(X, X, Y)]), TypeError, "Linear"),
        "Linear.forward takes (input); the batch without its last item has 2",
        "def split(self, batch): return (batch[0],), batch[-1]",
    ),
    "a loss without a gradient": (
        *(lambda: (make(Detached), pieces()), RuntimeError, "backward()"),
        "the loss depends on no weight that is trained",
        "return the loss as it was computed: no detach(), item(), torch.tensor(loss) or torch.no_grad() around it",
    ),
    "a loss made of numbers": (
        *(lambda: (make(Returns), pieces()), RuntimeError, "backward()"),
        "the output requires a gradient, and the loss that was made of it does not",
        "return the loss as it was computed",
    ),
    "a batch that is too large": (
        *(lambda: (make(Full), pieces()), torch.OutOfMemoryError, "Full.training_step"),
        "the batch of 4 rows does not fit in the memory of cpu",
        "batches of 2 rows with Trainer(..., accumulate=2): the same rows in each update",
    ),
    "a loss of an own update": (
        *(lambda: (make(Own), pieces()), RuntimeError, "cross_entropy"),
        "cross_entropy takes class numbers as int64; the targets are float32 and all whole numbers",
        "target.long() in update(self, window)",
    ),
}


WEIGHED = {
    "classes": (nn.CrossEntropyLoss(), lambda: nn.Linear(4, 3), (X,), Y),
    "a function": (F.cross_entropy, lambda: nn.Linear(4, 3), (X,), Y),
    "values": (nn.MSELoss(), lambda: nn.Linear(4, 2), (X,), X[:, :2].clone()),
    "two inputs": (nn.CrossEntropyLoss(), lambda: nn.Bilinear(4, 4, 3), (X, X.flip(0)), Y),
}


@pytest.mark.parametrize("metrics", [None, {"accuracy": accuracy}])
@pytest.mark.parametrize("case", WEIGHED)
def test_a_batch_that_ends_in_weights_gets_the_step_to_write(case, metrics):
    loss, model, inputs, target = WEIGHED[case]
    metrics = None if case == "values" else metrics
    weight = torch.tensor([1.0, 0.0, 2.5, 0.5])
    rows = [(*inputs, target, weight), (*(one[:2] for one in inputs), target[:2], weight[:2])]
    torch.manual_seed(0)
    fix = entry(noted(make(model=model(), loss=loss, metrics=metrics), rows, TypeError), "fix")
    assert "MeanLoss(loss, weight.sum())" in fix
    names = {"Trainer": Trainer, "nn": nn, "F": F, "MeanLoss": MeanLoss, "StepOutput": StepOutput}
    exec(f"class Fixed(Trainer):\n    {fix}\n", names)
    torch.manual_seed(0)
    fixed = make(names["Fixed"], model=model(), loss=loss, metrics=metrics, accumulate=2)
    torch.manual_seed(0)
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    each = nn.functional.mse_loss if case == "values" else nn.functional.cross_entropy
    total = 0.0
    for *x, y, w in rows:  # one update over both: the mean over all rows, each by its weight
        total = total + (each(plain(*x), y, reduction="none").reshape(len(w), -1).mean(1) * w).sum()
    (total / 5.0).backward()
    optimizer.step()
    fixed.fit(rows, epochs=1)
    torch.testing.assert_close(fixed.model.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_a_third_item_that_is_no_weight_gets_the_split_as_before():
    note = noted(make(), [(X, X, Y)], TypeError)
    assert entry(note, "fix") == "def split(self, batch): return (batch[0],), batch[-1]"
    note = noted(make(loss=nn.MSELoss()), [(X, X, X, X[:, :3])], TypeError)
    assert "MeanLoss(" not in entry(note, "fix")


@pytest.mark.parametrize("case", CASES)
def test_the_note_names_the_batch_its_shapes_the_cause_and_the_fix(case):
    build, error, failed, why, fix = CASES[case]
    trainer, data = build()
    note = noted(trainer, data, error)
    head, *_ = note.splitlines()
    assert head == f"trainwright: {failed} failed on train batch 1 of epoch 1"
    x, y = data[0][0], data[0][-1]
    assert f"({tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} cpu" in entry(note, "batch")
    assert f"{tuple(y.shape)} {str(y.dtype).removeprefix('torch.')} cpu)" in entry(note, "batch")
    assert why in entry(note, "why")
    assert fix in entry(note, "fix")


SPLITS = {
    "int32 classes": "target.long()",
    "classes in a column": "target.squeeze(1)",
    "one-hot classes": "target.argmax(1)",
    "a class that is too large": "target - 1",
    "whole numbers for yes and no": "target.float()",
    "a target for each word": "target.flatten()",
}
INPUTS = {
    "float64 inputs": "inputs.float()",
    "bytes as inputs": "inputs.float()",
    "channels at the end": "inputs.movedim(-1, 1)",
    "no channels": "inputs.unsqueeze(1)",
}


@pytest.mark.parametrize("case", [*SPLITS, *INPUTS])
def test_the_change_in_split_works(case):
    trainer, data = CASES[case][0]()
    change = SPLITS.get(case) or INPUTS[case]
    assert f"{change} in split(self, batch)" in CASES[case][4]
    pair = "(inputs,), " + change if case in SPLITS else f"({change},), target"
    cls = with_method(f"def split(self, batch): inputs, target = batch; return {pair}")
    assert make(cls, trainer.model, trainer.loss).fit(data, epochs=1).updates == len(data)


@pytest.mark.parametrize(
    "fixed",
    [
        lambda: (make(loss=nn.MSELoss()), [(X, torch.rand(4, 3))]),
        lambda: (make(loss=nn.CrossEntropyLoss(ignore_index=-1)), [(X, torch.tensor([1, 2, -1, 1]))]),
        lambda: binary(nn.BCEWithLogitsLoss(), 9 * X, torch.zeros(4, 1)),
        lambda: (make(model=sequence(nn.ReLU(), nn.Linear(4, 3))), pieces()),
        lambda: (make(model=sequence(nn.Flatten(), nn.Linear(4, 3))), [(X.view(4, 2, 2), Y)]),
        lambda: (make(model=nn.Embedding(8, 3)), [(torch.tensor([0, 7]), Y[:2])]),
        lambda: (make(Full, accumulate=2), [(x[half], y[half]) for x, y in pieces(1) for half in ([0, 1], [2, 3])]),
        lambda: (make(with_method(CASES["more inputs than forward takes"][4])), [(X, X, Y)]),
        lambda: (make(model=Keyed(4, 3), **settings(CASES["a dict of outputs"][4])), pieces()),
        lambda: (make(model=sequence(nn.Linear(4, 3), nn.BatchNorm1d(3))), DataLoader(rows(), 4, drop_last=True)),
    ],
)
def test_the_other_fixes_work(fixed):
    trainer, data = fixed()
    trainer.fit(data, epochs=1)
    assert trainer.progress.updates >= 1


def rows():
    return [(X[0], Y[0])] * 5


def test_a_state_that_is_carried_reaches_back_into_an_earlier_batch():
    trainer = make(Recurrent)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(pieces(), epochs=1)
    (note,) = caught.value.__notes__
    assert note.startswith("trainwright: backward() failed on train batch 2 of epoch 1\n")
    assert "reaches back into an earlier batch" in entry(note, "why")
    assert "hidden = hidden.detach()" in entry(note, "fix")
    trainer = make(Recurrent)
    trainer.detaches = True
    assert trainer.fit(pieces(), epochs=1).updates == 4


def test_out_of_memory_in_an_evaluation_asks_for_smaller_batches_alone():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make(Full).evaluate(pieces(1))
    (note,) = caught.value.__notes__
    assert note.startswith("trainwright: Full.training_step failed on val batch 1\n")
    assert entry(note, "fix") == "smaller batches for this data, such as batch_size=2: its numbers stay the same"
    assert make(Full).evaluate([(X[:2], Y[:2])])["val_loss"] > 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make(Full, accumulate=3).fit(pieces(), epochs=1)
    assert "accumulate=6" in caught.value.__notes__[0]


# Devices: torch's meta device stands for another one.


class Strays(Trainer):
    def to_device(self, batch):
        return batch[0], batch[1].to("meta")


def test_a_batch_on_another_device_than_the_model():
    note = noted(make(Strays), pieces(), RuntimeError)
    assert entry(note, "why") == "the model is on cpu, and the batch has a tensor on meta"
    assert entry(note, "fix") == "return super().to_device(batch) from to_device(self, batch)"
    cls = with_method("def to_device(self, batch): return super().to_device(batch)")
    assert make(cls).fit(pieces(), epochs=1).updates == 4


def test_a_model_that_was_moved_after_the_trainer_was_built():
    trainer = make()
    trainer.model.to("meta")
    with pytest.raises(RuntimeError) as caught:
        trainer.evaluate(pieces())
    (note,) = caught.value.__notes__
    assert entry(note, "why") == "the model's weight is on meta, and the Trainer was built for cpu"
    assert entry(note, "fix") == "move the model before Trainer(...), or Trainer(..., device='meta')"
