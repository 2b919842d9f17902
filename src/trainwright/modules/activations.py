"""Activation checkpointing: blocks store only their inputs for the backward, which recomputes their activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainwright.core.errors import SettingError, StepError, message
from trainwright.core.rng import host_random_state, set_random_state
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import buffer_dict, is_compiled, parameter_dict, version_of
from trainwright.core.trees import inside
from trainwright.modules.freezing import has_running_statistics
from trainwright.modules.matching import Blocks, described, find_blocks


@suggests
def checkpoint_activations(model: nn.Module, blocks: Blocks | None = None) -> CheckpointedBlocks:
    """Run blocks of a model under `torch.utils.checkpoint.checkpoint`, in place; return the handle that undoes it.

    Gradients are the same to the last bit. Torch repeats its random draws and autocast; this function also repeats the
    draws of Python and NumPy, and lets buffers, running statistics and plain attributes change once. A forward whose
    result depends on other state that changes, or that appends to a list, cannot be recomputed. Names in the
    `state_dict` do not change. Passes without gradients run as before.

    Args:
        model: The model, or a part of it.
        blocks: A class of modules or several. None: the classes with modules inside that the model has three times or
            more. Of blocks inside one another the outer ones count. For some modules of a class alone, `model` is a
            part of the model: `checkpoint_activations(model.layers[:4], {Block})`.

    Raises:
        SettingError: Where no block is found, or a module is compiled or recomputed already.
        StepError: Where a weight has changed between forward and backward, which torch does not detect.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(message(f"checkpoint_activations({model!r})", want="a torch.nn.Module"))
    found = find_blocks(model, blocks, "checkpoint_activations")
    _check_free(model, found)
    for module in found.values():
        vars(module)["forward"] = _Recomputed(module, vars(module).get("forward")).forward
    return CheckpointedBlocks(model, tuple(found), described(found))


@dataclass(frozen=True)
class CheckpointedBlocks:
    """Blocks of a model that are recomputed, until `remove` or the end of this context."""

    model: nn.Module = field(repr=False)
    names: tuple[str, ...]
    """The names of the blocks."""
    classes: str
    """How many blocks of which classes."""

    def __str__(self) -> str:
        """Return one line."""
        return f"recomputes {self.classes}"

    def __enter__(self) -> CheckpointedBlocks:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Store the activations of the blocks again."""
        self.remove()

    def remove(self) -> None:
        """Store the activations of the blocks again; a second call is a no-op."""
        modules = dict(self.model.named_modules())
        for name in self.names:
            if name in modules:
                _release(modules[name])


def is_recomputed(module: nn.Module) -> bool:
    """Return whether this module itself is one of the blocks of `checkpoint_activations`."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), _Recomputed)


def release_all(model: nn.Module) -> None:
    """Store the activations of all blocks in a model again."""
    for module in model.modules():
        _release(module)


def _release(module: nn.Module) -> None:
    if is_recomputed(module):
        own = vars(module)["forward"].__self__.own
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


class _Recomputed:
    """Holds the `forward` that replaces a module's own.

    It is an attribute of the instance, bound to this object, so that copies and pickles of the module refer to
    themselves. Hooks and the gathering of shards run around a forward, and are not repeated with it.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module = module
        self.own = own
        """The earlier forward of the instance; None where it had the forward of its class."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it now, and again in the backward."""
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            n = len(values) - len(names)
            return self.plain(*values[:n], **dict(zip(names, values[n:], strict=True)))

        values = (*args, *kwargs.values())  # torch checks the versions of positional tensors alone
        if torch.compiler.is_compiling():  # a compiled graph changes each buffer once
            return checkpoint(run, *values, use_reentrant=False)
        first = _FirstForward(self.module)
        output = checkpoint(run, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), first))
        first.done()
        return output


_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of attributes that refer to no tensor: a mode, a counter, a rate of dropout."""


class _FirstForward:
    """The state of a module before its forward, as a context for each repetition of that forward.

    Made before the forward; `done` is called after it. Inside the context the module has its modes, plain attributes
    and copies of its buffers from before the forward, so that each changes once. Running statistics are copied as they
    are now: in train mode the output of a norm layer does not depend on them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = inside(module)
        self._module = module
        self._weights = [
            (p, _version(p)) for part in self._parts for p in parameter_dict(part).values() if p is not None
        ]
        self._buffers: list[tuple[nn.Module, str, Tensor, int, Tensor]] = [
            (part, name, buffer, _version(buffer), buffer.detach().clone())
            for part in self._parts
            for name, buffer in buffer_dict(part).items()
            if buffer is not None and not _moves_statistics(part)
        ]
        self._plain = [{k: v for k, v in vars(part).items() if type(v) in _PLAIN} for part in self._parts]
        self._draws = host_random_state()
        self._found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._draws_now: dict[str, Any] = {}

    def done(self) -> None:
        """Drop copies of buffers that the forward has not changed."""
        self._buffers = [
            found
            for found in self._buffers
            if buffer_dict(found[0]).get(found[1]) is not found[2] or _version(found[2]) != found[3]
        ]

    def __enter__(self) -> None:
        self._check_weights()
        self._draws_now = host_random_state()
        for part in self._parts:
            self._found += [(vars(part), dict(vars(part))), (buffer_dict(part), dict(buffer_dict(part)))]
        for part, plain in zip(self._parts, self._plain, strict=True):
            vars(part).update(plain)
            if _moves_statistics(part):
                for name, buffer in buffer_dict(part).items():
                    buffer_dict(part)[name] = None if buffer is None else buffer.detach().clone()
        for part, name, _, _, before in self._buffers:
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


def _moves_statistics(module: nn.Module) -> bool:
    """Return whether a forward updates running statistics, which does not change their version counters."""
    return module.training and has_running_statistics(module)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _check_free(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Refuse a model with compiled modules, and blocks that are in, are, or contain recomputed ones."""
    for name, module in model.named_modules():
        if is_compiled(module):
            what = f"checkpoint_activations, and {name or type(module).__name__} is compiled already"
            raise SettingError(what, want="checkpoint_activations(model, ...) before torch.compile")
    for name, around, module in _pairs(model, found):
        if is_recomputed(module):
            what = f"checkpoint_activations: {name}{'' if name == around else f' of {around}'} is recomputed already"
            raise SettingError(what, fix="remove() of what the first call returned")


def _pairs(model: nn.Module, found: dict[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each module that is in a block, is one, or contains one, with its name and that of the block."""
    for around, block in found.items():
        for name, module in block.named_modules(prefix=around):
            yield name, around, module
    for name, module in model.named_modules():
        for around, block in found.items():
            if any(inner is block for inner in module.modules()):
                yield name, around, module
