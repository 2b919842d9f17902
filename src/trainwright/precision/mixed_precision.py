"""Mixed precision: autocast around steps, a dynamic loss scale for fp16, TF32 for float32 matrix products."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from trainwright.core.checks import check_form, is_amount, is_count
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import suggests
from trainwright.precision.base import LossScale, Precision

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": None}


@suggests
@dataclass(frozen=True, slots=True)
class MixedPrecision(Precision):
    """Runs steps under torch's autocast; with "fp16" it also scales the loss, so that small gradients do not underflow.

    The loss scale is adapted as by torch's GradScaler.

    Args:
        kind: "bf16", "fp16" or "tf32". "tf32" sets torch's float32 matmul precision to "high" during runs and
            evaluations, without autocast; it has no effect on a CPU.
        init_scale: The initial loss scale.
        growth_factor: The factor of the scale after `growth_interval` consecutive updates without an overflow.
        backoff_factor: The factor of the scale after an update with an overflow, which is skipped.
        growth_interval: The number of consecutive updates without an overflow before the scale grows.
        min_scale: The smallest scale. An overflow at this scale counts as a non-finite gradient.
    """

    kind: str
    _: KW_ONLY
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _unknown(self.kind)
        ok = self.init_scale >= self.min_scale > 0 and self.growth_factor > 1 > self.backoff_factor > 0
        if not ok or self.growth_interval < 1:
            raise SettingError(
                repr(self),
                want="init_scale >= min_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1",
            )

    def __str__(self) -> str:
        return self.kind

    def autocast(self, device_type: str) -> AbstractContextManager[Any] | None:
        """Return torch's autocast for a device type; None for "tf32"."""
        dtype = KINDS[self.kind]
        return None if dtype is None else torch.autocast(device_type, dtype)

    def loss_scale(self, device_type: str) -> LossScaler | None:
        """Return a new loss scale for "fp16"; None for other kinds."""
        return LossScaler(self) if self.kind == "fp16" else None

    def switches(self) -> AbstractContextManager[None]:
        """Return a context that sets torch's float32 matmul precision for "tf32"; for other kinds, a no-op."""
        return _tf32() if self.kind == "tf32" else nullcontext()


@contextmanager
def _tf32() -> Iterator[None]:
    """Set torch's float32 matmul precision to "high" inside the block; restore it at the end."""
    before, backends = matmul_precision() or "highest", matmul_precisions()
    with unwarned():
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        # Torch's setter also sets the precision of each backend, which is restored here: it cannot set "none".
        with unwarned():
            torch.set_float32_matmul_precision(before)
        for backend, precision in backends:
            backend.fp32_precision = precision


def matmul_precision() -> str | None:
    """Return the process-wide float32 matmul precision; None if backends were set separately."""
    try:
        with unwarned():
            return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def matmul_precisions() -> list[tuple[Any, str]]:
    """Return pairs of a backend and its float32 precision of matrix products; empty before torch 2.9."""
    return with_precision(torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))


def with_precision(*backends: Any) -> list[tuple[Any, str]]:
    """Return pairs of a backend and its float32 precision, for the backends that have this setting."""
    return [(backend, backend.fp32_precision) for backend in backends if hasattr(backend, "fp32_precision")]


@contextmanager
def unwarned() -> Iterator[None]:
    """Suppress the deprecation warnings of torch's older float32 matmul switches, which exist in all versions.

    Torch 2.9 and some later versions warn when they are read or set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        yield


class LossScaler(LossScale):
    """A dynamic loss scale, adapted once per update as by torch's GradScaler, with the same values.

    Args:
        settings: The factors, as a `MixedPrecision("fp16", ...)`. None: the defaults.
    """

    def __init__(self, settings: MixedPrecision | None = None) -> None:
        if settings is not None and not isinstance(settings, MixedPrecision):
            fix = 'LossScaler(MixedPrecision("fp16", init_scale=2.0**16))'
            raise TypeError(message(f"LossScaler({settings!r})", want="a MixedPrecision, or nothing", fix=fix))
        self.settings = settings or MixedPrecision("fp16")
        """The factors by which the scale is adapted."""
        self.value = _single(self.settings.init_scale)
        self._good = 0

    @property
    def scale(self) -> float:
        """The factor of the gradients of `backward`."""
        return self.value

    def adapt(self, overflowed: bool) -> None:
        """Lower the scale after an overflow; raise it after `growth_interval` consecutive updates without one."""
        if overflowed:
            self.value = max(_single(self.value * self.settings.backoff_factor), self.settings.min_scale)
            self._good = 0
            return
        self._good += 1
        if self._good == self.settings.growth_interval:
            grown = self.value * self.settings.growth_factor
            self.value = _single(grown) if grown <= torch.finfo(torch.float32).max else self.value
            self._good = 0

    @property
    def at_floor(self) -> bool:
        """Whether the scale cannot be lowered further."""
        return self.value <= self.settings.min_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of consecutive updates without an overflow."""
        return {"scale": self.value, "good": self._good}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load a saved scale; FormError for an invalid state."""
        check_form(tree, scale=lambda value: is_amount(value) and value != 0, good=is_count)
        self.value, self._good = float(tree["scale"]), int(tree["good"])


def _single(value: float) -> float:
    """Return `value` rounded to float32, the dtype of torch's scale."""
    return array("f", [value])[0]


def as_precision(setting: str | Precision | None, device: torch.device) -> Precision | None:
    """Return the precision of `precision=`. "auto": bf16 on CUDA devices with native support, else None."""
    if setting is None:
        return None
    if setting == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return MixedPrecision("bf16") if native else None
    if isinstance(setting, str):
        return MixedPrecision(setting)
    if isinstance(setting, Precision):
        return setting
    raise SettingError(f"precision={setting!r}", want=_WANTED, fix='precision="bf16"')


def _unknown(kind: object) -> SettingError:
    plain = str(kind).lower().removesuffix("-mixed").removesuffix("-true")
    if plain in _FULL:
        return SettingError(f"precision={kind!r} is unknown", want=_WANTED, fix="precision=None")
    meant = _OTHER_NAMES.get(plain) or next(iter(get_close_matches(plain, KINDS, n=1)), None)
    hint = "" if meant is None else f" Did you mean {meant!r}?"
    fix = f'precision="{meant or "auto"}"'
    return SettingError(f"precision={kind!r} is unknown.{hint}", want=_WANTED, fix=fix)


def check_weights(scale: LossScale | None, parameters: list[Tensor]) -> None:
    """Raise SettingError for loss scaling with float16 weights, whose gradients cannot be unscaled."""
    if scale is not None and any(p.dtype == torch.float16 for p in parameters):
        raise SettingError(
            "precision='fp16' with float16 weights: their gradients cannot be unscaled",
            want="float32 weights; autocast runs the step in float16",
            fix="model.float()",
        )


_OTHER_NAMES = {"bfloat16": "bf16", "16": "fp16", "float16": "fp16", "half": "fp16", "amp": "fp16", "tf": "tf32"}
_FULL = {"32", "fp32", "float32", "float", "full"}
_WANTED = 'None, "bf16", "fp16", "tf32", "auto", MixedPrecision(...) or a Precision of your own'
