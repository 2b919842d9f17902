"""How is the learning rate of an update found? As a function of the applied updates, by torch's own schedulers.

Files in reading order:
`rates`: `Rates`, a schedule bound to an optimizer and a plan; parameter groups, and values in them that others wrote.
`table`: rates as one table for each parameter group, grown on demand by torch's scheduler.
`settings`: the common base class: checks, `bind`, `plot`. `lengths`: durations and fractions of the run in updates.
`standard`: the `schedule=` of a Trainer, steps and curves that go down, functions. `cycles`: OneCycle and Cyclic, with
the momentum. `stepped`: Plateau and `TorchSchedule`, which have a history.

Promises: each rate has the bits of torch's scheduler of that name; the clock of applied updates alone decides, so that
a resume looks up the next rate; a schedule ends exactly with the run, and a value of a group that is set by hand is
refused. A new schedule: a frozen dataclass on `BuiltinSchedule` with `spec(plan)`, in `standard` or `cycles`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.schedules.cycles import Cyclic, OneCycle
    from trainwright.schedules.rates import Rates
    from trainwright.schedules.standard import Cosine, Exponential, Linear, MultiStep, StepLR, WarmupStableDecay
    from trainwright.schedules.stepped import Plateau, TorchSchedule

__all__ = [
    "Cosine",
    "Cyclic",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Plateau",
    "Rates",
    "StepLR",
    "TorchSchedule",
    "WarmupStableDecay",
]

_FILES = {
    "rates": ("Rates",),
    "cycles": ("Cyclic", "OneCycle"),
    "standard": ("Cosine", "Exponential", "Linear", "MultiStep", "StepLR", "WarmupStableDecay"),
    "stepped": ("Plateau", "TorchSchedule"),
}
"""The public names by file. Each file is imported when one of its names is first read: a fit needs one of them."""


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
