"""World: whatever a step calls, and whatever is trained of the model, gradients are averaged once, and exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

from distributed.pool import pool
from trainwright import SettingError, StepError, Trainer
from trainwright.distributed.ddp import DDP, Wrapped

from .world_runs import flat, perceptron, rows_of_classes

EXACT = 1e-12
ROWS, BATCH, EPOCHS = 27, 4, 3


class Parts(nn.Module):
    """A body, a head, a head that nothing uses, and two experts, each for the rows of one sign."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*perceptron(5, 6)), nn.Linear(6, 3)
        self.spare, self.experts = nn.Linear(6, 3), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.narrow = False

    def encode(self, x: Tensor) -> Tensor:
        """A method beside forward."""
        encoded: Tensor = self.body(x).tanh()
        return encoded

    def forward(self, x: Tensor) -> Tensor:
        """Classes of rows."""
        out: Tensor = self.head(self.encode(x))
        return out

    def chosen(self, x: Tensor) -> Tensor:
        """Classes of rows by their expert; an expert without rows is not called."""
        encoded, positive = self.encode(x), x[:, 0] > 0.8
        out = encoded.new_zeros(len(x), 3)
        for expert, mine in zip(self.experts, (positive, ~positive), strict=True):
            if mine.any():
                out = out.index_put((mine,), expert(encoded[mine]))
        return out


def wide(model: Parts, x: Tensor) -> Tensor:
    """What every other part says."""
    encoded = model.encode(x)
    every: Tensor = model.spare(encoded) + model.experts[0](encoded) + model.experts[1](encoded)
    return every


STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward": lambda model, x: model(x),
    "a method": lambda model, x: model.head(model.encode(x)),
    "a submodule": lambda model, x: model.head(model.body(x)),
    "experts": lambda model, x: model.chosen(x),
    "parts by epoch": lambda model, x: model.head(model.encode(x)) + (0 if model.narrow else wide(model, x)),
}


class Stepping(Trainer[Parts]):
    """Its step calls what it likes."""

    called = "forward"
    freezes = False

    def begin_epoch(self, epoch: int) -> None:
        prepare(self.model, epoch, freezes=self.freezes)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(STEPS[self.called](self.model, batch[0]), batch[1])


def prepare(model: Parts, epoch: int, *, freezes: bool) -> None:
    """What is trained in an epoch: the body not in epoch 1 where it freezes; in epoch 1 the spare head is not used."""
    model.narrow = epoch == 1
    model.body.requires_grad_(not freezes or epoch != 1)


def start() -> tuple[Parts, torch.optim.Optimizer]:
    """Weight decay shows a parameter that has a gradient of 0 where one process has none."""
    torch.manual_seed(2)
    model = Parts().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.05)


def data() -> list[tuple[Tensor, Tensor]]:
    x, y = rows_of_classes(ROWS)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def by_trainer(called: str, accumulate: int = 1, freezes: bool = False, **settings: Any) -> dict[str, Any]:
    model, optimizer = start()
    trainer = Stepping(model, optimizer, accumulate=accumulate, parallel=DDP(**settings), console=False)
    trainer.called, trainer.freezes = called, freezes
    with counted() as counts:
        trainer.fit(data(), epochs=EPOCHS)
    gradients = [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]
    return {"weights": flat(model), "gradients": gradients} | counts


def by_hand(called: str, accumulate: int = 1, freezes: bool = False) -> dict[str, Any]:
    model, optimizer = start()
    for epoch in range(EPOCHS):
        prepare(model, epoch, freezes=freezes)
        batches = data()
        for i in range(0, len(batches), accumulate):
            x, y = map(torch.cat, zip(*batches[i : i + accumulate], strict=True))
            optimizer.zero_grad()
            F.cross_entropy(STEPS[called](model, x), y).backward()
            optimizer.step()
    return {"weights": flat(model), "none": [p.grad is None for p in model.parameters()]}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count torch's collectives: buckets that DDP reduces, sums that Python asks for, and everything else."""
    counts = {"reduced": 0, "summed": 0, "others": 0}

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and wants types, not their names
        counts["reduced"] += 1
        return allreduce_hook(group, bucket)

    def noting(name: str, what: str) -> Any:
        whole = getattr(dist, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return whole(*args, **kwargs)

        return noted

    wrap = Wrapped.__init__

    def hooked(self: Wrapped, module: nn.Module, settings: DDP, *rest: Any, **more: Any) -> None:
        wrap(self, module, settings, *rest, **more)
        if settings.compress is None:
            self.ddp.register_comm_hook(None, hook)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wrapped, "__init__", hooked)
        patch.setattr(dist, "all_reduce", noting("all_reduce", "summed"))  # what the hook calls is another one
        for name in ("broadcast", "all_gather_object", "broadcast_object_list", "all_gather", "barrier"):
            patch.setattr(dist, name, noting(name, "others"))
        yield counts


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def check(size: int, called: str, accumulate: int = 1, freezes: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """Weights and gradients of all processes are one's, also where there is none."""
    outcomes = pool(size).run(on_rank, called, accumulate, freezes, settings)
    expected = by_hand(called, accumulate, freezes)
    for outcome in outcomes:
        assert apart(outcome["weights"], expected["weights"]) <= EXACT
        assert outcome["gradients"] == outcomes[0]["gradients"]
        assert [one is None for one in outcome["gradients"]] == expected["none"]
    return outcomes


def on_rank(called: str, accumulate: int, freezes: bool, settings: dict[str, Any]) -> dict[str, Any]:
    return by_trainer(called, accumulate, freezes, **settings)


@pytest.mark.parametrize("called", ["forward", "a method", "a submodule", "experts"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_may_call_any_method_or_submodule_of_the_model(called: str, accumulate: int) -> None:
    check(3, called, accumulate, **({"find_unused_parameters": True} if called == "experts" else {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"bucket_mb": 1e-4},
        {"sync_buffers": True},
        {"same_noise": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_setting_of_ddp_gives_the_same(settings: dict[str, Any], accumulate: int) -> None:
    check(2, "forward", accumulate, **settings)


def test_layers_may_be_frozen_and_set_free_between_epochs() -> None:
    check(2, "a method", freezes=True)


@pytest.mark.parametrize("unused", ["auto", True])
def test_parameters_may_be_used_in_some_epochs_only(unused: Any) -> None:
    check(2, "parts by epoch", find_unused_parameters=unused)


class Waning(Stepping):
    """From update 4 on a part of the model is not used."""

    called = "parts by epoch"
    kept: tuple[float, ...] = ()

    def training_step(self, batch: Any) -> Any:
        self.model.narrow = self.progress.updates >= 3
        return super().training_step(batch)

    def after_update(self) -> None:
        self.kept = tuple(flat(self.model))


def wane() -> tuple[list[float], list[float]]:
    model, optimizer = start()
    trainer = Waning(model, optimizer, console=False)
    with pytest.raises(StepError, match=r"DDP\(find_unused_parameters=True\)"):
        trainer.fit(data(), epochs=1)
    assert trainer.progress.updates == 3
    return list(trainer.kept), flat(model)


def test_a_part_that_falls_out_of_use_inside_an_epoch_is_refused_before_weights_part() -> None:
    for before, after in pool(2).run(wane):
        assert before == after


def traveled(accumulate: int, batches: int) -> dict[str, float]:
    x, y = rows_of_classes(BATCH * batches)
    model = nn.Sequential(*perceptron(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), accumulate=accumulate, clip=1.0, console=False)
    with counted() as counts:
        result = trainer.fit(list(zip(x.split(BATCH), y.split(BATCH), strict=True)), epochs=1)
    return counts | {"updates": result.updates, "seconds": result.seconds}


def check_traveled(run: Any, accumulate: int) -> None:
    """The buckets are summed once per update, and nothing else is."""
    few, many = (run(traveled, accumulate, batches) for batches in (12, 52))
    for short, long in zip(few, many, strict=True):
        more = {name: long[name] - short[name] for name in long}
        assert more["updates"] == more["reduced"] == 40 / accumulate
        beside = more["summed"] - more["reduced"] + more["others"]
        assert beside <= 3 + 2 * long["seconds"]  # what all agree on, about once a second


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_travel_once_per_update_and_nothing_beside_them(accumulate: int) -> None:
    check_traveled(pool(2).run, accumulate)


def test_gradients_may_travel_in_half_precision() -> None:
    (first, second), expected = pool(2).run(on_rank, "forward", 2, False, {"compress": "fp16"}), by_hand("forward", 2)
    assert first["weights"] == second["weights"]
    assert 1e-9 < apart(first["weights"], expected["weights"]) < 2e-3


def refusal(settings: dict[str, Any], normalized: bool = False) -> str:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) if normalized else nn.Linear(5, 3)
    before = flat(model.double())
    with pytest.raises(SettingError) as refused:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(model, optimizer, nn.CrossEntropyLoss(), parallel=DDP(**settings), console=False).fit(data(), epochs=1)
    assert flat(model) == before
    return str(refused.value)


def test_what_the_backend_or_the_device_cannot_do_is_refused_before_an_update() -> None:
    for said in pool(2).run(refusal, {"compress": "bf16"}):
        assert "gloo" in said and 'DDP(compress="fp16")' in said
    for said in pool(2).run(refusal, {"sync_batchnorm": True}, True):
        assert "SyncBatchNorm" in said and "cpu" in said
