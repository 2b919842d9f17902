"""Early stopping: ends a run after `patience` validations without a new best, and records the best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from trainwright.core.checks import check_form, check_whole, is_count, is_none_or, is_number, is_text
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.monitor import Mode, require_monitor, resolve_mode, sort_key
from trainwright.core.records import Best
from trainwright.core.suggestions import suggests

NO_ERRORS: Mapping[str, float] = MappingProxyType({})


@suggests
@dataclass(frozen=True)
class EarlyStopping:
    """Stop after `patience` consecutive validations that do not beat the best by more than `min_delta`.

    The best moves only when it is beaten by more than `min_delta`, so that slow steady gains add up.

    Args:
        monitor: The name of the number, such as "val_loss".
        mode: "min" or "max". Optional for names that end in "loss": the default is "min".
        patience: Validations without an improvement before the run stops.
        min_delta: A distance (0.001), a share of the best ("1%"), or "1se": the standard error of the best over its
            rows.
        restore_best: Whether the model holds the best weights when `fit` ends, stopped early or not.
    """

    monitor: str
    _: KW_ONLY
    mode: Mode | None = None
    patience: int = 5
    min_delta: float | str = 0.0
    restore_best: bool = True
    margin: Margin = field(init=False, repr=False, compare=False)
    """`min_delta`, parsed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", resolve_mode(self.monitor, self.mode, "EarlyStopping({!r}, mode={!r})"))
        written, fix = f"EarlyStopping(patience={self.patience!r})", f"EarlyStopping({self.monitor!r}, patience=5)"
        check_whole(self.patience, written, what="a whole number of validations without a new best", fix=fix)
        object.__setattr__(self, "margin", _margin(self.min_delta))

    def bind(self) -> EarlyStopper:
        """Return the early stopper of one `fit`."""
        return EarlyStopper(self)


class EarlyStopper:
    """The state of early stopping during one `fit`: the best so far and the validations since. A part of checkpoints.

    To customize: subclass it, override `judge` or `stopped`, and return it from `bind` of a subclass of
    `EarlyStopping`.
    """

    def __init__(self, settings: EarlyStopping) -> None:
        assert settings.mode is not None, "EarlyStopping has resolved it"
        self.settings = settings
        self.mode: Mode = settings.mode
        self.best: Best | None = None
        """The best value so far; None before the first finite one."""
        self.waited = 0
        """Validations since the best."""
        self.weights: dict[str, Tensor] | None = None
        """The best weights, on the host; None if a checkpoint holds them."""
        self._error: float | None = None
        """The standard error of the best value."""

    def judge(
        self, metrics: Mapping[str, float], errors: Mapping[str, float] = NO_ERRORS, *, epoch: int, update: int
    ) -> bool:
        """Compare one validation with the best; return whether it is a new best.

        `epoch`: finished epochs. `update`: applied updates. `errors`: standard errors by name. NaN is never the best.
        """
        monitor = self.settings.monitor
        require_monitor(monitor, metrics, "EarlyStopping")
        value, error = float(metrics[monitor]), errors.get(monitor)
        if self.settings.margin.kind == "se" and error is None:
            raise _without_error(monitor, errors)
        if not self._beats(value):
            self.waited += 1
            return False
        self.best = Best(monitor, value, epoch, update)
        self._error = error
        self.waited = 0
        return True

    @property
    def stopped(self) -> str:
        """Why to stop, as "val_loss did not improve on its best, 0.1324 (epoch 12), for 5 validations"; else ""."""
        return "" if self.waited < self.settings.patience else self._reason()

    def _reason(self) -> str:
        best, waited = self.best, f"for {self.waited} validation{'s' if self.waited > 1 else ''}"
        if best is None:
            return f"{self.settings.monitor} was never a finite number {waited}"
        return f"{self.settings.monitor} did not improve on its best, {best.value:.4g} (epoch {best.epoch}), {waited}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best, its standard error, the validations since, and the best weights if held here."""
        best = None
        if self.best is not None:
            best = {name: value for name, value in asdict(self.best).items() if name != "path"}
        weights = None if self.weights is None else dict(self.weights)
        watched = {"monitor": self.settings.monitor, "mode": self.mode}
        return {**watched, "best": best, "error": self._error, "waited": self.waited, "weights": weights}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Load a state. CheckpointError if it is of another number or mode."""
        check_form(tree, monitor=is_text, mode=is_text, error=is_none_or(is_number), waited=is_count)
        check_form(tree, weights=is_none_or(lambda value: isinstance(value, Mapping)), best=is_none_or(is_best))
        saved, mine = (tree["monitor"], tree["mode"]), (self.settings.monitor, self.mode)
        if saved != mine:
            raise CheckpointError(
                "the checkpoint stopped early by another number",
                have="EarlyStopping({!r}, mode={!r}) in the checkpoint".format(*saved),
                want="EarlyStopping({!r}, mode={!r})".format(*mine),
                fix='fit(..., resume_fresh=("early_stopping",)), or resume with the one of the checkpoint',
            )
        self.best = None if tree["best"] is None else Best(**tree["best"])
        self._error = tree["error"]
        self.waited = tree["waited"]
        self.weights = None if tree["weights"] is None else dict(tree["weights"])

    def _beats(self, value: float) -> bool:
        best = sort_key(None if self.best is None else self.best.value, self.mode)
        if self.best is not None and self.settings.margin.size:
            best -= self.settings.margin.width(best, self._error)
        return sort_key(value, self.mode) < best


@dataclass(frozen=True)
class Margin:
    """The distance by which the best must be beaten: `size` times 1, |best|, or the standard error of the best."""

    kind: Literal["absolute", "relative", "se"]
    size: float

    def width(self, best: float, error: float | None) -> float:
        """Return the distance for a best value with this standard error."""
        scale = {"absolute": 1.0, "relative": abs(best), "se": error}[self.kind]
        assert scale is not None
        return self.size * scale


def _margin(min_delta: float | str) -> Margin:
    if isinstance(min_delta, str):
        if min_delta == "1se":
            return Margin("se", 1.0)
        if re.fullmatch(r"\d+(\.\d+)?%", min_delta):
            return Margin("relative", float(min_delta[:-1]) / 100)
    elif not isinstance(min_delta, bool) and isinstance(min_delta, int | float) and 0 <= min_delta < math.inf:
        return Margin("absolute", float(min_delta))
    raise SettingError(
        f"EarlyStopping(min_delta={min_delta!r})",
        want='a distance of 0 or more (0.001), a share of the best ("1%"), or one standard error ("1se")',
        fix=f"min_delta={-min_delta!r}" if isinstance(min_delta, float) and -math.inf < min_delta < 0 else "",
    )


def _without_error(monitor: str, errors: Mapping[str, float]) -> SettingError:
    return SettingError(
        f'EarlyStopping({monitor!r}, min_delta="1se") needs the standard error of {monitor}, and there is none',
        have="standard errors of " + (", ".join(sorted(errors)) or "nothing"),
        want="a metric that returns one value per row, or a loss whose rows are known",
        fix="return a 1-dim tensor with one value per row from the metric, or give min_delta a number",
    )


def is_best(value: object) -> bool:
    """Whether a value is a saved Best. Its path is not checked: it changes when a directory is moved."""
    forms = {"name": is_text, "value": is_number, "epoch": is_count, "update": is_count}
    if not isinstance(value, Mapping) or set(value) - {"path"} != set(forms):
        return False
    return all(forms[key](value[key]) for key in forms)
