"""Recompute the insides of a model's blocks in the backward instead of keeping them: activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainwright.core.checks import check_whole
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import is_compiled, is_operator, operator_name
from trainwright.modules.dry_run import Given, PassMemory, measured, somewhere
from trainwright.modules.matching import Blocks, described, find_blocks
from trainwright.modules.replay import Replay

Policy = Literal["matmuls"] | Collection[Any] | Callable[..., Any]
"""What is kept all the same: see `checkpoint_activations`."""
_MATMULS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "_scaled_dot_product_efficient_attention",
)
"""Operations of aten whose results take long to compute again."""


@suggests
def checkpoint_activations(
    model: nn.Module, blocks: Blocks | None = None, *, policy: Policy | None = None, every: int = 1
) -> Checkpointed:
    """Keep only the inputs of blocks for the backward, which computes their insides again; return what undoes it.

    `blocks`: a class of modules or several, names or globs over the names of modules ("layers.*"), or a predicate of
    name and module; None: the classes with modules inside that the model has three times or more. Of blocks inside
    one another the outer ones count. `every=2` takes every second one. `policy`: what is kept all the same:
    "matmuls" keeps the results of matrix products, convolutions and attention; a collection of operations
    (`torch.ops.aten.mm.default`), or a function as torch's `create_selective_checkpoint_contexts` takes it.

    Gradients are the same to the last bit: random draws (torch, Python, NumPy) are repeated, autocast is as it was,
    running statistics and other buffers move once, and attributes that a forward sets are set once. A forward whose
    result hangs on anything else that changes, or that adds to a list, is not for recomputing. StepError where a
    weight has changed between forward and backward, which torch would not notice.

    The model is changed in place, without wrappers: names in its `state_dict` stay. Passes without gradients run as
    before. SettingError where nothing is found, a module is compiled already, or is recomputed already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(message(f"checkpoint_activations({model!r})", want="a torch.nn.Module"))
    check_whole(every, f"checkpoint_activations(every={every!r})", fix="every=2: each second")
    keeps = _checked_policy(policy)
    found = dict(list(find_blocks(model, blocks, "checkpoint_activations").items())[::every])
    _check_free(model, found)
    for module in found.values():
        vars(module)["forward"] = _Recomputed(module, vars(module).get("forward"), keeps).forward
    return Checkpointed(model, tuple(found), described(found), _policy_name(policy))


@dataclass(frozen=True)
class Checkpointed:
    """Blocks of a model that are recomputed; leaving it as a context, or `remove`, has them kept again."""

    model: nn.Module = field(repr=False)
    names: tuple[str, ...]
    """The names of the blocks."""
    what: str
    """How many of which classes."""
    policy: str
    """What is kept of their insides."""

    def __str__(self) -> str:
        """One line."""
        return f"recomputes {self.what}, keeps {self.policy} of their insides"

    def __enter__(self) -> Checkpointed:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Have the blocks kept again."""
        self.remove()

    def remove(self) -> None:
        """Have the insides of the blocks kept again; nothing happens where that is so already."""
        modules = dict(self.model.named_modules())
        for name in self.names:
            if name in modules:
                release(modules[name])

    def memory(self, *inputs: Any, **keywords: Any) -> Saving:
        """Return what `model(*inputs, **keywords)` and its backward take, with the blocks recomputed and without.

        On copies of the model, without a trace: on the meta device, or where the model cannot run there on its own,
        with a copy of its weights.
        """
        given = Given(inputs, keywords)

        def both(on: torch.device | None) -> list[PassMemory]:
            plain = measured(self.model, given, on=on, prepare=lambda run: release_all(run.twin))
            return [plain, measured(self.model, given, on=on)]

        (plain, recomputed), note = somewhere(both)
        return Saving(plain, recomputed, note)


@dataclass(frozen=True)
class Saving:
    """What recomputing gives and costs."""

    plain: PassMemory
    recomputed: PassMemory
    note: str = ""
    """Why it was not measured on the meta device, where it was not."""

    @property
    def kept(self) -> int:
        """Bytes that a forward leaves for the backward, and no longer does."""
        return self.plain.kept - self.recomputed.kept

    @property
    def operations(self) -> float:
        """Floating-point operations of forward and backward, as a multiple of those without recomputing."""
        return self.recomputed.flops / self.plain.flops if self.plain.flops else 1.0

    def __str__(self) -> str:
        """One line."""
        plain, now = self.plain, self.recomputed
        share = f" ({self.kept / plain.kept:.0%} less)" if plain.kept else ""
        peak = f"peak {now.peak:,} instead of {plain.peak:,}"
        return f"{now.kept:,} bytes kept for the backward instead of {plain.kept:,}{share}, {peak}, " + (
            f"{self.operations:.2f} times the operations"
        )


def is_recomputed(module: nn.Module) -> bool:
    """Whether `checkpoint_activations` holds for this very module."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), _Recomputed)


def release(module: nn.Module) -> None:
    """Have the insides of one module kept again."""
    if is_recomputed(module):
        own = vars(module)["forward"].__self__.own
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def release_all(model: nn.Module) -> None:
    """Have the insides of all modules in a model kept again."""
    for module in model.modules():
        release(module)


class _Recomputed:
    """Has the `forward` that stands in the place of a module's own.

    It lies among the module's own attributes, bound to this object, so that copies and pickles of the module refer to
    themselves; and what is around a forward, hooks and the gathering of shards, is not repeated with it.
    """

    def __init__(
        self, module: nn.Module, own: Callable[..., Any] | None, keeps: Callable[..., Any] | None = None
    ) -> None:
        self.module = module
        self.own = own
        """The forward that the instance had before, where it had one of its own."""
        self.keeps = keeps
        """As `create_selective_checkpoint_contexts` takes it; None: nothing."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, and again in the backward."""
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            n = len(values) - len(names)
            return self.plain(*values[:n], **dict(zip(names, values[n:], strict=True)))

        values = (*args, *kwargs.values())  # torch watches over tensors that are given by position alone
        if torch.compiler.is_compiling():  # the graph has each change of a buffer once
            if self.keeps is None:
                return checkpoint(run, *values, use_reentrant=False)
            contexts = partial(create_selective_checkpoint_contexts, self.keeps)
            return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)
        replay = Replay(self.module)
        output = checkpoint(run, *values, use_reentrant=False, context_fn=partial(_contexts, replay, self.keeps))
        replay.forward_done()
        return output


def _contexts(
    replay: Replay, keeps: Callable[..., Any] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if keeps is None:
        return nullcontext(), replay
    first, again = create_selective_checkpoint_contexts(keeps)
    return first, _Both(replay, again)


class _Both:
    """Two contexts in one, to be entered again for each backward."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._outer.__exit__(*error)


def _keeps_listed(operations: frozenset[Any], _: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return operation in operations


def _keeps_named(names: frozenset[str], _: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    kind, _, name = operator_name(operation).partition("::")
    return kind == "aten" and name.split(".")[0] in names


def _checked_policy(policy: Policy | None) -> Callable[..., Any] | None:
    if policy is None:
        return None
    if policy == "matmuls":
        return partial(_keeps_named, frozenset(_MATMULS))
    if isinstance(policy, Collection) and not isinstance(policy, str) and policy:
        wrong = [one for one in policy if not is_operator(one)]
        if not wrong:
            return partial(_keeps_listed, frozenset(policy))
    elif callable(policy):
        return policy
    raise SettingError(
        f"checkpoint_activations(policy={policy!r})",
        want='None, "matmuls", operations such as torch.ops.aten.mm.default, or a function that torch asks',
        fix='policy="matmuls"',
    )


def _policy_name(policy: Policy | None) -> str:
    if policy is None:
        return "nothing"
    if isinstance(policy, str):
        return f"the results of {policy}"
    return "what a function says" if callable(policy) else "the results of " + ", ".join(map(str, policy))


def _check_free(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Refuse blocks in which something is recomputed or compiled already."""
    for name, module in model.named_modules():
        if is_compiled(module):
            what = f"checkpoint_activations, and {name or type(module).__name__} is compiled already"
            raise SettingError(what, want="checkpoint_activations(model, ...) before torch.compile")
    for name, around, module in _pairs(model, found):
        if is_recomputed(module):
            what = f"checkpoint_activations: {name}{'' if name == around else f' of {around}'} is recomputed already"
            raise SettingError(what, fix="remove() of what the first call returned")


def _pairs(model: nn.Module, found: dict[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Each module that lies in a block, is one, or has one inside, with its name and that of the block."""
    for around, block in found.items():
        for name, module in block.named_modules(prefix=around):
            yield name, around, module
    for name, module in model.named_modules():
        for around, block in found.items():
            if any(inner is block for inner in module.modules()):
                yield name, around, module
