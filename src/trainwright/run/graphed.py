"""Makes updates by replaying the recording of one, where that computes the same; the others as ever.

A window whose batches have the form of earlier ones is run as ever for the first updates, while what it takes from the
host is watched. Then it is recorded: whole (level L3), or up to its gradients (L2). What a recording has baked in is
compared where it may have changed: before every replay the settings of the optimizers, and all else after a pause of
the loop, or before every replay where code of the user's own runs between two updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from trainwright.run.graphable import not_possible, read_by_steps, watches, why_failed, why_not, why_not_whole
from trainwright.run.recorded import Recorded, Unfit, apart, fixed, on_device, spec_of
from trainwright.runtime import facts
from trainwright.runtime.graphs import LAUNCH_BOUND, RECORDERS, Timed
from trainwright.runtime.trial import FAR, Trial
from trainwright.runtime.walking import tensors_in
from trainwright.slots.rates import TableRates
from trainwright.slots.window import Window

if TYPE_CHECKING:
    from trainwright.run.behind import Behind
    from trainwright.run.run import Run

WARM_UP = 3
"""Updates of each form of windows that are run as ever before one is recorded."""
FORMS = 4
"""Forms of windows that are recorded: each holds memory of its own."""
MANY = 64
"""Forms of windows that are told apart."""
AGAIN = 3
"""Recordings in a row, each worth nothing soon after, from which on there is none of that level."""
SOON = 2
"""Replays up to which a recording was not worth its making."""
SMALL = 1 << 20
"""Elements up to which a tensor of the user's own is taken to be written to by a step."""
UNDECIDED = "nothing has moved in the update that was tried"


class _Form:
    """Windows of one form: how often they came, and the recording of one."""

    def __init__(self) -> None:
        self.seen = 0
        self.recorded: Recorded | None = None
        self.settings: list[Any] = []
        """Those of the optimizers when it was recorded."""


class Told(NamedTuple):
    """What is left of graphs when their run is over."""

    level: str
    text: str

    def __str__(self) -> str:
        return self.text


class Graphed:
    """Stands in the place of a trainer's `update` while a run lasts."""

    def __init__(self, run: Run, behind: Behind | None) -> None:
        self._run, self._behind, self._owner = run, behind, run.owner
        self._requires = run.owner.fast.cuda_graphs == "require"
        self._forms: dict[Any, _Form] = {}
        self._watched = Timed(run.owner.device)
        self._unsure = True
        """Whether anything may have changed since the last update beside the optimizers' settings."""
        self._always_unsure = run.after_update is not None or any(map(watches, run.owner.observers))
        self._in_vain = 0
        self._known: list[Any] | None = None
        """What recordings have baked in beside the settings of optimizers, as it was when it was looked at last."""
        self._since = self._restless = 0
        """Updates since it was found changed, and how often in a row that came soon."""
        self._written: dict[int, Tensor] = {}
        """What updates write to beside the weights: tensors of the user's own, say."""
        self._last: Recorded | None = None
        """Whose gradients are attached to the parameters."""
        self.not_whole = " and ".join(dict.fromkeys(why_not_whole(run)))
        """Why updates are recorded up to their gradients alone; empty where they are recorded whole."""
        self.off = ""
        """Why nothing is recorded; empty where something is, or will be."""
        self.replays = 0
        """Updates that were made by a replay."""

    def update(self, window: Window) -> Any:
        """Make the update of a window."""
        if self.off:
            return self._owner.update(window)
        try:
            here = on_device(window, self._owner.device)
            spec = tuple(window.rows), spec_of(here.batches), spec_of(here.counts)
        except Unfit as unfit:
            self._give_up(str(unfit))
            return self._owner.update(window)
        if spec not in self._forms and len(self._forms) == MANY:
            self._give_up(f"batches come in more than {MANY} forms")
            return self._owner.update(window)
        form = self._forms.setdefault(spec, _Form())
        self._look(form)
        if form.recorded is None and not self._may_record(form):
            return self._as_ever(here, form, given=window)
        if form.recorded is None and not self._record(here, form):
            return self._as_ever(here, form, given=window)
        assert form.recorded is not None
        self.replays += 1
        if self._last is not form.recorded or self._always_unsure:  # other code may have dropped them
            form.recorded.attach()
            self._last = form.recorded
        return form.recorded.replay(here)

    def pause(self) -> None:
        """Take note that code of others may have run, and changed anything."""
        self._unsure, self._last = True, None

    def let_go(self) -> None:
        """Give the memory of all recordings back; gradients that lie in it are copied out."""
        self._owner.between.graphs = Told(self.level, str(self))
        for form in self._forms.values():
            if form.recorded is not None:
                form.recorded.detach()
        self._forms, self._last = {}, None

    @property
    def level(self) -> str:
        """L3: updates are recorded whole; L2: up to their gradients; L1: not at all."""
        if self.off:
            return "L1"
        return "L2" if self.not_whole else "L3"

    def __str__(self) -> str:
        if self.off:
            return f"no CUDA graph: {self.off}"
        made = sum(form.recorded is not None for form in self._forms.values())
        count = f"{made} recorded, {self.replays} updates replayed"
        what = f"forward and backward alone, since {self.not_whole}" if self.not_whole else "whole updates"
        return f"CUDA graphs of {what}: {count}"

    def _as_ever(self, window: Window, form: _Form, *, given: Window) -> Any:
        """Run an update by the code itself; the first ones under watch. `given`: the window as it came."""
        self._owner.ledger.window, self._last = window, None
        form.seen += 1
        if form.seen > WARM_UP:
            return self._owner.update(window)
        met: list[Tensor] = []
        own = [(tensor, tensor._version) for tensor in tensors_in(given.batches) if not tensor.is_inference()]
        before, drawn = self._attributes(met), facts.draws(self._owner.device)
        versions = [(tensor, tensor._version) for tensor in met if not tensor.is_inference()]
        with self._watched.update():
            loss = self._owner.update(window)
        self._written.update({id(tensor): tensor for tensor, version in versions if tensor._version != version})
        moved = self._moved(before, drawn)
        if any(tensor._version != version for tensor, version in own):
            moved = moved or "an update writes to its batch, which is no copy"
        if moved:
            self._give_up(moved)
        return loss

    def _moved(self, before: facts.Facts, drawn: Callable[[], str]) -> str:
        """Say what an update has moved on the host, which no replay would; "" for nothing."""
        moved = facts.changed(before, self._attributes())
        if moved:
            return f"an update changes {moved}"
        source = drawn()
        return f"an update draws from {source}" if source else ""

    def _may_record(self, form: _Form) -> bool:
        """Whether windows of this form have come often enough, and a recording pays."""
        if self.off or form.seen < WARM_UP:
            return False
        why = next(why_not(self._run), "")
        if why:  # it has come to be so since the run began
            self._give_up(why)
            return False
        if sum(one.recorded is not None for one in self._forms.values()) >= FORMS:
            return False
        share = self._watched.share
        repeats = torch.are_deterministic_algorithms_enabled()  # and a clock never does
        if share < LAUNCH_BOUND and not (self._requires or repeats):
            self._give_up(f"the device is what updates wait for: the host takes {share:.2f} of its time")
        return not self.off

    def _look(self, form: _Form) -> None:
        """Forget recordings of what is no more as it was."""
        self._since += 1
        if self._unsure or self._always_unsure:
            self._unsure = False
            self._compare()
        if form.recorded is not None and form.settings != self._settings():
            self._forget(form)
            if self._in_vain == AGAIN and self.not_whole:
                self._give_up("the loss scale changes from update to update")
            elif self._in_vain == AGAIN:
                self._in_vain, self.not_whole = 0, "the optimizer's settings change from update to update"

    def _compare(self) -> None:
        """Begin anew, under watch, where anything has changed that recordings have baked in."""
        known, self._known = self._known, self._baked()
        if known is None or known == self._known:
            return
        for one in self._forms.values():
            one.seen, one.recorded = 0, None  # new weights get their states in the updates that come
        self._restless = self._restless + 1 if self._since <= WARM_UP + SOON else 0
        self._since = 0
        if self._restless >= AGAIN:
            what = facts.changed(known[0], self._known[0]) or "where the weights lie, or what is trained,"
            self._give_up(f"{what} changes from update to update, and a step may read it")

    def _forget(self, form: _Form) -> None:
        assert form.recorded is not None
        self._in_vain = self._in_vain + 1 if form.recorded.replays <= SOON else 0
        form.recorded = None

    def _record(self, window: Window, form: _Form) -> bool:
        """Record the update of a window, whole or up to its gradients; whether that could be done."""
        run, whole = self._run, not self.not_whole
        trial = self._trial(whole=whole)
        before, drawn = self._attributes(), facts.draws(self._owner.device)
        again = False
        try:
            run.gradients.zero()
            recorded = Recorded(run, self._behind, window, whole=whole)
            form.settings, self._known = self._settings(), self._baked()
            found = self._tried(recorded, window, trial) if trial.fits else ""
            found = found or self._moved(before, drawn)
            form.recorded = None if found else recorded
        except Exception as error:
            found, may_be_less = why_failed(error)
            again = whole and may_be_less
            for one in self._forms.values():  # they would go on to draw from a random state that others have left
                one.recorded = None
        finally:
            trial.put_back()
            window.begin()
            window.begun = False
        if again:  # out of the handler, which holds what the failed recording has made
            self.not_whole = found
            return self._record(window, form)
        if found:
            run.gradients.zero()
            form.seen = 0  # where nothing has moved, the next ones tell
        if found not in ("", UNDECIDED):
            self._give_up(found)
        return not found

    def _trial(self, *, whole: bool) -> Trial:
        """All that an update may change, kept; the rates lie on the device from now on, where it is a whole one."""
        if self._behind is not None and whole and isinstance(self._run.rates, TableRates):
            self._behind.follow()
        return Trial(self._tensors(), self._owner.device, measured=len(list(self._owner.model.parameters())))

    def _tried(self, recorded: Recorded, window: Window, trial: Trial) -> str:
        """Say what a replay computes otherwise than the code itself, or ""; all is left as it was."""
        recorded.attach()
        for make in (recorded.replay, self._owner.update):
            tried = fixed(window, self._owner.device)  # a step may write to its batch
            with trial.one_way(), apart(self._run, tried):
                make(tried)
            self._run.gradients.zero()
        recorded.replays = 0
        if self._behind is not None:
            self._behind.counted = None
        difference = trial.difference
        if difference is None:
            return UNDECIDED
        if difference <= FAR:
            return ""
        return f"a replay computes otherwise: the weights end {difference:.2g} of an update's way apart"

    def _give_up(self, why: str) -> None:
        """Record nothing from now on; SettingError where graphs are required."""
        self.off = why
        self._forms.clear()
        if self._requires:
            raise not_possible((why,))

    def _settings(self) -> list[Any]:
        """What a recording has baked in of settings that may change with each update: of whole ones the optimizers'."""
        if self._behind is None:  # the scale lies on the host
            return [] if self._run.scaler is None else [self._run.scaler.factor()]
        if self.not_whole:
            return []
        return facts.settings(list(self._owner.optimizers.values()), rates=not self._behind.reads_rates)

    def _baked(self) -> list[Any]:
        owner = self._owner
        optimizers = list(owner.optimizers.values())
        lies = [*facts.addresses(owner.model, optimizers), *facts.around_steps(optimizers)]
        hooks = list(facts.hooks_of_others(owner.model))
        return [self._attributes(), lies, hooks, id(self._run.gradients)]

    def _attributes(self, met: list[Tensor] | None = None) -> facts.Facts:
        owner = self._owner
        return facts.attributes(*read_by_steps(owner), device=owner.device, beside=owner, met=met)

    def _tensors(self) -> list[Tensor]:
        """All that an update may write to, as far as can be known: `.data` is written to without a trace."""
        owner = self._owner
        found = [*owner.model.parameters(), *owner.model.buffers(), *self._run.gradients.parameters]
        found += self._run.steppers.flags if self._behind is None else self._behind.tensors
        found += self._written.values()
        met: list[Tensor] = []
        self._attributes(met)
        found += [tensor for tensor in met if isinstance(tensor, Parameter) or tensor.numel() <= SMALL]
        for optimizer in owner.optimizers.values():
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, Tensor)]
        return list({id(tensor): tensor for tensor in found}.values())


def graphed(run: Run, behind: Behind | None) -> Graphed | None:
    """Return what replays updates, None where nothing can be recorded; SettingError where that is required."""
    owner = run.owner
    asked = owner.fast.cuda_graphs
    why = tuple(why_not(run)) if asked else ("cuda_graphs=False",)
    if why and asked == "require":
        raise not_possible(why)
    owner.between.graphs = None
    if why:
        owner.between.graphs = f"no CUDA graph: {'; '.join(why)}" if owner.device.type in RECORDERS else None
        return None
    made = Graphed(run, behind)
    owner.between.graphs = made
    return made
