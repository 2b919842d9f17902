"""The arithmetic of a run, and what contradicts it, before its first update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    ClipNorm,
    ClipValue,
    Cosine,
    DataError,
    EarlyStopping,
    Epochs,
    Observer,
    OneCycle,
    Plateau,
    SettingError,
    StepLR,
    Trainer,
    Updates,
    batches,
)
from trainwright.schedules import MultiStep


def make(**settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False, **settings)


def rows_of_data(rows=20):
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


@pytest.mark.parametrize(
    ("accumulate", "ends", "updates"),
    [
        (1, {"epochs": 2}, 14),
        (3, {"epochs": 2}, 6),
        (7, {"epochs": 2}, 2),
        (50, {"epochs": 2}, 2),
        ({0: 1, 1: 4}, {"epochs": 3}, 7 + 2 + 2),
        (2, {"max_updates": 5}, 5),
        (2, {"epochs": 2, "max_updates": 5}, 5),
        (2, {"epochs": 1, "max_updates": 5}, 4),
    ],
)
def test_the_plan_counts_the_updates_that_the_run_makes(accumulate, ends, updates):
    trainer = make(accumulate=accumulate)
    data = batches(rows_of_data(), 3)
    before = trainer.model.weight.clone()
    plan = trainer.plan(data, **ends)
    assert plan.updates == updates
    assert (plan.batches, plan.rows, plan.batch_size) == (7, 20, 3)
    assert torch.equal(before, trainer.model.weight)
    assert trainer.progress.updates == 0
    assert trainer.fit(data, **ends).updates == updates


def test_a_plan_leaves_the_random_state_alone():
    trainer = make()
    train, val = batches(rows_of_data(), 3, shuffle=True), batches(rows_of_data(), 3)
    before = torch.get_rng_state()
    trainer.plan(train, val, epochs=1)
    assert torch.equal(before, torch.get_rng_state())


LATE = "saves at the end alone"


@pytest.mark.parametrize(
    ("epochwise", "ends", "validate", "said"),
    [
        (True, {"epochs": 3}, None, None),
        (True, {"epochs": 3}, Epochs(1), None),
        (True, {"epochs": 3, "max_updates": 14}, Epochs(2), None),
        (True, {"epochs": 3}, Epochs(3), f"{LATE}: "),
        (True, {"epochs": 1}, None, f"{LATE}: "),
        (True, {"epochs": 1}, Updates(2), None),
        (True, {"max_updates": 5}, None, f"{LATE}, unless an epoch's data end before: "),
        (True, {"max_updates": 5, "epoch_updates": 2}, None, None),
        (False, {"max_updates": 5}, None, f"{LATE}: "),
        (False, {"max_updates": 5}, Updates(2), None),
    ],
)
def test_data_without_a_length_are_said_to_be_saved_late_only_where_they_are(epochwise, ends, validate, said, tmp_path):
    def stream(epoch=0):
        yield from [rows_of_data()] * 5

    class Noting(Observer):
        saved, notes = (), ()

        def on_fit_start(self, plan):
            self.notes = plan.notes

        def on_save(self, saved):
            self.saved += (saved.update,)

    noting = Noting()
    trainer = make(checkpoint=Checkpoint(tmp_path, async_save=False), observers=[noting])
    val, spans = (None, {}) if validate is None else ([rows_of_data()], {"validate": validate})
    result = trainer.fit(stream if epochwise else stream(), val, **ends, **spans)
    late = [note for note in noting.notes if LATE in note]
    assert len(late) == (said is not None) and all(note.startswith(said) for note in late)
    assert (noting.saved == (result.updates,)) == (said is not None)


def test_a_stream_has_no_number_of_updates_without_max_updates():
    def stream():
        yield rows_of_data()

    assert make().plan(stream(), epochs=1).updates is None
    assert make().plan(stream(), max_updates=9).updates == 9
    assert make().plan(stream(), epochs=3, epoch_updates=4).updates == 12


@pytest.mark.parametrize(
    ("ends", "match"),
    [
        ({}, "without an end"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": True}, "epochs=True"),
        ({"epochs": 2.0}, "epochs=2.0"),
        ({"max_updates": -1}, "max_updates=-1"),
        ({"max_seconds": 0}, "max_seconds=0"),
        ({"epochs": 1, "epoch_updates": 3}, "epoch_updates=3"),
    ],
)
def test_ends_that_cannot_work_are_refused_before_the_first_update(ends, match):
    trainer = make()
    before = trainer.model.weight.clone()
    with pytest.raises(SettingError, match=match):
        trainer.fit(batches(rows_of_data(), 3), **ends)
    with pytest.raises(SettingError, match=match):
        trainer.plan(batches(rows_of_data(), 3), **ends)
    assert torch.equal(before, trainer.model.weight)


def test_several_epochs_of_a_generator_are_refused_with_the_function_to_write():
    with pytest.raises(DataError, match="lambda epoch"):
        make().fit((rows_of_data() for _ in range(3)), epochs=2)


def test_a_plan_knows_what_is_watched_each_number_once(tmp_path):
    def watched(**settings):
        return make(**settings).plan(batches(rows_of_data(), 3), batches(rows_of_data(), 3), epochs=1).watched

    early, plateau = EarlyStopping("val_mae", mode="min"), Plateau("val_loss")
    assert watched() == watched(schedule=Cosine(), checkpoint=Checkpoint(tmp_path)) == ()
    assert watched(early_stopping=early, schedule=plateau) == ("val_mae", "val_loss")
    assert watched(checkpoint=Checkpoint(tmp_path, best="val_loss"), schedule=plateau) == ("val_loss",)
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    named = Trainer(
        model, {"a": torch.optim.Adam, "b": torch.optim.Adam}, nn.MSELoss(), console=False, schedule={"b": plateau}
    )
    assert named.plan(batches(rows_of_data(), 3), epochs=1).watched == ("val_loss",)


def test_a_plan_counts_the_parameters_that_are_frozen():
    trainer = make()
    trainer.model.bias.requires_grad_(False)
    plan = trainer.plan(batches(rows_of_data(), 3), epochs=1)
    assert (plan.parameters, plan.frozen) == (15, 3)


def halved(update, total):
    return 0.5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, ()),
        ({"schedule": OneCycle(max_lr=0.01)}, ("schedule OneCycle(max_lr=0.01)",)),
        ({"schedule": Cosine(warmup=Updates(2))}, ("schedule Cosine(warmup=Updates(2))",)),
        ({"schedule": StepLR(Epochs(1))}, ("schedule StepLR(step=Epochs(1))",)),
        ({"schedule": MultiStep([0.5])}, ("schedule MultiStep(milestones=[0.5])",)),
        ({"schedule": halved}, ("schedule FunctionSchedule(halved)",)),
        ({"clip": 1.0}, ("clip 1.0",)),
        ({"clip": ClipNorm(1.0, norm_type=1.0)}, ("clip ClipNorm(max_norm=1.0, norm_type=1.0)",)),
        ({"clip": ClipValue(0.5), "average": EMA()}, ("clip ClipValue(0.5)", "average EMA(0.999)")),
        ({"average": EMA(0.9, warmup=True)}, ("average EMA(0.9, warmup=True)",)),
        ({"average": SWA(0.5, Updates(1))}, ("average SWA(0.5, every=Updates(1))",)),
        ({"frozen": {"teacher": nn.Linear(4, 3), "other": nn.Linear(4, 3)}}, ("frozen teacher, other",)),
    ],
)
def test_a_plan_says_in_brief_what_fills_the_slots(settings, text):
    assert make(**settings).plan(batches(rows_of_data(), 3), epochs=2).settings == text


def test_slots_of_several_optimizers_are_reported_by_name():
    model = nn.ModuleDict({"G": nn.Linear(4, 1), "D": nn.Linear(4, 1)})
    optimizers = {"G": torch.optim.Adam, "D": torch.optim.Adam}
    clip, schedule = {"D": 1.0, "G": ClipValue(2.0)}, {"G": Cosine()}
    trainer = Trainer(model, optimizers, nn.MSELoss(), console=False, clip=clip, schedule=schedule)
    plan = trainer.plan(batches(rows_of_data(), 3), epochs=1)
    assert plan.settings == ("schedule G Cosine", "clip D 1.0, G ClipValue(2.0)")


def test_a_setting_of_ones_own_is_reported_by_its_name():
    class Mine:
        def __init__(self):
            self.weights = torch.ones(3)

        def __call__(self, parameters):
            return None

    assert make(clip=Mine()).plan(batches(rows_of_data(), 3), epochs=1).settings == ("clip Mine",)


def test_a_loss_with_parameters_is_said_to_be_left_out_of_averages_and_bests():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return self.scale * ((output - target) ** 2).mean()

    def notes(loss, **settings):
        model = nn.Linear(2, 1)
        trained = [*model.parameters(), *loss.parameters()]
        trainer = Trainer(model, torch.optim.SGD(trained, lr=0.1), loss, console=False, **settings)
        return " ".join(trainer.plan([(torch.ones(2, 2), torch.ones(2, 1))], epochs=1).notes)

    assert "neither averaged nor restored" in notes(Scaled(), average=EMA(0.9))
    assert "neither averaged nor restored" in notes(Scaled(), early_stopping=EarlyStopping("loss"))
    assert "neither averaged" not in notes(Scaled()) + notes(nn.MSELoss(), average=EMA(0.9))
