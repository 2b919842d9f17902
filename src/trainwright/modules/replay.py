"""Repeats a module's forward as it was: its buffers, attributes and random draws; all as before afterwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainwright.core.errors import StepError
from trainwright.core.rng import host_random_state, set_random_state
from trainwright.core.torch_private import buffer_dict, parameter_dict, version_of
from trainwright.core.trees import inside
from trainwright.modules.freezing import has_running_statistics

_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Attributes that hold no tensor of another step alive: a mode, a counter, a rate of dropout."""


class Replay:
    """What a forward found when it began; entered as a context around each repetition of it.

    Made before the forward; `forward_done` after it. Inside the context the module's modes and plain attributes are
    those that the first forward found, and its buffers copies with the numbers that it found, so that what it moves,
    moves once. Running statistics do not enter what a normalisation layer in train mode computes: they are copied as
    they are. StepError where a weight has changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = inside(module)
        self._module = module
        self._weights = [
            (p, _version(p)) for part in self._parts for p in parameter_dict(part).values() if p is not None
        ]
        self._moved: list[tuple[nn.Module, str, Tensor, int, Tensor]] = [
            (part, name, buffer, _version(buffer), buffer.detach().clone())
            for part in self._parts
            for name, buffer in buffer_dict(part).items()
            if buffer is not None and not _moves_alone(part)
        ]
        self._plain = [{k: v for k, v in vars(part).items() if type(v) in _PLAIN} for part in self._parts]
        self._draws = host_random_state()
        self._found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._draws_now: dict[str, Any] = {}

    def forward_done(self) -> None:
        """Let go of copies of buffers that the forward has not changed."""
        self._moved = [
            found
            for found in self._moved
            if buffer_dict(found[0]).get(found[1]) is not found[2] or _version(found[2]) != found[3]
        ]

    def __enter__(self) -> None:
        self._check_weights()
        self._draws_now = host_random_state()
        for part in self._parts:
            self._found += [(vars(part), dict(vars(part))), (buffer_dict(part), dict(buffer_dict(part)))]
        for part, plain in zip(self._parts, self._plain, strict=True):
            vars(part).update(plain)
            if _moves_alone(part):
                for name, buffer in buffer_dict(part).items():
                    buffer_dict(part)[name] = None if buffer is None else buffer.detach().clone()
        for part, name, _, _, before in self._moved:
            buffer_dict(part)[name] = before.clone()
        set_random_state(self._draws)

    def __exit__(self, *error: object) -> None:
        set_random_state(self._draws_now)
        for held, before in self._found:
            for key in [key for key in held if key not in before]:
                del held[key]
            for key, value in before.items():
                if held.get(key, held) is not value:
                    held[key] = value
        self._found.clear()

    def _check_weights(self) -> None:
        for parameter, version in self._weights:
            if _version(parameter) != version:
                names = (name for name, one in self._module.named_parameters() if one is parameter)
                what = f"{next(names, 'a weight')} of a recomputed {type(self._module).__name__} has changed"
                raise StepError(
                    f"{what} between its forward and its backward",
                    want="the weights that the forward had",
                    fix="call backward before the optimizer's step, or leave the block out of blocks=",
                )


def _moves_alone(module: nn.Module) -> bool:
    """Whether a forward moves buffers that no result hangs on, and torch does not count that as a change of them."""
    return module.training and has_running_statistics(module)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)
