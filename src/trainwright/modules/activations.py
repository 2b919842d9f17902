"""Activation checkpointing: blocks store only their inputs, and the backward recomputes their activations."""

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
    """Run blocks of a model under `torch.utils.checkpoint.checkpoint`, in place; return a handle to undo it.

    Gradients are bitwise the same. Torch repeats its random draws and autocast. This function also repeats the draws of
    Python and NumPy, and makes sure that buffers, running statistics and plain attributes change only once. A forward
    cannot be recomputed if its result depends on other state that changes, or if it appends to a list. Names in the
    `state_dict` do not change. Passes without gradients run as before. With torch before 2.13, a block that has buffers
    is not recomputed in a compiled graph.

    Args:
        model: The model, or a part of it.
        blocks: One or several classes of modules. None: the classes with submodules of which the model has at least
            three modules. Of nested blocks, the outer ones are used. To select only some modules of a class, pass a
            part of the model: `checkpoint_activations(model.layers[:4], {Block})`.

    Raises:
        SettingError: If no block is found, or a module is already compiled or recomputed.
        StepError: If a weight has changed between forward and backward, which torch does not detect.
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
    """The recomputed blocks of a model, until `remove` or the end of this context."""

    model: nn.Module = field(repr=False)
    names: tuple[str, ...]
    """The names of the blocks."""
    classes: str
    """The number of blocks of each class, as text."""

    def __str__(self) -> str:
        """Return a one-line description."""
        return f"recomputes {self.classes}"

    def __enter__(self) -> CheckpointedBlocks:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call `remove`."""
        self.remove()

    def remove(self) -> None:
        """Undo the checkpointing: the blocks store their activations again. A second call is a no-op."""
        modules = dict(self.model.named_modules())
        for name in self.names:
            if name in modules:
                _release(modules[name])


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a module is itself a block of `checkpoint_activations`."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), _Recomputed)


def release_all(model: nn.Module) -> None:
    """Undo the activation checkpointing of all blocks in a model."""
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
    """Holds the `forward` that replaces that of a module.

    The replacement is an instance attribute of the module and a method of this object, so that copies and pickles of
    the module refer to themselves. Hooks and the gathering of shards run outside of a forward and are not repeated.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module = module
        self.own = own
        """The earlier `forward` attribute of the module; None if it used the forward of its class."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward now, and again in the backward."""
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            n = len(values) - len(names)
            return self.plain(*values[:n], **dict(zip(names, values[n:], strict=True)))

        values = (*args, *kwargs.values())  # torch checks the versions of positional tensors only
        if torch.compiler.is_compiling():
            # A compiled graph changes each buffer only once; in torch 2.8 the recomputation changes it again.
            if torch.__version__ < "2.13" and any(True for _ in self.module.buffers()):
                return self.plain(*args, **kwargs)
            return checkpoint(run, *values, use_reentrant=False)
        first = _FirstForward(self.module)
        output = checkpoint(run, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), first))
        first.done()
        return output


_PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of attributes without a tensor, such as a mode, a counter or a dropout rate."""


class _FirstForward:
    """Context manager for the repetition of a forward: restores the module's state from before the first forward.

    Made before the forward; `done` is called after it. Inside the context the module has its earlier modes and plain
    attributes and copies of its earlier buffers, so that each of them changes only once. Running statistics are copied
    from their current values: in train mode the output of a norm layer does not depend on them.
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
        """Drop the copies of buffers that the forward has not changed."""
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
    """Return whether a forward updates running statistics; this does not increase their version counters."""
    return module.training and has_running_statistics(module)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _check_free(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Raise SettingError for compiled modules, and for blocks that are, contain or are inside recomputed ones."""
    for name, module in model.named_modules():
        if is_compiled(module):
            what = f"checkpoint_activations, and {name or type(module).__name__} is compiled already"
            raise SettingError(what, want="checkpoint_activations(model, ...) before torch.compile")
    for name, around, module in _pairs(model, found):
        if is_recomputed(module):
            what = f"checkpoint_activations: {name}{'' if name == around else f' of {around}'} is recomputed already"
            raise SettingError(what, fix="remove() of what the first call returned")


def _pairs(model: nn.Module, found: dict[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (name, block name, module) for each module that is, contains or is inside a block."""
    for around, block in found.items():
        for name, module in block.named_modules(prefix=around):
            yield name, around, module
    for name, module in model.named_modules():
        for around, block in found.items():
            if any(inner is block for inner in module.modules()):
                yield name, around, module
