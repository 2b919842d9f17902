"""Check the arguments of a Trainer when it is built, and open the data of a `fit` or of an evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.core.device import choose_device, devices_of, place, refuse_meta
from trainwright.core.errors import SettingError, TrainwrightError, message, not_built
from trainwright.core.progress import Counters
from trainwright.core.records import Result
from trainwright.data.row_batches import Batches
from trainwright.data.source import Source
from trainwright.data.sources import is_function, is_together, open_source, takes_batch_size
from trainwright.distributed.ddp import DDP, in_sync
from trainwright.distributed.world import World
from trainwright.fit.plan import Ends
from trainwright.fit.record import StageRecord
from trainwright.metrics.metric_set import MetricSet, check_metrics
from trainwright.modules.dtensors import is_sharded
from trainwright.optim.clip import ClipNorm, ClipValue
from trainwright.optim.named import ONLY, check_schedulers
from trainwright.precision.mixed_precision import MixedPrecision
from trainwright.protocols import EVENTS, Observer, Schedule
from trainwright.update.hooks import Hooks, check_arguments, overridden, read_hooks
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.owner import Owner

if TYPE_CHECKING:
    from trainwright.acceleration.fast import Fast
    from trainwright.distributed.fsdp import FSDP

T = TypeVar("T")


def checked_fast(setting: Any) -> Fast:
    """Check `fast=`; None is `Fast()`."""
    from trainwright.acceleration.fast import as_fast

    return as_fast(setting)


def bound_hooks(trainer: Any, own: set[str]) -> Hooks:
    """Bind the hooks of a trainer whose class defines `own` of them, and the function that moves batches."""
    device, move = trainer.device.type, None
    if "to_device" in own or device not in ("cpu", "cuda"):
        move = trainer.to_device
    elif device == "cuda":
        from trainwright.acceleration.transfer import Moving

        move = Moving(trainer.device)
    return read_hooks(trainer, own, move=move)


def checked_model(model: Any) -> nn.Module:
    """Refuse a model that is no module."""
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


def checked_rescues(on_error: Any, on_oom: Any, *, checkpoint: Any, world: World) -> tuple[str | None, str | None]:
    """Check `on_error=` and `on_oom=`."""
    return checked_on_error(on_error, checkpoint), checked_on_oom(on_oom, world)


def checked_on_oom(on_oom: Any, world: World) -> str | None:
    """Check `on_oom=`: "split" is for one process."""
    if on_oom not in (None, "split"):
        raise SettingError(f"on_oom={on_oom!r}", want='None, or "split"', fix='on_oom="split"')
    if on_oom and world.size > 1:
        what = f'on_oom="split" with {world.size} processes: one that runs out of memory leaves the others in a sum'
        want = "one process, or micro-batches that fit on each"
        raise SettingError(what, want=want, fix="accumulate=2 and half the batch size: the same rows")
    return "split" if on_oom else None


def checked_schedule(value: object) -> Schedule | None:
    """Check `schedule=`."""
    if value is None:
        return None
    from trainwright.schedules.standard import as_schedule  # only where there is one: torch's schedulers are heavy

    return as_schedule(value)


def checked_metrics(metrics: Mapping[str, Any] | None, world: World) -> dict[str, Any]:
    """Check `metrics=`: names and kinds, and that the metrics can be summed over several ranks."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(message(f"metrics={metrics!r}", want="a dict", fix='metrics={"accuracy": accuracy}'))
    if metrics:
        check_metrics(metrics)
        if world.size > 1:
            MetricSet(metrics).check_mergeable()
    return dict(metrics or {})


def checked_slot(name: str, value: T | None, example: str) -> T | None:
    """Refuse a value that is not of the class of the slot's settings."""
    if value is None or isinstance(value, _slot_classes()[name]):
        return value
    raise TypeError(message(f"{name}={value!r}", want=f"{example}, or a subclass of it", fix=f"{name}={example}"))


def _slot_classes() -> dict[str, type]:
    """Return the base class of the settings of each slot; imported where a slot is filled."""
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
        from trainwright.update.reporter import check_every  # only if there is one: imports stay quick

        if not isinstance(observer, Observer):
            want = "objects of subclasses of Observer"
            raise TypeError(message(f"observers: {observer!r} is no Observer", want=want, fix=_in_its_place(observer)))
        check_every(observer)
        for event in sorted(overridden(type(observer), Observer, EVENTS)):
            check_arguments(observer, event)
    return tuple(observers)


def _in_its_place(given: Any) -> str:
    """Return how to give the Trainer an object that is no observer; empty where that is unknown."""
    kind = given if isinstance(given, type) else type(given)
    if isinstance(given, type):
        return f"{kind.__name__}(...)" if issubclass(kind, Observer) else ""
    slots: dict[str, Any] = _slot_classes() | {"clip": ClipNorm | ClipValue, "precision": MixedPrecision}
    slot = next((name for name, filled_by in slots.items() if isinstance(given, filled_by)), "")
    if not slot and hasattr(given, "bind"):
        slot = "schedule"
    return f"{slot}={kind.__name__}(...)" if slot else ""


def processes(
    parallel: str | DDP | FSDP | None, device: str | torch.device, model: nn.Module
) -> tuple[World, DDP | FSDP, torch.device]:
    """Return the ranks, the settings by which they share the work, and the device of this rank."""
    settings = DDP() if parallel is None or isinstance(parallel, str) else parallel
    chosen = choose_device(device, model)
    shards: bool = getattr(settings, "shards", False)  # an object of another class is refused below
    if chosen.type == "meta" and shards:
        chosen = choose_device(device, nn.Module())  # the weights are initialized on the device of the run
    elif not shards and (device == "auto" or chosen.type != "meta"):
        refuse_meta(model, "the model", want="weights; parallel=FSDP(...) alone makes them itself, shard by shard")
    world = World()
    if parallel is not None:
        from trainwright.distributed.start import as_world

        world = as_world(parallel, chosen.type)
    index: int | None = getattr(world, "device_index", None)
    if device == "auto" and index is not None and len(devices_of(model)) < 2:
        chosen = torch.device(chosen.type, index)
    if world.size > 1 and isinstance(model, nn.parallel.DistributedDataParallel):
        what = "a model in DistributedDataParallel already: the Trainer wraps the step, not the model"
        raise SettingError(what, want="the model itself", fix="Trainer(model.module, ...)")
    if is_sharded(*model.parameters()) and parallel is not None and not settings.shards:
        what = "the model was sharded by fully_shard already"
        raise SettingError(what, have=f"parallel={parallel!r}", fix="parallel=FSDP(blocks={Block})")
    return world, settings, chosen


def check_shards(owner: Owner) -> None:
    """Refuse settings that do not work with a sharded model; have its optimizers step the shards."""
    if not owner.parallel.shards:
        return
    from trainwright.distributed import fsdp

    if owner.fast.compile is not None or owner.fast.channels_last is True:
        name = "channels_last=True" if owner.fast.compile is None else "compile=..."
        raise not_built(f"Fast({name}) with FSDP", "DDP(), or leave it out")
    fsdp.check_precision(owner.parallel, owner.precision)
    fsdp.check_optimizers(owner.model, owner.optimizers)
    fsdp.follow(owner.model, owner.optimizers)


def place_all(owner: Owner, *beside: Any) -> None:
    """Move the model, a loss module and frozen modules to the device, in place; a model in shards shard by shard."""
    if not owner.parallel.shards:
        place(owner.model, owner.device)
        if owner.parallel.sync_batchnorm and owner.world.size > 1:
            in_sync(owner.model, cast(Any, owner.world), device=owner.device)
    else:
        from trainwright.distributed.fsdp import shard

        shard(owner.model, owner.parallel, owner.world, device=owner.device)
    for module in beside:
        if isinstance(module, nn.Module):
            if owner.device.type != "meta":
                refuse_meta(module, f"{type(module).__name__}, given beside the model,")
            place(module, owner.device, beside=owner.model)


def checked_frozen(frozen: Mapping[str, nn.Module] | None, model: nn.Module) -> dict[str, nn.Module]:
    """Check `frozen=`: modules by name, none of them a part of the model."""
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


def check_closures(owner: Owner) -> None:
    """Refuse an optimizer that evaluates the loss itself in a Trainer with the default update."""
    if owner._hooks.overrides_update:
        return
    for name, optimizer in owner.optimizers.items():
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
        # A torch scheduler puts a wrapper of the unbound function on the optimizer: `self` would count as missing.
        step, given = type(optimizer).step, [optimizer]
    try:
        inspect.signature(step).bind(*given)
    except TypeError:
        return "closure" in inspect.signature(step).parameters
    except ValueError:  # a function in C without a signature
        pass
    return False


def open_data(
    owner: Owner, train: Any, val: Any, *, ends: Ends, batch_size: int | None, joins: bool = True
) -> tuple[Source, dict[str, Source]]:
    """Open training data, and validation data by the prefix of their numbers: "val", or "val_<key>" of a dict.

    A trainer that cannot train is refused first. `joins`: whether all ranks make this call together.
    """
    from trainwright.data.dataloader.loader import LoaderBatches
    from trainwright.data.streams import Continuing
    from trainwright.update.per_rank_state import assign_shard

    _check_trainable(owner)
    if isinstance(val, int | float | Tensor | np.ndarray):
        _check_val(train, val)
    ends.check_given()
    sets = {} if val is None else _named_sets(val)
    # A function of the epoch may draw random numbers. Ranks join here first: a rank that is alone is found at once.
    with _joined_ranks(owner) if joins and owner.world.size > 1 else nullcontext():
        source = open_source(train, batch_size=batch_size, shuffle=True, role="train")
        held_out = {
            # A batch size holds for validation data too, where they are rows and not batches already.
            name: open_source(data, batch_size=batch_size if batch_size and takes_batch_size(data) else None, role=name)
            for name, data in sets.items()
        }
    if ends.epoch_updates is not None and source.length is None:
        source = Continuing(source)
    if owner.world.size > 1:
        assign_shard(owner, source, *held_out.values())
    for name, opened in held_out.items():
        if isinstance(opened, LoaderBatches):
            opened.keep_workers(keeps=not _reads(train, sets[name]))
    return source, held_out


def _reads(train: Any, data: Any) -> bool:
    """Return whether `data` are the training data, or one of several loaders that are read side by side."""
    return data is train or (is_together(train) and any(data is one for one in train.loaders.values()))


@contextmanager
def _joined_ranks(owner: Owner) -> Iterator[None]:
    """A context in which several ranks are monitored and have the random state of rank 0."""
    from trainwright.update.per_rank_state import position_text, rng_of_rank0

    with owner.world.watched(partial(position_text, owner)), rng_of_rank0(owner.world):
        yield


_OWN = {
    "_record": StageRecord,
    "_counters": Counters,
    "history": list,
    "_hooks": Hooks,
    "_tracker": LossTracker,
    "state": dict,
}
"""The attributes of a Trainer that a run writes to, which a subclass must not replace."""


def _check_trainable(owner: Owner) -> None:
    """Refuse to train where a subclass has replaced an attribute, without an optimizer, or with lazy modules."""
    for name, kind in _OWN.items():
        if not isinstance(getattr(owner, name), kind):
            have = f"a {type(getattr(owner, name)).__name__}"
            what = f"self.{name} was replaced: the Trainer has a {kind.__name__} under this name"
            fix = f"self.my_{name.removeprefix('_')} = ..., or an entry of self.state"
            raise SettingError(what, have=have, fix=fix)
    if not owner.optimizers:
        raise SettingError(
            "fit() without an optimizer", fix="Trainer(model, torch.optim.AdamW(model.parameters()), loss)"
        )
    if owner.schedule is not None:
        check_schedulers(owner.schedule, owner.optimizers)  # again: a torch scheduler may have been built since
    # A checkpoint, an average and the header need the shapes of all parameters.
    lazy = next((name for name, one in owner.model.named_parameters() if nn.parameter.is_lazy(one)), None)
    if lazy is not None:
        raise SettingError(f"{lazy} has no shape yet", fix="call model(one_batch) once before fit")


def _check_val(train: Any, val: Any) -> None:
    """Refuse `fit(x, y)`, `fit(data, 5)` and `fit(data, 0.2)`: a target, epochs or a share as validation data."""
    if isinstance(val, int) and not isinstance(val, bool):
        what = f"fit(train, {val}): the second is taken as validation data"
        fix = f"fit(train, epochs={val}), or batch_size={val}"
        raise SettingError(what, want="data that were held out, or none", fix=fix)
    if isinstance(val, float):
        share = val if 0 < val < 1 else 0.2
        data = "TensorDataset(*data)" if isinstance(train, tuple) else "data"
        fix = f"train, val = torch.utils.data.random_split({data}, [{1 - share:g}, {share:g}])"
        raise SettingError(f"fit(train, val={val})", want="data that were held out, not a share", fix=fix)
    kinds = (Tensor, np.ndarray)
    if not isinstance(train, kinds) or not isinstance(val, kinds) or not train.ndim or not val.ndim:
        return
    if len(train) == len(val) and (train.shape[1:] != val.shape[1:] or train.dtype != val.dtype):
        raise SettingError(
            f"fit(x, y): the second is taken as validation data, and has as many rows as the first, {len(train)}",
            have=f"{tuple(train.shape)} {train.dtype} and {tuple(val.shape)} {val.dtype}",
            want="inputs and targets in one tuple",
            fix="fit((x, y), ...)",
        )


def only(optimizers: Mapping[str, Any]) -> Any:
    """Return the optimizer that was given without a name; None for a trainer without any."""
    if not optimizers or ONLY in optimizers:
        return optimizers.get(ONLY)
    names = ", ".join(map(repr, optimizers))
    raise SettingError(
        f"self.optimizer, and there are several: {names}", fix=f"self.optimizers[{next(iter(optimizers))!r}]"
    )


class NotRunning:
    """Takes the place of the run outside of `fit`: every attribute raises TrainwrightError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        raise TrainwrightError(message("this works only while fit() is running", want="a call from a hook or a step"))


NOT_RUNNING: Any = NotRunning()


def result_of(owner: Owner) -> Result:
    """Return the Result of the last run."""
    assert owner.result is not None
    return owner.result


def open_sets(owner: Owner, data: Any, name: str, *, batch_size: int | None) -> dict[str, Source]:
    """Open data to evaluate by the prefix of its numbers: `name`, or `<name>_<key>` for each of a dict of sets."""
    sets = _named_sets(data, name)
    return {prefix: open_one(owner, one, prefix, batch_size=batch_size) for prefix, one in sets.items()}


def open_one(owner: Owner, data: Any, role: str, *, batch_size: int | None) -> Source:
    """Open data for one pass, of which each of several ranks runs its shard."""
    role = "evaluated" if role == "train" else role  # the user may have chosen that name
    # A function may draw random numbers.
    with _joined_ranks(owner) if is_function(data) and owner.world.size > 1 else nullcontext():
        opened = open_source(data, batch_size=batch_size, role=role)
    if owner.world.size > 1:
        from trainwright.update.per_rank_state import assign_shard

        assign_shard(owner, opened)
    return opened


def _named_sets(data: Any, prefix: str = "val") -> dict[str, Any]:
    """Return data to evaluate by the prefix of their numbers."""
    if isinstance(data, dict):
        return _sets_of_dict(data, prefix)
    if isinstance(data, list | tuple):
        _refuse_loaders(data, prefix)
    return {prefix: data}


def _sets_of_dict(data: dict[Any, Any], prefix: str) -> dict[str, Any]:
    """Return the sets of a dict by the prefix of their numbers. A dict of arrays or tensors is one set, by column."""
    if all(isinstance(one, Tensor | np.ndarray) for one in data.values()):
        return {prefix: data}
    for name in data:
        if not isinstance(name, str) or not name.isidentifier():
            what = f"{prefix}={{{name!r}: ...}}"
            raise SettingError(what, want="names that are identifiers", fix='"clean"')
    return {f"{prefix}_{name}": one for name, one in data.items()}


def _refuse_loaders(data: Sequence[Any], prefix: str) -> None:
    """Refuse several loaders in a list or tuple, which is read as batches or rows."""
    if data and all(isinstance(one, Batches | DataLoader) for one in data):
        kind = type(data).__name__
        raise SettingError(
            f"{prefix}={kind} of {len(data)} loaders: a {kind} is taken as batches or rows",
            want=f"a dict of several sets of data, whose numbers are then {prefix}_a_loss and so on",
            fix=f'{prefix}={{"a": first, "b": second}}' if prefix == "val" else '{"a": first, "b": second}',
        )
