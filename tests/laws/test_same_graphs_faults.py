"""The tests of captured updates must fail where what they guard is broken: each fault is planted, and must be seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from laws import test_same_graphs as same
from laws import test_same_graphs_changes as changes
from laws import test_same_graphs_parts as parts
from laws import test_same_graphs_refused as refused
from laws.emulated_graph import EmulatedGraph, emulate
from laws.graph_runs import both
from trainwright import StepLR, Updates
from trainwright.run import graphed, recorded
from trainwright.run.graphed import Graphed
from trainwright.run.recorded import Recorded
from trainwright.runtime import facts, graphs
from trainwright.runtime.reading import Reader
from trainwright.runtime.trial import Trial
from trainwright.slots import device_side
from trainwright.slots.rates import TableRates

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def guards_no_settings(patch: Patch) -> None:
    patch.setattr(Graphed, "_settings", lambda self: [])


def guards_no_attributes(patch: Patch) -> None:
    patch.setattr(facts, "attributes", lambda *_, **__: {})


def guards_no_addresses(patch: Patch) -> None:
    patch.setattr(facts, "addresses", lambda *_: [])


def looks_at_the_size_of_containers_alone(patch: Patch) -> None:
    patch.setattr(Reader, "_container", lambda self, value, depth: len(value))


def follows_no_functions(patch: Patch) -> None:
    patch.setattr(Reader, "_function", lambda self, function, depth: None)


def looks_once(patch: Patch) -> None:
    patch.setattr(Graphed, "pause", lambda self: None)


def trusts_observers(patch: Patch) -> None:
    patch.setattr(graphed, "watches", lambda observer: False)


def records_at_once_after_a_change(patch: Patch) -> None:
    real = Graphed._compare

    def compare(self: Graphed) -> None:
        seen = [form.seen for form in self._forms.values()]
        real(self)
        for form, count in zip(self._forms.values(), seen, strict=False):
            form.seen = count

    patch.setattr(Graphed, "_compare", compare)


def copies_no_inputs(patch: Patch) -> None:
    real = Recorded.__init__

    def init(self: Recorded, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        self._inputs = [one.clone() for one in self._inputs]

    patch.setattr(Recorded, "__init__", init)


def attaches_no_gradients(patch: Patch) -> None:
    patch.setattr(Recorded, "attach", lambda self: None)


def attaches_gradients_once(patch: Patch) -> None:
    real = Recorded.attach

    def attach(self: Recorded) -> None:
        if self.replays == 0:
            real(self)

    patch.setattr(Recorded, "attach", attach)


def stops_the_clock_at_replays(patch: Patch) -> None:
    """Each replay finds the clock where the recording found it."""
    real = EmulatedGraph.replay

    def replay(self: EmulatedGraph) -> None:
        real(self)
        for judge in made:
            judge.clock.fill_(2)

    made: list[Any] = []
    init = device_side.DeviceJudge.__init__

    def begin(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        made.append(self)

    patch.setattr(device_side.DeviceJudge, "__init__", begin)
    patch.setattr(EmulatedGraph, "replay", replay)


def notes_nothing_again(patch: Patch) -> None:
    patch.setattr(recorded, "note_again", lambda *_: None)


def feeds_metrics_what_is_overwritten(patch: Patch) -> None:
    patch.setattr("trainwright.run.heard._changed", lambda value, each: value)


def feeds_no_metrics_again(patch: Patch) -> None:
    patch.setattr("trainwright.run.heard.Heard.feed", lambda self, meters: None)


def captures_hooks(patch: Patch) -> None:
    patch.setattr(facts, "hooks_of_others", lambda model: iter(()))


def forgets_what_was_drawn(patch: Patch) -> None:
    def put_back(self: Trial) -> None:
        with torch.no_grad():
            for tensor, before in zip(self._tensors, self._before, strict=False):
                tensor.copy_(before)

    patch.setattr(Trial, "put_back", put_back)


def puts_nothing_back(patch: Patch) -> None:
    patch.setattr(Trial, "put_back", lambda self: None)


def puts_nothing_back_at_an_interrupt(patch: Patch) -> None:
    real = Trial.put_back

    def put_back(self: Trial) -> None:
        if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            real(self)

    patch.setattr(Trial, "put_back", put_back)


def compares_no_steps(patch: Patch) -> None:
    patch.setattr(facts, "around_steps", lambda optimizers: [])


def knows_no_new_groups(patch: Patch) -> None:
    real = TableRates.at
    patch.setattr(TableRates, "at", lambda self, updates: real(self, updates)[:1])


def tries_nothing(patch: Patch) -> None:
    patch.setattr(Graphed, "_tried", lambda *_: "")


def watches_no_draws(patch: Patch) -> None:
    patch.setattr(facts, "draws", lambda device: lambda: "")


def lets_the_run_be_read(patch: Patch) -> None:
    patch.setattr(recorded, "_unread", lambda run: nullcontext())


def takes_numbers_as_they_were(patch: Patch) -> None:
    real = recorded.spec_of
    for module in (graphed, recorded):  # it calls itself
        patch.setattr(module, "spec_of", lambda value: 0 if isinstance(value, float) else real(value))


CASE = ("adamw", 0.1, "each", "fp32", "none")
STEPS = ("sgd", None, "each", "fp32", "steps")
changed = changes.test_a_change_between_epochs_holds
beside = refused.test_what_a_step_does_beside_its_numbers


def baked_rate() -> None:
    """A rate that is set by hand after each epoch, and no schedule."""
    changed("lr")


def skewed_replays() -> None:
    """An update that a recording makes otherwise than the code is not replayed."""

    class Skewed(EmulatedGraph):
        def replay(self) -> None:
            super().replay()
            with torch.no_grad():
                torch._foreach_mul_(list(models[-1].parameters()), 1.5)

    models: list[Any] = []

    def skewed(patch: Patch) -> None:
        emulate(patch)
        patch.setitem(graphs.RECORDERS, "cpu", Skewed)

    def model() -> Any:
        models.append(same.net())
        return models[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laws.graph_runs.emulate", skewed)
        ran = both(graphs="auto", model=model, least=0)
    assert "a replay computes otherwise" in ran.trainer.fast_path


def with_patch(check: Callable[[Patch], None]) -> None:
    with Patch.context() as patch:
        check(patch)


SEEN_BY: dict[Callable[[Patch], None], Callable[[], Any]] = {
    guards_no_settings: baked_rate,
    guards_no_attributes: partial(changed, "an attribute"),
    guards_no_addresses: partial(changed, "a loaded optimizer"),
    looks_at_the_size_of_containers_alone: partial(changed, "a setting in a dict"),
    follows_no_functions: partial(changed, "what a function closes over"),
    looks_once: partial(changed, "dropout"),
    trusts_observers: partial(changes.test_an_observer_that_changes_something_after_updates_is_heeded, 7, "dropout"),
    records_at_once_after_a_change: partial(changes.test_a_group_that_is_added_is_trained, None),
    copies_no_inputs: partial(same.check, *CASE),
    attaches_no_gradients: partial(changes.test_gradients_are_there_after_each_update, False),
    attaches_gradients_once: partial(changes.test_gradients_are_there_after_each_update, False),
    stops_the_clock_at_replays: partial(same.check, *STEPS),
    notes_nothing_again: partial(parts.test_all_that_a_step_may_return, "named", 1),
    feeds_metrics_what_is_overwritten: parts.test_metrics_of_training_and_validation,
    feeds_no_metrics_again: parts.test_metrics_of_training_and_validation,
    captures_hooks: refused.test_a_hook_of_ones_own,
    forgets_what_was_drawn: partial(parts.test_draws_and_statistics, 1, True),
    puts_nothing_back: partial(same.check, *CASE),
    tries_nothing: skewed_replays,
    puts_nothing_back_at_an_interrupt: partial(with_patch, parts.test_an_interrupt_of_a_trial_leaves_no_trace),
    compares_no_steps: partial(changes.test_what_comes_to_run_with_each_step_runs, changes.hooked),
    knows_no_new_groups: partial(changes.test_a_group_that_is_added_is_trained, StepLR(Updates(4), 0.5)),
    watches_no_draws: partial(beside, "NumPy's random"),
    lets_the_run_be_read: partial(beside, "the progress read"),
    takes_numbers_as_they_were: refused.test_numbers_in_a_batch_that_differ_in_each,
}


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(fault: Callable[[Patch], None]) -> None:
    check = SEEN_BY[fault]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()
    check()
