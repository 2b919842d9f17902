"""`Fast(...)`: settings for speed. Results differ at most by the order of floating-point additions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import nn

from trainwright.core.checks import check_choice, check_flag
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.modules.matching import module_classes

KEYS = ("backend", "dynamic", "fullgraph", "mode", "options", "regions")
"""Valid keys of a dict for `compile`: arguments of `torch.compile`, and `regions`."""
_GRAPHED = ("cudagraphs", "max-autotune", "reduce-overhead")
"""A backend and modes of torch with CUDA graphs per region. Each replay overwrites the outputs of the last one."""


@suggests
@dataclass(frozen=True, slots=True)
class Fast:
    """Settings that may make a run faster. They change its time, not its mathematics.

    `docs/platforms.md` lists the platforms on which they were tested.

    Args:
        compile: "regional" compiles the repeated blocks of a model, or the model if no block repeats. "full" compiles
            the model. A dict passes arguments to `torch.compile` (`backend`, `dynamic`, `fullgraph`, `mode`,
            `options`); its key `"regions"` is "regional", "full" or module classes. None compiles nothing.
        channels_last: "auto" uses this memory layout for convolutional models on CUDA under bf16 or fp16. True uses it
            on every device, False on none.
        device_data: "auto" copies in-memory data to a CUDA device if they take at most a quarter of its free memory.
            True copies them to the device of the run, and raises SettingError if they do not fit. False leaves them on
            the host.
        defaults: False turns off the defaults: fused kernels of optimizers built by the trainer, "auto" of
            `channels_last`, and cuDNN benchmark mode.
    """

    _: KW_ONLY
    compile: Literal["regional", "full"] | Mapping[str, Any] | None = None
    channels_last: bool | Literal["auto"] = "auto"
    device_data: bool | Literal["auto"] = "auto"
    defaults: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.compile, Mapping):
            object.__setattr__(self, "compile", dict(self.compile))
        _check_compile(self.compile)
        for name in ("channels_last", "device_data"):
            check_choice(getattr(self, name), "Fast", name, choices=(True, False, "auto"), fix=f'Fast({name}="auto")')
        check_flag(self.defaults, f"Fast(defaults={self.defaults!r})")

    @property
    def regions(self) -> str | tuple[type[nn.Module], ...]:
        """The compiled regions: "regional", "full", or module classes."""
        if isinstance(self.compile, str):
            return self.compile
        wanted: Any = "regional" if self.compile is None else self.compile.get("regions", "regional")
        regions: str | tuple[type[nn.Module], ...] = wanted
        return regions

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `torch.compile`."""
        given = self.compile if isinstance(self.compile, Mapping) else {}
        return {name: value for name, value in given.items() if name != "regions"}


def as_fast(setting: Any) -> Fast:
    """Check `fast=`; None is `Fast()`."""
    if setting is None:
        return Fast()
    if isinstance(setting, Fast):
        return setting
    fix = f"fast=Fast(compile={setting!r})" if setting in ("regional", "full") else 'fast=Fast(compile="regional")'
    raise TypeError(message(f"fast={setting!r}", want="Fast(...), or None", fix=fix))


def _check_compile(setting: Any) -> None:
    if setting is None or setting in ("regional", "full"):
        return
    want = '"regional", "full", None, or a dict for torch.compile'
    if not isinstance(setting, dict):
        fix = "" if setting is False else 'Fast(compile="regional")'
        raise SettingError(f"Fast(compile={setting!r})", want=want, fix=fix or "leave compile out")
    for name in setting:
        if name not in KEYS:
            hint = did_you_mean(str(name), KEYS)
            what = f"Fast(compile={{{name!r}: ...}}) is unknown.{hint}"
            raise SettingError(what, want=f"some of {', '.join(KEYS)}")
    graphed = [one for one in ("backend", "mode") if setting.get(one) in _GRAPHED]
    if graphed:
        given = f"{graphed[0]!r}: {setting[graphed[0]]!r}"
        what = f"Fast(compile={{{given}}}) replays CUDA graphs, whose outputs are overwritten"
        fix = "Fast(compile={'mode': 'max-autotune-no-cudagraphs'})"
        raise SettingError(what, want="one without graphs of its own", fix=fix)
    _check_regions(setting)
    _check_backend(setting)


def _check_regions(setting: dict[str, Any]) -> None:
    regions = setting.get("regions", "regional")
    if regions not in ("regional", "full"):
        want = '"regional", "full", or classes of modules of the model'
        setting["regions"] = module_classes(regions, lambda text: f"Fast(compile={{'regions': {text}}})", want=want)


def _check_backend(setting: dict[str, Any]) -> None:
    """Refuse an unknown backend, and a mode together with options."""
    backend = setting.get("backend", "inductor")
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            what = f"Fast(compile={{'backend': {backend!r}}}) is unknown.{did_you_mean(backend, known)}"
            raise SettingError(what, want=f"one of {', '.join(torch.compiler.list_backends())}, or a function")
    elif not callable(backend) or inspect.isclass(backend):
        raise SettingError(f"Fast(compile={{'backend': {backend!r}}})", want="a name, or a function")
    if setting.get("mode") is not None and setting.get("options") is not None:
        what = "Fast(compile={'mode': ..., 'options': ...}): torch takes one of them"
        raise SettingError(what, fix="Fast(compile={'options': {...}})")
