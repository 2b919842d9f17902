"""Small runs with a schedule, and the plain loop with torch's scheduler: shared by the tests of the Schedule law."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torchs

from records import Records
from trainwright import Cosine, OneCycle, StepLR, TorchSchedule, Trainer, Updates, batches
from trainwright.schedules import Cyclic, Exponential, Linear, MultiStep


def one_group(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model):
    first = {"params": model[0].parameters(), "lr": 0.3}
    return SGD([first, {"params": model[1].parameters(), "name": "head"}], lr=0.07, momentum=0.9)


def adam_groups(model):
    groups = [{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[1].parameters()}]
    return AdamW(groups, lr=1e-3, betas=(0.88, 0.999))


OPTIMIZERS = {"one": one_group, "two": two_groups, "adam": adam_groups}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def rows_of_data(rows=20):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def used(optimizer):
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]


class Watched(Trainer):
    """Notes the rates at the moment of each optimizer step, and makes the gradient of chosen updates infinite."""

    poisoned = frozenset()
    loss_too = False

    def update(self, window):
        self.calls = getattr(self, "calls", -1) + 1
        return super().update(window)

    def training_step(self, batch):
        loss = self.loss(self.model(batch[0]), batch[1])
        if self.calls in self.poisoned:
            weight = self.model[1].weight
            nothing = torch.sqrt((weight - weight.detach()).sum())  # 0, with an infinite slope
            return loss + (nothing / nothing if self.loss_too else nothing)
        return loss

    def apply_gradients(self):
        self.seen = [*getattr(self, "seen", []), used(self.optimizer)]
        return super().apply_gradients()


def run(schedule, *, optimizer=one_group, cls=Watched, poisoned=(), loader=None, **settings):
    """Five epochs, and (rates used at each try, updates reported, result)."""
    ends = {name: settings.pop(name) for name in ("epochs", "max_updates", "resume", "val") if name in settings}
    model, reported = network(), Records()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(OneCycle|Cyclic)\(max_lr=")  # one rate for several groups, as torch has it
        trainer = cls(
            model,
            optimizer(model),
            nn.CrossEntropyLoss(),
            schedule=schedule,
            observers=[reported],
            console=False,
            **settings,
        )
    trainer.poisoned = frozenset(poisoned)
    train = batches(rows_of_data(), 3) if loader is None else loader
    result = trainer.fit(train, **(ends or {"epochs": 5}))
    return trainer, reported.updates, result


def by_hand(scheduler, total, *, optimizer=one_group, steps=1):
    """The rates of a plain loop; `steps`: updates per step of the scheduler."""
    hand = optimizer(network())
    made = scheduler(hand, total)
    rows = []
    for update in range(1, total + 1):
        rows.append(used(hand))
        hand.step()
        if update % steps == 0:
            made.step()
    return rows


def warmed(optimizer, updates, scheduler):
    warmup = torchs.LinearLR(optimizer, start_factor=1 / (updates + 1), total_iters=updates)
    return torchs.SequentialLR(optimizer, [warmup, scheduler], milestones=[updates])


def half_cosine(optimizer, total):
    return torchs.CosineAnnealingLR(optimizer, total)


CASES = {
    "one cycle": (OneCycle(0.7), lambda o, n: torchs.OneCycleLR(o, 0.7, total_steps=n)),
    "step": (StepLR(Updates(3), gamma=0.3), lambda o, n: torchs.StepLR(o, 3, gamma=0.3)),
    "milestones": (MultiStep([Updates(2), Updates(5)]), lambda o, n: torchs.MultiStepLR(o, [2, 5])),
    "exponential": (Exponential(0.9, every=Updates(1)), lambda o, n: torchs.ExponentialLR(o, 0.9)),
    "linear": (Linear(), lambda o, n: torchs.LinearLR(o, 1.0, 0.0, total_iters=n)),
    "cosine": (Cosine(), torchs.CosineAnnealingLR),
    "cosine, warmup": (Cosine(warmup=Updates(3)), lambda o, n: warmed(o, 3, torchs.CosineAnnealingLR(o, n - 3))),
    "cyclic": (Cyclic(0.01, 0.2, step_size_up=Updates(4)), lambda o, n: torchs.CyclicLR(o, 0.01, 0.2, step_size_up=4)),
    "function": (
        lambda update, total: 1 - update / total,
        lambda o, n: torchs.LambdaLR(o, lambda update: 1 - update / n),
    ),
    "torch": (
        TorchSchedule(half_cosine),
        torchs.CosineAnnealingLR,
    ),
}
