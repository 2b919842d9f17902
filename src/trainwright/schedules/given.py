"""The `schedule=` of a Trainer, checked when it is given: a schedule, or a function `(update, total) -> factor`."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast

from torch.optim.lr_scheduler import LRScheduler

from trainwright.core.errors import SettingError
from trainwright.schedules.standard import FunctionSchedule

if TYPE_CHECKING:
    from trainwright.protocols import Schedule

_EXAMPLES = {
    "Cosine": "Cosine(warmup=0.1)",
    "Cyclic": "Cyclic(1e-4, 1e-2)",
    "Exponential": "Exponential(0.95)",
    "Linear": "Linear()",
    "MultiStep": "MultiStep([0.5, 0.75])",
    "OneCycle": "OneCycle(max_lr=1e-2)",
    "Plateau": 'Plateau("val_loss")',
    "StepLR": "StepLR(Epochs(30), gamma=0.1)",
    "WarmupStableDecay": "WarmupStableDecay(warmup=0.1, decay=0.2)",
}
_OTHER_NAMES = {"cosineannealing": "Cosine", "reduceonplateau": "Plateau", "step": "StepLR", "wsd": "WarmupStableDecay"}


def as_schedule(value: object) -> Schedule | None:
    """The schedule that was given: None, an object with `bind`, or a function `(update, total) -> factor`.

    SettingError for anything else; for a built torch scheduler with the line to write instead.
    """
    if value is None:
        return None
    if isinstance(value, LRScheduler):
        name = type(value).__name__
        raise SettingError(
            f"schedule={name}(...): a built torch scheduler does not say when it steps",
            want="a schedule, or a function (update, total) -> factor",
            fix=f'write TorchSchedule(lambda optimizer: {name}(optimizer, ...), unit="update")',
        )
    if isinstance(value, type):
        name = value.__name__
        torchs = issubclass(value, LRScheduler)
        fix = f"TorchSchedule(lambda optimizer: {name}(optimizer, ...), ...)" if torchs else f"{name}()"
        raise SettingError(f"schedule={name} is a class", want="a schedule", fix=f"write {fix}")
    if callable(getattr(value, "bind", None)):
        return cast("Schedule", value)
    if callable(value):
        return FunctionSchedule(cast("Callable[[int, int], float]", value))
    meant = _named(value) if isinstance(value, str) else None
    hint = "" if meant is None else f" Did you mean {_EXAMPLES[meant]}?"
    raise SettingError(
        f"schedule={value!r} is no schedule.{hint}",
        want=f"{', '.join(f'{name}(...)' for name in _EXAMPLES)}, TorchSchedule(...), "
        "or a function (update, total) -> factor",
        fix=f"schedule={_EXAMPLES[meant or 'Cosine']}",
    )


def _named(name: str) -> str | None:
    """The schedule that a name is meant for; None where none is near."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    known = {one.lower(): one for one in _EXAMPLES} | _OTHER_NAMES
    near = get_close_matches(plain, known, n=1) or get_close_matches(plain.removesuffix("lr"), known, n=1)
    return known[near[0]] if near else None
