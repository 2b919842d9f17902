"""What `optimizer=`, `clip=` and `schedule=` are made into: one of each, or one for every name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from trainwright.core.device import place_state
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import did_you_mean
from trainwright.core.trees import parameters_in
from trainwright.update.owner import Owner

T = TypeVar("T")
ONLY = "optimizer"
"""The name of an optimizer that was given without one."""
CLEARED = "a new optimizer clears it"
HINTED = 1000
"""Updates of a run below which nothing is said of what could be faster."""


def make_optimizers(optimizer: Any, model: nn.Module, *, fuses: bool = True) -> dict[str, Optimizer]:
    """Take Optimizers as they are; call a torch class or a partial with named parameters, a function with the model.

    With `fuses`, a class or a partial is asked for torch's fused kernels, where they serve all of the parameters. A
    dict gives several by name; a class or a partial in it gets the parameters of the submodule of that name. Without a
    name the only one is called "optimizer"; None gives an empty dict.
    """
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Mapping):
        return {ONLY: _make(optimizer, model, "optimizer=", root=model, fuses=fuses)}
    if not optimizer:
        raise SettingError(message("optimizer={} names no optimizer", fix="optimizer=None, for a trainer without one"))
    made = {}
    for name, one in optimizer.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SettingError(message(f"optimizer={{{name!r}: ...}}", want="a name that is an identifier", fix='"G"'))
        inner = getattr(model, name, None)
        root = inner if isinstance(inner, nn.Module) else None
        made[name] = _make(one, model, f"optimizer[{name!r}]=", root=root, fuses=fuses)
    if len({id(one) for one in made.values()}) < len(made):
        raise SettingError(message("optimizer={...} holds one optimizer under two names", want="one for each name"))
    return made


def by_name(
    setting: Any, check: Callable[[Any], T], *, what: str, optimizers: Mapping[str, Optimizer]
) -> T | dict[str, T] | None:
    """Check `clip=` or `schedule=`: one for a single optimizer, a dict of the same names for several."""
    if setting is None:
        return None
    names = [] if ONLY in optimizers and len(optimizers) == 1 else list(optimizers)
    if not names:
        if isinstance(setting, Mapping):
            fix = f"{what}={next(iter(setting.values()), '...')!r}"
            raise SettingError(message(f"{what}={setting!r} for one optimizer without a name", fix=fix))
        return check(setting)
    if not isinstance(setting, Mapping):
        fix = f"{what}={{" + ", ".join(f"{name!r}: {setting!r}" for name in names) + "}"
        raise SettingError(message(f"{what}={setting!r}, and there are several optimizers: which is meant?", fix=fix))
    if unknown := [name for name in setting if name not in optimizers]:
        hint = did_you_mean(str(unknown[0]), names)
        raise SettingError(
            message(f"{what}={{{unknown[0]!r}: ...}}: no optimizer has this name.{hint}", want=f"one of {names}")
        )
    return {name: check(one) for name, one in setting.items() if one is not None}


def fused_hint(owner: Owner, updates: int | None) -> list[str]:
    """Say of optimizers that were given as they are that fused ones are faster, where a run is long enough for it."""
    from trainwright.optim.optimizers import could_be_fused

    if not owner.fast.defaults or (updates is not None and updates < HINTED):
        return []
    names = {type(one).__name__: None for one in owner.optimizers.values() if could_be_fused(one)}
    return [f"{name}(..., fused=True) would make the same updates faster" for name in names]


def check_parameters(owner: Owner) -> None:
    """Refuse a trainable parameter in no optimizer, an optimizer of another model, and one whose kernel is wrong."""
    trained = {id(p) for p in parameters_in(*owner.optimizers.values())}
    roots = {"model": owner.model, "loss": owner.loss}
    trainable = {
        f"{root}.{name}": parameter
        for root, module in roots.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    left_out = [name for name, p in trainable.items() if id(p) not in trained]
    if left_out or not trainable:
        raise _nothing_trains(left_out, len(trainable))
    for optimizer in owner.optimizers.values():
        _check_kernel(optimizer)


def has_scheduler(optimizer: Any) -> bool:
    """Whether a scheduler of torch's was built on this optimizer: it leaves a wrapper around `step`, for good."""
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")


def check_schedulers(owner: Owner) -> None:
    """Refuse `schedule=` for an optimizer that a scheduler of torch's was built on: both would set its rate."""
    schedules = (
        owner.schedule if isinstance(owner.schedule, Mapping) else dict.fromkeys(owner.optimizers, owner.schedule)
    )
    for name, schedule in schedules.items():
        if schedule is not None and has_scheduler(owner.optimizers[name]):
            which = "" if name == ONLY else f" {name!r}"
            raise SettingError(
                message(
                    f"schedule= beside a torch scheduler that was built on the optimizer{which}: which sets the rate?",
                    want=f"one of them; a scheduler that is deleted leaves its mark: {CLEARED}",
                    fix='schedule=TorchSchedule(lambda optimizer: StepLR(optimizer, 30), unit="epoch"), '
                    "and no scheduler of your own",
                )
            )


def check_saved_schedulers(owner: Owner, parts: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
    """Refuse checkpoints without the state of a torch scheduler that the user steps: a resume would start it anew.

    `parts`: what `parts()` adds of the user's own; `trees`: its states, and the user's `state`.
    """
    marked = sum(map(has_scheduler, owner.optimizers.values()))
    if not marked:
        return
    from torch.optim.lr_scheduler import LRScheduler

    whole = sum(isinstance(part, LRScheduler) for part in parts.values())
    if max(whole, _scheduler_states(trees)) < marked:
        raise SettingError(
            message(
                "a torch scheduler was built on the optimizer, and no checkpoint would hold its state",
                want=f"its state in parts() or in self.state; a scheduler that is deleted leaves its mark: {CLEARED}",
                fix='def parts(self): return {**super().parts(), "scheduler": self.scheduler}',
            )
        )


def _scheduler_states(tree: Any) -> int:
    """How many states of torch's schedulers are in a tree; those inside of one (`SequentialLR`) are part of it."""
    if isinstance(tree, Mapping):
        if "_last_lr" in tree:
            return 1
        tree = list(tree.values())
    return sum(map(_scheduler_states, tree)) if isinstance(tree, list | tuple) else 0


def unfuse_spoiled(owner: Owner) -> list[str]:
    """Switch off a fused kernel that a checkpoint has switched on, and that is wrong here; what to say about it."""
    from trainwright.optim.fused import spoiled

    said = []
    for optimizer in owner.optimizers.values():
        dtype = spoiled(optimizer)
        if dtype is not None:
            for group in optimizer.param_groups:
                group["fused"] = False
            kind, name = str(dtype).removeprefix("torch."), type(optimizer).__name__
            said.append(
                f"resumed: fused=True of {name} is the checkpoint's, False is used: here it is wrong for {kind}"
            )
    return said


def _make(optimizer: Any, model: nn.Module, what: str, *, root: nn.Module | None, fuses: bool) -> Optimizer:
    """One optimizer; `root` is the module whose parameters a torch class is called with."""
    if isinstance(optimizer, Optimizer):
        place_state(optimizer)
        return optimizer
    from trainwright.optim.optimizers import Factory, adamw, fused_for, muon, sgd

    made: Any = None
    target = optimizer.func if isinstance(optimizer, partial) else optimizer
    grouped = isinstance(optimizer, Factory)
    if grouped or (inspect.isclass(target) and issubclass(target, Optimizer)):
        name = f"{optimizer.name}(...)" if grouped else target.__name__
        if root is None:
            what = f"{what}{name}: whose parameters does it train? The model has no submodule of this name"
            raise SettingError(message(what, fix="lambda model: torch.optim.AdamW(model.part.parameters(), lr=1e-3)"))
        given: Any = root if grouped else list(root.named_parameters())  # frozen ones too: they may be set free later
        made = optimizer(given, **({} if grouped or not fuses else fused_for(optimizer, root)))
    elif target in (adamw, sgd, muon):
        fix = f"{what}{target.__name__}(lr=1e-3)"
        raise SettingError(message(f"{what}{target.__name__}, and not what it returns", want="its settings", fix=fix))
    elif callable(optimizer) and not inspect.isclass(target):
        made = optimizer(model)
    if isinstance(made, Optimizer):
        return made
    raise TypeError(
        message(
            f"{what}{optimizer!r}" + ("" if made is None else f" gave a {type(made).__name__}"),
            want="an Optimizer, a torch class or a partial of one, or a function model -> Optimizer",
            fix="torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    )


def _check_kernel(optimizer: Optimizer) -> None:
    from trainwright.optim.fused import spoiled

    dtype = spoiled(optimizer)
    if dtype is None:
        return
    kind, name = str(dtype).removeprefix("torch."), type(optimizer).__name__
    raise SettingError(
        message(
            f"{name}(..., fused=True) with {kind} parameters on the CPU: this kernel leaves most of them untrained",
            want="another way to make the step (https://github.com/pytorch/pytorch/issues/191763)",
            fix=f"{name}(..., fused=False)",
        )
    )


def _nothing_trains(left_out: list[str], trainable: int) -> SettingError:
    if not trainable:
        what, have = "nothing in the model requires a gradient: there is nothing to train", ""
        want, fix = "parameters that are trained", "parameter.requires_grad_(True), or evaluate() alone"
    elif len(left_out) == trainable:
        what, have = "the optimizer trains no parameter of this model", ""
        want = "an optimizer over model.parameters() of the model that is given"
        fix = "build the optimizer from the same model object"
    else:
        what, have = f"{len(left_out)} trainable parameters are in no optimizer", ", ".join(left_out[:5])
        want = "every parameter that requires a gradient in the optimizer"
        fix = "add them to the optimizer, or parameter.requires_grad_(False)"
    return SettingError(message(what, have=have, want=want, fix=fix))
