"""The fifteen commonest mistakes: each is refused before the first update, and what it says to write works."""

from __future__ import annotations

import re

import pytest
import torch
from refusals import entry, make, network, noted, pieces, refused, settings, with_method
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright import (
    Checkpoint,
    CheckpointError,
    DataError,
    EarlyStopping,
    Epochs,
    OneCycle,
    SettingError,
    StepError,
    Trainer,
    accuracy,
    batches,
)
from trainwright.core import errors


def test_a_batch_that_is_a_dict_the_model_cannot_take():
    data = [{"image": x, "label": y} for x, y in pieces()]
    trainer = make()
    call = lambda: trainer.fit(data, epochs=1)  # noqa: E731
    first = "a batch is a dict, and Linear.forward does not take its keys"
    fix = refused(call, DataError, first=first, want="'input'", trainer=trainer)
    assert make(with_method(fix)).fit(data, epochs=1).updates == 4


def test_a_dict_of_batches_is_for_a_step_of_ones_own():
    call = lambda: make().fit([{"a": pair, "b": pair} for pair in pieces()], epochs=1)  # noqa: E731
    with pytest.raises(DataError, match=r"have  'a', 'b'\s(.|\n)*training_step\(self, batch\): x, y = batch\['a'\]"):
        call()


def test_a_dict_that_the_model_takes_is_no_mistake_and_its_own_type_error_passes():
    class Named(nn.Linear):
        def forward(self, image):
            return super().forward(image)

    class Failing(Named):
        def forward(self, image):
            raise TypeError("mine")

    data = [{"image": x, "label": y} for x, y in pieces()]
    assert make(model=Named(4, 3)).fit(data, epochs=1).updates == 4
    with pytest.raises(TypeError, match=r"^mine(\n|$)"):
        make(model=Failing(4, 3)).fit(data, epochs=1)


def test_a_missing_loss():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, console=False)
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    fix = refused(call, SettingError, first="no loss: loss is None.*", want="a loss", trainer=trainer)
    fixed = eval(fix, {"Trainer": Trainer, "model": model, "optimizer": optimizer, "nn": nn})
    assert fixed.fit(pieces(), epochs=1).updates == 4


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy], ids=["module", "function"])
def test_a_model_that_returns_a_tuple(loss):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    note = noted(make(model=Two(4, 3), loss=loss), pieces(), TypeError)
    name = "CrossEntropyLoss" if isinstance(loss, nn.Module) else "cross_entropy"
    assert note.splitlines() == [
        f"trainwright: {name} failed on train batch 1 of epoch 1",
        "  batch    ((4, 4) float32 cpu, (4,) int64 cpu)",
        "  output   ((4, 3) float32 cpu, (4, 4) float32 cpu)",
        f"  why      Two returned a tuple of 2: ((4, 3) float32 cpu, (4, 4) float32 cpu); {name} takes one tensor",
        f"  fix      Trainer(..., loss=lambda output, target: nn."
        f"{'CrossEntropyLoss()' if isinstance(loss, nn.Module) else 'functional.cross_entropy'}(output[0], target))",
        f"  where    refusals.py:{noted.__code__.co_firstlineno + 4}",
    ]
    fix = settings(entry(note, "fix"))
    assert make(model=Two(4, 3), **fix).fit(pieces(), epochs=1).updates == 4


SCHEDULES = {"onecycle": "OneCycle", "OneCycleLRR": "OneCycle", "cosine": "Cosine", "CosineAnnealingLR": "Cosine"}
SCHEDULES |= {"step": "StepLR", "StepLR": "StepLR", "ReduceLROnPlateau": "Plateau", "wsd": "WarmupStableDecay"}
SCHEDULES |= {"multistep": "MultiStep", "linear": "Linear", "exponential": "Exponential", "cyclic": "Cyclic"}


@pytest.mark.parametrize(("name", "meant"), SCHEDULES.items())
def test_a_schedule_given_by_its_name(name, meant):
    call = lambda: Trainer(network(), torch.optim.SGD, nn.CrossEntropyLoss(), schedule=name)  # noqa: E731
    first = rf"schedule='{name}' is no schedule\. Did you mean {meant}\(.*\)\?"
    fix = refused(call, SettingError, first=first, want="OneCycle(...)")
    assert make(**settings(fix)).fit(pieces(), pieces(1), epochs=2).updates == 8


def test_a_schedule_by_a_name_that_nobody_knows():
    call = lambda: Trainer(network(), torch.optim.SGD, nn.CrossEntropyLoss(), schedule="zzz")  # noqa: E731
    fix = refused(call, SettingError, first=r"schedule='zzz' is no schedule\.", want="Cosine(...)")
    assert make(**settings(fix)).fit(pieces(), epochs=1).updates == 4


@pytest.mark.parametrize("kind", ["loader", "batches"])
def test_an_empty_loader(kind):
    rows = (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    deal = batches if kind == "batches" else lambda data, size, **k: DataLoader(TensorDataset(*data), size, **k)
    trainer = make()
    call = lambda: trainer.fit(deal(rows, 32, drop_last=True), epochs=1)  # noqa: E731
    first = "(train data: )?20 rows, batch_size 32, drop_last=True leaves 0 batches"
    fix = refused(call, DataError, first=first, trainer=trainer)
    drop, size = re.fullmatch(r"(drop_last=False), or a batch_size of at most (\d+)", fix).groups()
    assert make().fit(deal(rows, 32, **settings(drop)), epochs=1).updates == 1
    assert make().fit(deal(rows, int(size), drop_last=True), epochs=1).updates == 1


def test_targets_of_another_type_for_cross_entropy():
    floats = [(x, y.float()) for x, y in pieces()]
    note = noted(make(), floats, RuntimeError)
    assert note.splitlines() == [
        "trainwright: CrossEntropyLoss failed on train batch 1 of epoch 1",
        "  batch    ((4, 4) float32 cpu, (4,) float32 cpu)",
        "  output   (4, 3) float32 cpu",
        "  why      CrossEntropyLoss takes class numbers as int64; the targets are float32 and all whole numbers",
        "  fix      y = y.long() in the Dataset, or target.long() in split(self, batch)",
        f"  where    refusals.py:{noted.__code__.co_firstlineno + 4}",
    ]
    assert make().fit([(x, y.long()) for x, y in floats], epochs=1).updates == 4
    fixed = with_method("def split(self, batch): inputs, target = super().split(batch); return inputs, target.long()")
    assert make(fixed).fit(floats, epochs=1).updates == 4


class Masked(nn.Linear):
    """Makes a tensor in its forward, on `where`."""

    where = "meta"

    def forward(self, x):
        mask = torch.ones(4, device=self.where or x.device)
        return super().forward(x * mask)


class Buffered(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        return super().forward(x * self.mask)


def test_a_tensor_on_another_device():
    note = noted(make(model=Masked(4, 3)), pieces(), RuntimeError)
    line = Masked.forward.__code__.co_firstlineno + 2
    assert "Masked failed on train batch 1 of epoch 1" in note
    assert f"why      model and batch are on cpu; 'mask' in Masked.forward (test_fifteen.py:{line}) is on meta" in note
    assert "fix      create it with device=x.device, or by self.register_buffer(...) in the model" in note
    fixed = Masked(4, 3)
    fixed.where = None
    assert make(model=fixed).fit(pieces(), epochs=1).updates == 4
    assert make(model=Buffered()).fit(pieces(), epochs=1).updates == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_returns_nothing(accumulate):
    class Forgets(Trainer):
        gives = False

        def training_step(self, batch):
            loss = self.loss(self.model(batch[0]), batch[1])
            if self.gives:
                return loss

    trainer = make(Forgets, accumulate=accumulate)
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    want = "a loss tensor, MeanLoss(loss, count), SumLoss(total, count), StepOutput(loss, output, target)"
    fix = refused(call, StepError, first="a step returned None", want=want, trainer=trainer, where=False)
    assert fix == "return loss"
    trainer = make(Forgets)
    trainer.gives = True
    assert trainer.fit(pieces(), epochs=1).updates == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(pieces())


def test_one_cycle_on_data_without_a_length():
    trainer = make(schedule=OneCycle(0.1))
    call = lambda: trainer.fit(DataLoader(Stream(), batch_size=None), epochs=1)  # noqa: E731
    first = "OneCycle.* needs the total number of updates, and .* has no length"
    fix = refused(call, SettingError, first=first, want="the number of updates", trainer=trainer)
    ends = settings(fix)
    assert ends == {"max_updates": 10_000}
    ends = settings(fix.replace("10_000", "6"))
    assert make(schedule=OneCycle(0.1)).fit(DataLoader(Stream(), batch_size=None), **ends).updates == 6


@pytest.mark.parametrize("patience", [-1, 0, 2.5])
def test_a_patience_that_is_none(patience):
    call = lambda: EarlyStopping("val_loss", patience=patience)  # noqa: E731
    first = rf"EarlyStopping\(patience={patience}\)"
    fix = refused(call, SettingError, first=first, want="at least 1")
    watch = eval(fix, {"EarlyStopping": EarlyStopping})
    assert make(early_stopping=watch).fit(pieces(), pieces(1), epochs=1).updates == 4


def check_a_misspelt_monitor():
    trainer = make(early_stopping=EarlyStopping("val_los", mode="min"), metrics={"accuracy": accuracy})
    call = lambda: trainer.fit(pieces(), pieces(1), epochs=1)  # noqa: E731
    first = r"EarlyStopping watches 'val_los', which this run does not produce\. Did you mean 'val_loss'\?"
    want = "one of accuracy, loss, val_accuracy, val_loss"
    fix = refused(call, SettingError, first=first, want=want, trainer=trainer)
    watch = EarlyStopping(eval(fix.removeprefix("watch ")))
    assert make(early_stopping=watch).fit(pieces(), pieces(1), epochs=1).updates == 4


def test_a_misspelt_monitor():
    check_a_misspelt_monitor()


@pytest.mark.parametrize("line", ["want", "fix"])
def test_the_law_sees_a_message_without_a_line(line, monkeypatch):
    message = errors.message
    monkeypatch.setattr(errors, "message", lambda what, **lines: message(what, **lines | {line: ""}))
    with pytest.raises(AssertionError):
        check_a_misspelt_monitor()


def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    trainer = make(checkpoint=Checkpoint(tmp_path / "file" / "run"))
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    first = f"checkpoints cannot be written to {tmp_path}/file/run"
    fix = refused(call, CheckpointError, first=first, trainer=trainer)
    elsewhere = eval(fix.rpartition(" or ")[2], {"Checkpoint": Checkpoint})
    assert make(checkpoint=elsewhere).fit(pieces(), epochs=1).updates == 4
    assert list((tmp_path / "another" / "directory").glob("update-*"))


def test_a_resume_from_a_path_that_is_not_there(tmp_path):
    make(checkpoint=Checkpoint(tmp_path, every=Epochs(1))).fit(pieces(), epochs=2)
    trainer = make(checkpoint=Checkpoint(tmp_path))
    missing = tmp_path / "update-0000000099"
    call = lambda: trainer.fit(pieces(), epochs=3, resume=missing)  # noqa: E731
    first = rf"resume='{missing}' does not exist"
    fix = refused(call, CheckpointError, first=first, trainer=trainer)
    newest, auto = (settings(one) for one in fix.split(" or "))
    assert (newest, auto) == ({"resume": str(tmp_path / "update-0000000008")}, {"resume": "auto"})
    for resume in (newest, auto):
        assert make(checkpoint=Checkpoint(tmp_path)).fit(pieces(), epochs=3, **resume).updates == 12


def test_a_resume_with_another_model(tmp_path):
    make(checkpoint=Checkpoint(tmp_path / "run")).fit(pieces(), epochs=1)
    trainer = make(model=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), checkpoint=Checkpoint(tmp_path / "run"))
    call = lambda: trainer.fit(pieces(), epochs=2, resume="auto")  # noqa: E731
    first = r".*update-0000000004 is from another model: 0 tensors differ in shape, 4 are missing, 2 are not .*"
    fix = refused(call, CheckpointError, first=first, want="the model as it was saved", trainer=trainer)
    assert fix == "build the model as when it was saved, or leave resume out and give Checkpoint() a new directory"
    assert make(checkpoint=Checkpoint(tmp_path / "run")).fit(pieces(), epochs=2, resume="auto").updates == 8
    trainer = make(model=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), checkpoint=Checkpoint(tmp_path / "new"))
    assert trainer.fit(pieces(), epochs=1).updates == 4


def test_early_stopping_on_validation_without_validation_data():
    trainer = make(early_stopping=EarlyStopping("val_loss"))
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    first = r"EarlyStopping watches 'val_loss', and fit\(\) got no validation data"
    fix = refused(call, SettingError, first=first, want="fit(train, val, ...)", trainer=trainer)
    watched = re.fullmatch(r"pass val, or watch ('\w+')", fix)[1]
    assert make(early_stopping=EarlyStopping("val_loss")).fit(pieces(), pieces(1), epochs=1).updates == 4
    assert make(early_stopping=EarlyStopping(eval(watched))).fit(pieces(), epochs=1).updates == 4
