"""What one `fit` starts anew, and what it gives back where it is refused before its first update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import SettingError, message, user_line
from trainwright.core.progress import Counters
from trainwright.fit.per_rank_state import align_weights
from trainwright.modules.modes import unnoticed
from trainwright.update.hooks import let_go_of_memory
from trainwright.update.owner import Owner


@contextmanager
def stage(owner: Owner, *, resumes: bool, epochs: int | None = None) -> Iterator[None]:
    """Start a stage; where an error comes before its loop, the trainer is afterwards as the last `fit` left it.

    SettingError where a `fit` of the same trainer is under way.
    """
    between = owner.between
    if between.under_way:
        what, fix = "fit() from within a fit() of the same Trainer", "another Trainer, with a model of its own"
        raise SettingError(message(what, want="one fit at a time", fix=fix))
    between.under_way, between.refused_to = True, _Before(owner)
    try:
        _begin(owner, resumes=resumes)
        between.notes += _note_a_loop(owner, epochs)
        align_weights(owner)  # not before: trained weights are put back where nobody has written to averaged ones
        yield
    except BaseException:
        if between.refused_to is not None:
            between.refused_to.put_back(owner)
        raise
    finally:
        between.under_way, between.refused_to = False, None
        let_go_of_memory(owner.hooks)


def _begin(owner: Owner, *, resumes: bool) -> None:
    """Start the counters of a `fit` anew, the totals over all stages apart, and the rates from the optimizer's own.

    A `fit` that resumes after one that failed is the same stage once more.
    """
    counters, between = owner.counters, owner.between
    between.passed_over = False
    owner.ledger.reset()
    if between.begun:
        again = between.failed and resumes
        fresh = Counters(
            stage=counters.stage + (not again),
            earlier_updates=counters.earlier_updates + (0 if again else counters.updates),
            earlier_epochs=counters.earlier_epochs + (0 if again else counters.epoch),
        )
        counters.load_state_dict(fresh.state_dict())
    if between.rates is not None:
        between.rates.restore_groups()
    between.notes = ()
    if between.shown is not None:
        if not between.shown.put_back():
            between.notes = ("the weights were changed since the last fit: they are trained, not the ones it averaged",)
        between.shown = None


def _note_a_loop(owner: Owner, epochs: int | None) -> tuple[str, ...]:
    """The header's line, once, where a line of the user's calls `fit(epochs=1)` again and a slot spans one `fit`."""
    between, line = owner.between, user_line()
    looped = epochs == 1 and between.called == line != ""
    anew = [name for name in ("schedule", "early_stopping") if getattr(owner, name) is not None]
    if between.called != "-":
        between.called = "-" if looped and anew else line if epochs == 1 else ""
    if not looped or not anew:
        return ()
    verb = "starts" if len(anew) == 1 else "start"
    slots = " and ".join(anew).replace("_", " ")
    return (f"fit(epochs=1) in a loop ({line}): the {slots} {verb} anew with each fit: write fit(epochs=n)",)


class _Before:
    """What the last `fit` has left: counters, rates, and the weights that count in the model's place."""

    def __init__(self, owner: Owner) -> None:
        self._counters = owner.counters.state_dict()
        self._rates, self._shown = owner.between.rates, owner.between.shown
        self._groups = [
            (group, {key: _plain(value) for key, value in group.items() if key != "params"})
            for optimizer in owner.optimizers.values()
            for group in optimizer.param_groups
        ]
        tensors = [] if self._shown is None else [*owner.model.parameters(), *owner.model.buffers()]
        self._weights = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back(self, owner: Owner) -> None:
        """Make it so again."""
        between = owner.between
        owner.counters.load_state_dict(self._counters)
        taken = _Taken(self._groups)
        between.rates = taken if taken.changed else self._rates
        if self._shown is None or between.notes:  # weights that were changed meanwhile are the user's
            return
        self._shown.leave()
        between.shown = self._shown
        with unnoticed(tensor for tensor, _ in self._weights), torch.no_grad():  # `leave` has noted them as they are
            for tensor, value in self._weights:
                tensor.copy_(value)


class _Taken:
    """Rates that a schedule's `restore_groups` had given to the groups and that were taken from them again."""

    def __init__(self, groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self.changed = [
            (group, key, _plain(group[key]), value)
            for group, before in groups
            for key, value in before.items()
            if key in group and _plain(group[key]) != value
        ]
        for group, key, _, value in self.changed:
            _set(group, key, value)

    def restore_groups(self) -> None:
        """Give them to the groups once more, unless others were set by hand since."""
        for group, key, given, value in self.changed:
            if _plain(group[key]) == value:
                _set(group, key, given)


def _plain(value: Any) -> Any:
    """A setting of a group, a rate in a tensor as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor):
        group[key].fill_(value)  # a rate in a tensor is filled and never replaced
    else:
        group[key] = value
