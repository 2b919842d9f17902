"""Checks the arguments of a Trainer when it is built, and moves its modules to the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.device import choose_device, devices_of, place, refuse_meta
from trainwright.core.errors import SettingError, message, not_built
from trainwright.distributed.mesh import Parallel, checked_parallel
from trainwright.distributed.world import World
from trainwright.metrics.metric_set import MetricSet, check_metrics
from trainwright.modules.dtensors import is_sharded
from trainwright.optim.clip import ClipNorm, ClipValue
from trainwright.optim.named import ONLY
from trainwright.precision.mixed_precision import MixedPrecision
from trainwright.protocols import EVENTS, Observer, Schedule
from trainwright.update.trainer_like import Hooks, TrainerLike, check_arguments, overridden, read_hooks

if TYPE_CHECKING:
    from trainwright.acceleration.fast import Fast

T = TypeVar("T")


def checked_fast(setting: Any) -> Fast:
    """Check `fast=`; None is `Fast()`."""
    from trainwright.acceleration.fast import as_fast

    return as_fast(setting)


def bound_hooks(trainer: Any, own: set[str]) -> Hooks:
    """Return the hooks of a trainer, and the function that moves batches. `own`: the overridden hooks."""
    device = trainer.device.type
    if "to_device" in own or device not in ("cpu", "cuda"):
        return read_hooks(trainer, own, move=trainer.to_device)
    if device == "cuda":
        from trainwright.acceleration.transfer import Moving

        moving = Moving(trainer.device)
        return read_hooks(trainer, own, move=moving, free=moving.free)
    return read_hooks(trainer, own, move=None)


def checked_model(model: Any) -> nn.Module:
    """Raise TypeError for a model that is not a module."""
    if isinstance(model, nn.Module):
        return model
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    raise TypeError(message(f"Trainer(model): {kind}", want="a torch.nn.Module", fix="Trainer(Model(), ...)"))


def checked_loss(loss: Any) -> Callable[..., Any] | None:
    """Refuse a loss that cannot be called on (output, target)."""
    if loss is None or (callable(loss) and not isinstance(loss, type)):
        return loss
    if isinstance(loss, Optimizer):
        what = f"Trainer(model, loss, {type(loss).__name__}(...)): the optimizer was given as the loss"
        raise TypeError(message(what, want="the optimizer before the loss", fix="Trainer(model, optimizer, loss)"))
    raise TypeError(
        message(
            f"loss={loss!r}",
            want="a function of (output, target), or a loss module",
            fix=f"loss={loss.__name__}()" if isinstance(loss, type) else "loss=nn.CrossEntropyLoss()",
        )
    )


def checked_on_error(on_error: Any, checkpoint: Any) -> str | None:
    """Check `on_error=`: "save" needs a checkpoint slot."""
    if on_error not in (None, "save"):
        raise SettingError(f"on_error={on_error!r}", want='None, or "save"', fix='on_error="save"')
    if on_error and checkpoint is None:
        what = 'on_error="save" without a checkpoint slot'
        raise SettingError(what, fix='Trainer(..., checkpoint=Checkpoint("runs/1"), on_error="save")')
    return "save" if on_error else None


def checked_on_oom(on_oom: Any, world: World, *, own: Collection[str]) -> str | None:
    """Check `on_oom=`: "split" needs one process and the default `update`. `own`: the overridden hooks.

    A custom update may read its window or step twice: it cannot be rolled back and repeated.
    """
    if on_oom not in (None, "split"):
        raise SettingError(f"on_oom={on_oom!r}", want='None, or "split"', fix='on_oom="split"')
    if on_oom and world.size > 1:
        what = f'on_oom="split" with {world.size} processes: one that runs out of memory leaves the others in a sum'
        want = "one process, or micro-batches that fit on each"
        raise SettingError(what, want=want, fix="accumulate=2 and half the batch size: the same rows")
    written = next((name for name in ("update", "compute_gradients") if name in own), None)
    if on_oom and written is not None:
        what = f'on_oom="split" with {written}() of your own, which may change what a second try needs'
        raise SettingError(what, fix="accumulate=2 and half the batch size: the same rows")
    return "split" if on_oom else None


def checked_schedule(value: object) -> Schedule | None:
    """Check `schedule=`."""
    if value is None:
        return None
    from trainwright.schedules.standard import as_schedule  # imported on use: torch's schedulers are slow to import

    return as_schedule(value)


def checked_metrics(metrics: Mapping[str, Any] | None, world: World) -> dict[str, Any]:
    """Check `metrics=`: names, kinds, and whether the metrics can be summed over ranks."""
    if metrics is not None and not isinstance(metrics, Mapping):
        fix = 'metrics={"accuracy": accuracy}'
        if inspect.isroutine(metrics):
            fix = f'{fix}, or metrics={{"name": over_all(fn)}} for a function fn(outputs, targets) of all rows'
        raise TypeError(message(f"metrics={metrics!r}", want="a dict of functions by name", fix=fix))
    if metrics:
        check_metrics(metrics)
        if world.size > 1:
            MetricSet(metrics).check_mergeable()
    return dict(metrics or {})


def checked_slot(name: str, value: T | None, example: str) -> T | None:
    """Refuse a value that is not of the slot's settings class."""
    if value is None or isinstance(value, _slot_classes()[name]):
        return value
    raise TypeError(message(f"{name}={value!r}", want=f"{example}, or a subclass of it", fix=f"{name}={example}"))


def _slot_classes() -> dict[str, type]:
    """Return the settings class of each slot; imported only if a slot is filled."""
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.fit.early_stopping import EarlyStopping
    from trainwright.optim.averaging import WeightAveraging

    return {"early_stopping": EarlyStopping, "checkpoint": Checkpoint, "average": WeightAveraging}


def checked_observers(observers: Collection[Observer]) -> tuple[Observer, ...]:
    """Check `observers=`: their classes, their `every`, and the arguments of their methods."""
    if isinstance(observers, Observer):
        given = f"{type(observers).__name__}(...)"
        raise TypeError(message(f"observers={given}", want="a list of observers", fix=f"observers=[{given}]"))
    for observer in observers:
        from trainwright.update.reporter import check_every  # imported on use: `import trainwright` stays cheap

        if not isinstance(observer, Observer):
            want = "objects of subclasses of Observer"
            raise TypeError(message(f"observers: {observer!r} is no Observer", want=want, fix=_in_its_place(observer)))
        check_every(observer)
        for event in sorted(overridden(type(observer), Observer, EVENTS)):
            check_arguments(observer, event)
    return tuple(observers)


def _in_its_place(given: Any) -> str:
    """Return the argument that takes a given object, such as a metric passed as an observer; empty if unknown."""
    kind = given if isinstance(given, type) else type(given)
    if isinstance(given, type):
        return f"{kind.__name__}(...)" if issubclass(kind, Observer) else ""
    slots: dict[str, Any] = _slot_classes() | {"clip": ClipNorm | ClipValue, "precision": MixedPrecision}
    slot = next((name for name, filled_by in slots.items() if isinstance(given, filled_by)), "")
    if not slot and hasattr(given, "bind"):
        slot = "schedule"
    return f"{slot}={kind.__name__}(...)" if slot else ""


def processes(
    parallel: str | Parallel | None, device: str | torch.device, model: nn.Module
) -> tuple[World, Parallel, torch.device]:
    """Return the ranks, the parallel settings, and the device of this rank."""
    settings = checked_parallel(parallel)
    chosen = choose_device(device, model)
    if chosen.type == "meta" and settings.shards:
        chosen = choose_device(device, nn.Module())  # the weights are initialized on the device of the run
    elif not settings.shards and (device == "auto" or chosen.type != "meta"):
        refuse_meta(model, "the model", want="weights; parallel=FSDP(...) alone makes them itself, shard by shard")
    world = World()
    if parallel is not None:
        from trainwright.distributed.start import as_world

        world = as_world(parallel, chosen.type)
    if world.size > 1 and type(settings) is Parallel:
        from trainwright.distributed.ddp import DDP

        settings = DDP()
    index = world.device_index
    if device == "auto" and index is not None and len(devices_of(model)) < 2:
        chosen = torch.device(chosen.type, index)
    if world.size > 1 and isinstance(model, nn.parallel.DistributedDataParallel):
        what = "a model in DistributedDataParallel already: the Trainer wraps the step, not the model"
        raise SettingError(what, want="the model itself", fix="Trainer(model.module, ...)")
    if is_sharded(*model.parameters()) and parallel is not None and not settings.shards:
        what = "the model was sharded by fully_shard already"
        raise SettingError(what, have=f"parallel={parallel!r}", fix="parallel=FSDP(blocks={Block})")
    return world, settings, chosen


def check_shards(trainer: TrainerLike) -> None:
    """Refuse settings that do not work with a sharded model; point its optimizers at the shards."""
    if not trainer.parallel.shards:
        return
    from trainwright.distributed import fsdp

    if trainer.fast.compile is not None or trainer.fast.channels_last is True:
        name = "channels_last=True" if trainer.fast.compile is None else "compile=..."
        raise not_built(f"Fast({name}) with FSDP", "DDP(), or leave it out")
    assert isinstance(trainer.parallel, fsdp.FSDP)
    fsdp.check_precision(trainer.parallel, trainer.precision)
    fsdp.check_optimizers(trainer.model, trainer.optimizers)
    fsdp.follow(trainer.model, trainer.optimizers)


def place_all(trainer: TrainerLike, *beside: Any) -> None:
    """Move the model, a loss module and frozen modules to the device, in place; a sharded model shard by shard."""
    settings: Any = trainer.parallel
    if settings.shards:
        from trainwright.distributed.fsdp import shard

        shard(trainer.model, settings, trainer.world, device=trainer.device)
    else:
        place(trainer.model, trainer.device)
        if trainer.world.size > 1 and settings.sync_batchnorm:
            from trainwright.distributed.ddp import convert_batchnorm

            convert_batchnorm(trainer.model, cast(Any, trainer.world), device=trainer.device)
    for module in beside:
        if isinstance(module, nn.Module):
            if trainer.device.type != "meta":
                refuse_meta(module, f"{type(module).__name__}, given beside the model,")
            place(module, trainer.device, beside=trainer.model)


def checked_frozen(frozen: Mapping[str, nn.Module] | None, model: nn.Module) -> dict[str, nn.Module]:
    """Check `frozen=`: modules by name that are not submodules of the model."""
    if frozen is None:
        return {}
    if not isinstance(frozen, Mapping):
        raise TypeError(message(f"frozen={type(frozen).__name__}", want="a dict", fix='frozen={"teacher": teacher}'))
    own = {id(parameter) for parameter in model.parameters()}
    for name, module in frozen.items():
        if not isinstance(module, nn.Module):
            raise TypeError(message(f"frozen[{name!r}]: a {type(module).__name__}", want="a torch.nn.Module"))
        if any(id(parameter) in own for parameter in module.parameters()):
            raise SettingError(
                f"frozen[{name!r}] shares parameters with the model",
                want="a module beside the model, such as a teacher",
                fix=f"frozen={{{name!r}: copy.deepcopy(model)}}"
                if module is model
                else "freeze(model.part), which keeps a part of the model as it is",
            )
    return dict(frozen)


def check_closures(trainer: TrainerLike) -> None:
    """Refuse an optimizer that needs a closure, such as LBFGS, with the default update."""
    if trainer._hooks.has_custom_update:
        return
    for name, optimizer in trainer.optimizers.items():
        if _needs_a_closure(optimizer):
            named = "" if name == ONLY else f"{name!r}, "
            again = "closure=lambda: self.compute_gradients(window)"
            raise SettingError(
                f"{type(optimizer).__name__}.step needs a closure, and the default update gives none",
                want="an update(self, window) of your own",
                fix=f"def update(self, window): self.apply_gradients({named}{again})",
            )


def _needs_a_closure(optimizer: Any) -> bool:
    step, given = optimizer.step, []
    if inspect.unwrap(step) is inspect.unwrap(type(optimizer).step):
        # A torch scheduler wraps the unbound `step` of the optimizer: `self` would count as a missing argument.
        step, given = type(optimizer).step, [optimizer]
    try:
        inspect.signature(step).bind(*given)
    except TypeError:
        return "closure" in inspect.signature(step).parameters
    except ValueError:  # a function in C without a signature
        pass
    return False
