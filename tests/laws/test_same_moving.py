"""The Same law for batches on their way: moved through slots that are used again, they train what the plain loop does.

The slots are those of CUDA on an accelerator emulated on the CPU. tests/gpu/test_moving_cuda.py runs the real one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import EMA, Checkpoint, Trainer, Updates, accuracy, batches
from trainwright.acceleration.transfer import SLOTS, Moving
from trainwright.fit.arguments import bound_hooks

from .models import assert_twins, build, ready
from .plain_loops import EPOCHS, by_hand, by_trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "acceleration"))
from lanes import FakeLane


class Prompt(FakeLane):
    """Streams that run as soon as a batch is sent, since what computes here is the CPU itself."""

    def lead(self, event, stream):
        super().lead(event, stream)
        self.run()


class Moved(Trainer):
    """Moves its batches through slots."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.lane = Prompt()
        moving = Moving(torch.device("cpu"), self.lane)
        self._hooks = replace(self._hooks, move=moving, free=moving.free)


class Keeping(Moved):
    """Holds every batch that it has been given, and some views of them."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.kept = []

    def training_step(self, batch):
        self.kept.append((batch[0], batch[0].clone(), batch[1][1:], batch[1][1:].clone()))
        return super().training_step(batch)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "tied"])
@pytest.mark.parametrize("trainer", [Moved, Keeping])
def test_batches_moved_through_slots_train_the_plain_loop_bit_for_bit(kind, trainer):
    data = ready(kind)
    theirs, ours = build(kind, "sgd"), build(kind, "sgd")
    expected, rng = by_hand(*theirs, F.cross_entropy, data)
    made, _, losses, our_rng = by_trainer(*ours, nn.CrossEntropyLoss(), data, trainer=trainer)
    assert losses == expected and torch.equal(our_rng, rng)
    assert_twins(ours, theirs)
    assert made.lane.memories <= 2 * SLOTS * (2 + (trainer is Keeping) * EPOCHS * len(data))
    assert not made._hooks.move._rings  # the memory was given back
    if trainer is Keeping:
        assert all(torch.equal(a, b) and torch.equal(c, d) for a, b, c, d in made.kept)


def rows():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(30, 6, generator=generator), torch.randint(0, 4, (30,), generator=generator)


def run(trainer, directory, *, ends=(), resume=None, seed=3, breaks_at=None):
    """Train with everything on; break in an update, or go on from there."""

    class Breaking(trainer):
        def training_step(self, batch):
            if self.progress.updates == breaks_at:
                raise RuntimeError("broken")
            return super().training_step(batch)

    torch.manual_seed(0)
    made = build("mlp", "adamw")
    model, optimizer = made
    settings = {"metrics": {"accuracy": accuracy}, "accumulate": 2, "clip": 1.0, "average": EMA(0.9), "console": False}
    saving = Checkpoint(directory, every=Updates(3), async_save=False)
    one = Breaking(model, optimizer, nn.CrossEntropyLoss(), checkpoint=saving, **settings)
    torch.manual_seed(seed)
    data = batches(rows(), 4, shuffle=True, seed=1)
    try:
        one.fit(data, batches(rows(), 8), epochs=3, resume=resume)
    except RuntimeError as error:
        if str(error) != "broken":
            raise
    return one, made


def test_a_run_that_breaks_off_and_is_resumed_ends_as_the_plain_one_that_never_broke(tmp_path):
    whole, expected = run(Trainer, tmp_path / "whole")
    run(Moved, tmp_path / "cut", breaks_at=6)
    resumed, found = run(Moved, tmp_path / "cut", resume="auto", seed=99)
    assert_twins(found, expected)
    assert resumed.history == whole.history
    assert torch.equal(resumed.predict(batches(rows()[0], 7)), whole.predict(batches(rows()[0], 7)))


def test_a_trainer_that_broke_off_trains_on_through_the_same_slots(tmp_path):
    ends = []
    for kind in (Trainer, Moved):
        one, made = run(kind, tmp_path / kind.__name__, breaks_at=4)
        type(one).training_step = Trainer.training_step
        torch.manual_seed(5)
        one.checkpoint = None
        one.fit(batches(rows(), 5, shuffle=True, seed=8), epochs=2)
        ends.append(made)
    assert_twins(*ends)


def test_on_a_cuda_device_batches_move_through_slots_unless_to_device_is_the_users_own():
    class Own(Trainer):
        def to_device(self, batch):
            return super().to_device(batch)

    moves = []
    for kind, device in ((Trainer, "cuda"), (Own, "cuda"), (Trainer, "cpu"), (Trainer, "meta")):
        trainer = kind(*build("mlp"), nn.CrossEntropyLoss(), console=False)
        trainer.device = torch.device(device)
        moves.append(bound_hooks(trainer, {"to_device"} if kind is Own else set()).move)
    through, own, nothing, plain = moves
    assert isinstance(through, Moving) and through.device.type == "cuda"
    assert own.__func__ is Own.to_device and nothing is None and plain.__func__ is Trainer.to_device
