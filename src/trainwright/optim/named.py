"""Makes optimizers from `optimizer=` and checks `clip=` and `schedule=`: single values or dicts by optimizer name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.errors import SettingError, message, warn_user
from trainwright.core.suggestions import did_you_mean
from trainwright.core.torch_private import is_wrapped_by_scheduler
from trainwright.core.trees import parameters_in

T = TypeVar("T")
ONLY = "optimizer"
"""The name of an optimizer that was given without a name."""
CLEARED = "a new optimizer clears it"
LONG_RUN = 1000
"""The fewest updates of a run whose header suggests a fused optimizer."""


def make_optimizers(optimizer: Any, model: nn.Module, *, fuses: bool = True) -> dict[str, Optimizer]:
    """Return optimizers by name, made from an Optimizer, a torch class or a partial of one, or a function of the model.

    A class or partial is called with named parameters; in a dict, with those of the submodule of that name. With
    `fuses` it uses torch's fused kernels if these support all parameters. An optimizer without a name is named
    "optimizer". None gives an empty dict.
    """
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Mapping):
        return {ONLY: _make(optimizer, model, "optimizer=", root=model, fuses=fuses)}
    if not optimizer:
        raise SettingError("optimizer={} names no optimizer", fix="optimizer=None, for a trainer without one")
    made = {}
    for name, given in optimizer.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SettingError(f"optimizer={{{name!r}: ...}}", want="a name that is an identifier", fix='"G"')
        inner = getattr(model, name, None)
        root = inner if isinstance(inner, nn.Module) else None
        made[name] = _make(given, model, f"optimizer[{name!r}]=", root=root, fuses=fuses)
    if len({id(given) for given in made.values()}) < len(made):
        raise SettingError("optimizer={...} holds one optimizer under two names", want="one for each name")
    return made


def by_name(
    setting: Any, check: Callable[[Any], T], *, slot: str, optimizers: Mapping[str, Optimizer]
) -> T | dict[str, T] | None:
    """Return `clip=` or `schedule=` after `check`: one value for a single optimizer, a dict by name for several."""
    if setting is None:
        return None
    names = [] if ONLY in optimizers and len(optimizers) == 1 else list(optimizers)
    if not names:
        if isinstance(setting, Mapping):
            fix = f"{slot}={next(iter(setting.values()), '...')!r}"
            raise SettingError(f"{slot}={setting!r} for one optimizer without a name", fix=fix)
        return check(setting)
    if not isinstance(setting, Mapping):
        fix = f"{slot}={{" + ", ".join(f"{name!r}: {setting!r}" for name in names) + "}"
        raise SettingError(f"{slot}={setting!r}, and there are several optimizers: which is meant?", fix=fix)
    if unknown := [name for name in setting if name not in optimizers]:
        hint = did_you_mean(str(unknown[0]), names)
        raise SettingError(f"{slot}={{{unknown[0]!r}: ...}}: no optimizer has this name.{hint}", want=f"one of {names}")
    return {name: check(value) for name, value in setting.items() if value is not None}


def fused_hint(optimizers: Mapping[str, Optimizer], updates: int | None) -> list[str]:
    """Return a line for each optimizer class that would be faster with `fused=True`; none for a short run."""
    from trainwright.optim.optimizers import could_be_fused

    if updates is not None and updates < LONG_RUN:
        return []
    names = {type(optimizer).__name__: None for optimizer in optimizers.values() if could_be_fused(optimizer)}
    return [f"{name}(..., fused=True) would make the same updates faster" for name in names]


def check_parameters(model: nn.Module, loss: Any, optimizers: Mapping[str, Optimizer]) -> None:
    """Raise SettingError if a trainable parameter is in no optimizer, or an optimizer belongs to another model."""
    trained = {id(p) for p in parameters_in(*optimizers.values())}
    modules = {"model": model} | ({"loss": loss} if isinstance(loss, nn.Module) else {})
    named = [(f"{root}.{name}", p) for root, module in modules.items() for name, p in module.named_parameters()]
    trainable = [(name, p) for name, p in named if p.requires_grad]
    left_out = [name for name, p in trainable if id(p) not in trained]
    if left_out or not trainable:
        raise _nothing_trains(left_out, len(trainable))


def check_kernels(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise SettingError for a fused optimizer whose kernel computes wrong updates for its parameters."""
    for optimizer, dtype in _wrong_kernels(optimizers):
        name = type(optimizer).__name__
        raise SettingError(
            f"{name}(..., fused=True) with {dtype} parameters on the CPU: this kernel leaves most of them untrained",
            want="another way to make the step (https://github.com/pytorch/pytorch/issues/191763)",
            fix=f"{name}(..., fused=False)",
        )


def disable_wrong_kernels(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Set `fused=False` where a checkpoint has set it and the kernel is wrong here; return a line for each."""
    return [_disabled(optimizer, dtype) for optimizer, dtype in _wrong_kernels(optimizers)]


def _wrong_kernels(optimizers: Mapping[str, Optimizer]) -> list[tuple[Optimizer, str]]:
    from trainwright.optim.fused import broken_dtype

    dtypes = [(optimizer, broken_dtype(optimizer)) for optimizer in optimizers.values()]
    return [(optimizer, str(dtype).removeprefix("torch.")) for optimizer, dtype in dtypes if dtype is not None]


def _disabled(optimizer: Optimizer, dtype: str) -> str:
    for group in optimizer.param_groups:
        group["fused"] = False
    name = type(optimizer).__name__
    return f"resumed: fused=True of {name} is the checkpoint's, False is used: here it is wrong for {dtype}"


def has_scheduler(optimizer: Any) -> bool:
    """Return whether a torch scheduler was built on this optimizer: schedulers wrap `step` permanently."""
    return is_wrapped_by_scheduler(optimizer.step)


def check_schedulers(schedule: Any, optimizers: Mapping[str, Optimizer]) -> None:
    """Raise SettingError for `schedule=` on an optimizer with a torch scheduler: both would set its learning rate."""
    schedules = schedule if isinstance(schedule, Mapping) else dict.fromkeys(optimizers, schedule)
    for name, given in schedules.items():
        if given is not None and has_scheduler(optimizers[name]):
            which = "" if name == ONLY else f" {name!r}"
            raise SettingError(
                f"schedule= beside a torch scheduler that was built on the optimizer{which}: which sets the rate?",
                want=f"one of them; a scheduler that is deleted leaves its mark: {CLEARED}",
                fix='schedule=TorchSchedule(lambda optimizer: StepLR(optimizer, 30), unit="epoch"), '
                "and no scheduler of your own",
            )


def warn_of_one_rate(schedule: Any, optimizers: Mapping[str, Optimizer]) -> None:
    """Warn of one `max_lr` of `OneCycle` or `Cyclic` for groups with different rates: torch replaces these."""
    schedules = schedule if isinstance(schedule, Mapping) else dict.fromkeys(optimizers, schedule)
    for name, given in schedules.items():
        rates = [f"{float(group['lr']):g}" for group in optimizers[name].param_groups]
        max_lr = getattr(given, "max_lr", None) if type(given).__module__.startswith("trainwright.") else None
        if isinstance(max_lr, int | float) and len(set(rates)) > 1:
            once, each = f"{type(given).__name__}(max_lr={max_lr:g})", ", ".join(rates)
            warn_user(f"{once} replaces the rates of all groups, {each}: max_lr=[{each}] keeps one for each")


def check_saved_schedulers(
    optimizers: Mapping[str, Optimizer], parts: Mapping[str, Any], trees: Mapping[str, Any]
) -> None:
    """Raise SettingError if checkpoints would lack the state of a user's torch scheduler: a resume would reset it.

    `parts`: the parts that the user's `parts()` adds. `trees`: their states, and the user's `state`.
    """
    from torch.optim.lr_scheduler import LRScheduler

    saved = sum(isinstance(part, LRScheduler) for part in parts.values())
    if max(saved, _scheduler_states(trees)) < sum(map(has_scheduler, optimizers.values())):
        raise SettingError(
            "a torch scheduler was built on the optimizer, and no checkpoint would hold its state",
            want=f"its state in parts() or in self.state; a scheduler that is deleted leaves its mark: {CLEARED}",
            fix='def parts(self): return {**super().parts(), "scheduler": self.scheduler}',
        )


def place_state(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters, by `load_state_dict`."""
    state = [(p, value) for p, values in optimizer.state.items() for value in values.values()]
    if any(isinstance(v, Tensor) and v.dim() and v.device != p.device for p, v in state):
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        keep_dtypes(optimizer, saved)


def keep_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the saved dtypes of optimizer state that was just loaded, for weights with unchanged dtypes.

    Torch casts all state to the dtype of the weights, such as NAdam's `mu_product` and float32 moments of bfloat16
    weights.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return  # an overridden method handles dtypes itself
    parameters = parameters_in(optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if key != "step" and type(now) is type(value) is Tensor and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.detach().to(now.device, copy=True)


def _scheduler_states(tree: Any) -> int:
    """Return the number of torch scheduler states in a tree; nested ones (`SequentialLR`) are not counted."""
    if isinstance(tree, Mapping):
        if "_last_lr" in tree:
            return 1
        tree = list(tree.values())
    return sum(map(_scheduler_states, tree)) if isinstance(tree, list | tuple) else 0


def _make(optimizer: Any, model: nn.Module, written: str, *, root: nn.Module | None, fuses: bool) -> Optimizer:
    """Make one optimizer. `written`: the setting as code. `root`: the module whose parameters a torch class gets."""
    if isinstance(optimizer, Optimizer):
        place_state(optimizer)
        return optimizer
    from trainwright.optim.optimizers import OptimizerFactory, adamw, fused_for, muon, sgd

    made: Any = None
    target = optimizer.func if isinstance(optimizer, partial) else optimizer
    grouped = isinstance(optimizer, OptimizerFactory)
    if grouped or (inspect.isclass(target) and issubclass(target, Optimizer)):
        name = f"{optimizer.name}(...)" if grouped else target.__name__
        if root is None:
            what = f"{written}{name}: whose parameters does it train? The model has no submodule of this name"
            raise SettingError(what, fix="lambda model: torch.optim.AdamW(model.part.parameters(), lr=1e-3)")
        given: Any = root if grouped else list(root.named_parameters())  # frozen ones too: they may be unfrozen later
        made = optimizer(given, **({} if grouped or not fuses else fused_for(optimizer, root)))
    elif target in (adamw, sgd, muon):
        fix = f"{written}{target.__name__}(lr=1e-3)"
        raise SettingError(f"{written}{target.__name__}, and not its result", want="its settings", fix=fix)
    elif callable(optimizer) and not inspect.isclass(target):
        made = optimizer(model)
    if isinstance(made, Optimizer):
        return made
    raise TypeError(
        message(
            f"{written}{optimizer!r}" + ("" if made is None else f" gave a {type(made).__name__}"),
            want="an Optimizer, a torch class or a partial of one, or a function model -> Optimizer",
            fix="torch.optim.AdamW(model.parameters(), lr=1e-3)",
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
        fix = "an optimizer over model.parameters(), or parameter.requires_grad_(False)"
    return SettingError(what, have=have, want=want, fix=fix)
