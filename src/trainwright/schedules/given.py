"""The `schedule=` of a Trainer, checked when it is given: a schedule, or a function `(update, total) -> factor`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.schedules.lengths import Length, rest_after, warmup_updates
from trainwright.schedules.settings import BuiltinSchedule, settings_text
from trainwright.schedules.table import TableSpec

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


@dataclass(frozen=True, slots=True)
class FunctionSchedule(BuiltinSchedule):
    """torch's `LambdaLR` over the run: any function `(update, total) -> factor` of each group's own rate.

    With w updates of warm-up the function counts from its end: update 0 of total - w.
    """

    fn: Callable[[int, int], float]
    _: KW_ONLY
    warmup: Length | None = None

    def __post_init__(self) -> None:
        self._check_length("warmup", least=0, optional=True)
        try:
            inspect.signature(self.fn).bind(0, 1)
        except ValueError:
            return  # a builtin without a signature
        except TypeError as error:
            name = getattr(self.fn, "__name__", repr(self.fn))
            raise SettingError(
                f"{name} is no schedule: {error}",
                want="a function of (update, total) that returns a factor of the rate",
                fix="schedule=lambda update, total: 1 - update / total",
            ) from None

    def spec(self, plan: Plan) -> TableSpec:
        """Torch's `LambdaLR` with the function, over what the warm-up leaves of the run."""
        warmup = warmup_updates(self.warmup, plan, "FunctionSchedule")
        rest = rest_after(plan, warmup, "FunctionSchedule")

        def factor(update: int) -> float:
            given = self.fn(update, rest)
            try:
                value = float(given)
            except (TypeError, ValueError):
                value = math.nan
            if not 0 <= value < math.inf:
                raise SettingError(
                    f"{settings_text(self)} gave {given} for {update=}, {rest=}", want="a factor of at least 0"
                )
            return value

        return TableSpec(build=lambda optimizer, _: LambdaLR(optimizer, factor), warmup=warmup)


def _named(name: str) -> str | None:
    """The schedule that a name is meant for; None where none is near."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    known = {one.lower(): one for one in _EXAMPLES} | _OTHER_NAMES
    near = get_close_matches(plain, known, n=1) or get_close_matches(plain.removesuffix("lr"), known, n=1)
    return known[near[0]] if near else None
