"""What a Trainer makes of its settings when it is built, and of data when `fit` is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.base.contracts import Observer, Source
from trainwright.base.errors import SettingError, TrainwrightError, message, not_built
from trainwright.base.progress import Counters
from trainwright.base.records import Result
from trainwright.data.source import open_source, takes_batch_size
from trainwright.data.stream import Continuing
from trainwright.run.owner import Owner
from trainwright.run.plan import Ends
from trainwright.runtime.device import place, place_state
from trainwright.slots.metrics import Meters

T = TypeVar("T")

_LATER_HOOKS = {
    "begin_epoch": "give fit a function epoch -> data, or look at self.progress.epoch in a step",
    "end_epoch": "write an Observer with on_epoch",
    "after_update": "override update(self, window): super().update(window), then your own",
}


def refuse_later(**settings: object) -> None:
    """Refuse a setting whose part is designed but not built yet."""
    for name, value in settings.items():
        if value is not None:
            raise not_built(f"{name}=")


def refuse_later_hooks(cls: type) -> None:
    """Refuse a hook that is designed but not built yet: it would never be called."""
    for name, instead in _LATER_HOOKS.items():
        if name in vars(cls):
            raise not_built(f"the hook {cls.__name__}.{name}", instead)


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
    raise TypeError(
        message(
            f"loss={loss!r}",
            want="a function of (output, target), or a loss module",
            fix=f"loss={loss.__name__}()" if isinstance(loss, type) else "loss=nn.CrossEntropyLoss()",
        )
    )


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check names and kinds by building what will read them."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(message(f"metrics={metrics!r}", want="a dict", fix='metrics={"accuracy": accuracy}'))
    if metrics:
        Meters(metrics)
    return dict(metrics or {})


def checked_slot(name: str, value: T | None, example: str) -> T | None:
    """Refuse a value that is no settings object: one that `bind` makes something of."""
    if value is None or (hasattr(value, "bind") and not isinstance(value, type)):
        return value
    raise TypeError(message(f"{name}={value!r}", want=f"{example}, or an object with bind()", fix=f"{name}={example}"))


def checked_observers(observers: Collection[Observer]) -> tuple[Observer, ...]:
    """Refuse an observer that is none."""
    for observer in observers:
        if not isinstance(observer, Observer):
            raise TypeError(
                message(f"observers: {observer!r} is no Observer", want="objects of subclasses of Observer")
            )
    return tuple(observers)


def place_all(device: torch.device, *modules: Any) -> None:
    """Move the model and a loss module to the device, in place."""
    for module in modules:
        if isinstance(module, nn.Module):
            place(module, device)


def make_optimizer(optimizer: Any, model: nn.Module) -> Optimizer | None:
    """Take an Optimizer; call a torch class or a partial of one with named parameters, a function with the model."""
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        raise not_built(
            "optimizer={...}, several named optimizers,", "override update(self, window) with one optimizer"
        )
    if isinstance(optimizer, Optimizer):
        place_state(optimizer)
        return optimizer
    made: Any = None
    target = optimizer.func if isinstance(optimizer, partial) else optimizer
    if inspect.isclass(target) and issubclass(target, Optimizer):
        made = optimizer([item for item in model.named_parameters() if item[1].requires_grad])
    elif callable(optimizer):
        made = optimizer(model)
    if isinstance(made, Optimizer):
        return made
    raise TypeError(
        message(
            f"optimizer={optimizer!r}" + ("" if made is None else f" gave a {type(made).__name__}"),
            want="an Optimizer, a torch class or a partial of one, or a function model -> Optimizer",
            fix="torch.optim.AdamW(model.parameters(), lr=1e-3)",
        )
    )


def open_data(
    owner: Owner, train: Any, val: Any, *, ends: Ends, batch_size: int | None
) -> tuple[Source, Source | None]:
    """Open training and validation data; what is wrong with the trainer's parts for a `fit` is said first."""
    if owner.optimizer is None:
        raise SettingError(
            message("fit() without an optimizer", fix="Trainer(model, torch.optim.AdamW(model.parameters()), loss)")
        )
    if owner.loss is None and not owner.hooks.logs_freely:
        raise SettingError(
            message(
                "no loss: loss is None and training_step is not overridden",
                want="a loss, or a training_step(self, batch) that returns one",
                fix="Trainer(model, optimizer, nn.CrossEntropyLoss())",
            )
        )
    if isinstance(val, Mapping):
        raise not_built("val={...}, several validation sets,", "fit(train, one_of_them)")
    source = open_source(train, batch_size=batch_size, shuffle=True, role="train")
    if ends.epoch_updates is not None and source.length is None:
        source = Continuing(source)
    return source, None if val is None else open_source(val, batch_size=_fitting(val, batch_size), role="val")


def begin_stage(owner: Owner) -> None:
    """Start the counters of a `fit` anew, the totals over all stages apart, and the rates from the optimizer's own."""
    counters = owner.counters
    owner.ledger.reset()
    if not (counters.updates or counters.epoch or counters.stopped):
        return
    fresh = Counters(
        stage=counters.stage + 1,
        earlier_updates=counters.earlier_updates + counters.updates,
        earlier_epochs=counters.earlier_epochs + counters.epoch,
    )
    counters.load_state_dict(fresh.state_dict())
    if hasattr(owner.between.rates, "put_back"):
        owner.between.rates.put_back()


class NotRunning:
    """Stands where the run is while there is none; whatever is asked of it, it says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        raise TrainwrightError(message("this works only while fit() is running", want="a call from a hook or a step"))


NOT_RUNNING: Any = NotRunning()


def result_of(owner: Owner) -> Result:
    """Return the Result that the run has left behind."""
    assert owner.result is not None
    return owner.result


def fast_path(owner: Owner) -> str:
    """Name the path of the updates, with its cost on this device."""
    reads = "its numbers are read at once, which waits for nothing"
    if owner.device.type != "cpu":
        reads = "one read per update: loss, non-finite flag and norm together"
    return f"eager on {owner.device.type}: {reads}"


def _fitting(val: Any, batch_size: int | None) -> int | None:
    """`batch_size` holds for validation data too, where they are rows and not batches already."""
    return batch_size if takes_batch_size(val) else None
