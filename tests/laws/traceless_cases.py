"""A trainer that uses everything and looks at itself anywhere, and what a run of it comes to: for the Traceless law."""

from __future__ import annotations

import copy
import random
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from trainwright import (
    EMA,
    SWA,
    Cosine,
    MixedPrecision,
    Observer,
    Probe,
    StepOutput,
    Trainer,
    Updates,
    accuracy,
    batches,
)

from .guest_cases import generators, rows_of_data, seed_all


class Merging(nn.Linear):
    """A linear layer with a low-rank addition that is merged into its weight in eval mode, as LoRA's is."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight.add_(self.up @ self.down, alpha=-0.1 if mode else 0.1)
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + 0.1 * x @ self.down.t() @ self.up.t()


class Rich(nn.Module):
    """Dropout, a training BatchNorm and one in eval mode, merged weights, a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = Merging(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.still = nn.BatchNorm1d(8)
        self.twice = nn.Linear(8, 8)
        self.noise = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.still(self.twice(torch.relu(self.norm(self.first(x)))))
        return self.last(self.noise(self.twice(torch.relu(hidden))))


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: Defazio et al. 2024, arXiv 2405.15682, equations 3 to 5, by the in-place form of section 4.

    In train mode a parameter holds y = (1 - beta) z + beta x, at which gradients are taken; in eval mode x, the mean
    of all z.
    """

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "train": True, "k": 0})

    @torch.no_grad()
    def _turn(self, mode):
        for group in self.param_groups:
            if group["train"] != mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"] if mode else 1 - 1 / group["beta"])
            group["train"] = mode

    def train(self):
        self._turn(True)

    def eval(self):
        self._turn(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train"]
            lr, beta, weight = group["lr"], group["beta"], 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, weight).add_(p.grad, alpha=lr * (beta * (1 - weight) - 1))
                    z.sub_(p.grad, alpha=lr)
            group["k"] += 1


class Tells(Dataset):
    """Rows with noise that depends on the epoch they were set to."""

    def __init__(self, rows=14):
        self.x, self.y = rows_of_data(rows)
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.01 * self.epoch + 0.1 * torch.rand(6), self.y[index]


class Rows(Observer):
    def __init__(self):
        self.updates = []

    def on_update(self, update):
        self.updates.append((update.update, update.loss, update.lrs, update.grad_norm, update.skipped, update.values))


class Looks(Trainer):
    """Looks at itself in the place that it is given, in every update; each of its steps leaves a trace of its own."""

    place = ""
    look = None

    def at(self, place):
        if place == self.place and torch.is_grad_enabled():
            self.look()

    def training_step(self, batch):
        x, y = batch
        if not torch.is_grad_enabled():  # estimating the statistics of averaged weights
            return F.cross_entropy(self.model(x), y)
        self.scales.append(None if self._run.scaler is None else self._run.scaler.value)
        self.modes.append([module.training for module in self.model.modules()])
        self.order.append(x.sum().item())
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["mean"] = 0.9 * self.state.get("mean", torch.zeros(6)) + x.mean(0)
        self.at("before the loss")
        x = x + 0.1 * torch.randn_like(x) * random.random() * np.random.rand()
        with torch.no_grad():
            taught = self.frozen["teacher"](x)
        output = self.model(x)
        self.at("before the last forward")
        loss = F.cross_entropy(self.model(x) + output, y) + 0.1 * F.mse_loss(output, taught)
        self.log("logged", loss)
        self.at("after the loss")
        return StepOutput(loss, output, y)

    def validation_step(self, batch):
        """Draws, changes the state, moves statistics and gradients, as code that does not know better."""
        x, y = batch
        random.random(), np.random.rand(), torch.rand(3)
        self.state["steps"] = -1
        self.state.setdefault("mean", torch.zeros(6)).zero_()
        self.log("seen", 1.0)
        with torch.enable_grad():
            F.cross_entropy(self.model(x), y).backward()
        self.model.first.requires_grad_(False)
        self.model.norm.train()
        output = self.model(x)
        return StepOutput(F.cross_entropy(output, y), output, y)

    def predict_step(self, batch):
        random.random(), np.random.rand(), torch.rand(3)
        self.state["mean"] = 0
        return super().predict_step(batch)

    def begin_epoch(self, epoch):
        self.at("begin_epoch")

    def end_epoch(self, metrics):
        self.at("end_epoch")

    def after_update(self):
        self.at("after_update")

    def update(self, window):
        loss = self.compute_gradients(window)
        self.at("between gradients and step")
        self.apply_gradients()
        return loss


PLACES = (
    *("begin_epoch", "before the loss", "before the last forward", "after the loss"),
    *("between gradients and step", "after_update", "end_epoch", "probe"),
)


def own_generator(seed=4):
    return torch.Generator().manual_seed(seed)


def foreign(**settings):
    return DataLoader(Tells(), 4, shuffle=True, generator=own_generator(), **settings)


SETTINGS = {
    "accumulate": {"accumulate": 2, "metrics": {"accuracy": accuracy}},
    "EMA": {"average": EMA(0.9)},
    "SWA": {"average": SWA(Updates(2), Updates(2)), "accumulate": 2},
    "schedule-free": {"optimizer": ScheduleFree, "schedule": None},
    "bf16, EMA": {"precision": "bf16", "average": EMA(0.9), "accumulate": 2},
    "bf16, SWA": {"precision": "bf16", "average": SWA(Updates(1), Updates(1))},
    "bf16, schedule-free": {"precision": "bf16", "optimizer": ScheduleFree, "schedule": None},
    "fp16": {"precision": MixedPrecision("fp16", init_scale=2.0**18, growth_interval=3), "accumulate": 2},
    "skip": {"on_nonfinite": "skip", "accumulate": 2, "clip": 0.5},
}


def look_everywhere(trainer, train):
    """Everything that leaves no trace, on the training data too."""
    held_out = DataLoader(Tells(6), 4, shuffle=True)
    trainer.evaluate(held_out)
    trainer.evaluate(train)
    trainer.predict(train)
    trainer.report(held_out)
    trainer.plan(lambda epoch: torch.rand(3).tolist() and held_out, train, epochs=3)


def run_of(settings, *, place="", look=look_everywhere, data=foreign, validates=None, epochs=2):
    """All that a run comes to, with a look at itself in one place or none."""
    chosen = {"schedule": Cosine(), "optimizer": torch.optim.AdamW, **SETTINGS[settings]}
    torch.manual_seed(5)
    model, teacher = Rich(), nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    model.still.eval()
    optimizer = chosen.pop("optimizer")(model.parameters(), lr=0.01)
    reported, train = Rows(), data()
    probe = Probe(lambda trainer: look(trainer, train) if place == "probe" else None, every=Updates(1))
    trainer = Looks(model, optimizer, frozen={"teacher": teacher}, console=False, observers=[reported, probe], **chosen)
    trainer.place, trainer.look = place, lambda: look(trainer, train)
    trainer.modes, trainer.order, trainer.scales = [], [], []
    seed_all()
    val, validate = (None, {}) if validates is None else validates(train)
    trainer.fit(train, val, epochs=epochs, **validate)
    history = [{k: v for k, v in row.items() if not k.startswith("val_")} for row in trainer.history if whole(row)]
    return copy.deepcopy(
        {
            "order": trainer.order,
            "modes": trainer.modes,
            "updates": reported.updates,
            "history": history,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "generators": generators(),
            "own generator": [one.get_state() for one in (getattr(train, "generator", None),) if one is not None],
            "state": trainer.state,
            "trainable": [p.requires_grad for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "teacher": (teacher.state_dict(), [module.training for module in teacher.modules()]),
            "counters": {k: v for k, v in trainer._counters.state_dict().items() if k not in ("seconds", "validated")},
            "scales": trainer.scales,
        }
    )


def whole(row):
    """Whether a row is that of a finished epoch, which runs have without validations too."""
    return row["epoch"] > 0 and "loss" in row


@cache
def undisturbed(settings, data=foreign):
    return run_of(settings, data=data)


def ours():
    return batches(Tells(), 4, shuffle=True)


def listed():
    return list(DataLoader(Tells(), 4))
