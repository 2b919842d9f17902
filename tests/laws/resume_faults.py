"""What a resume really forgets: each function plants one fault in the library, by a monkeypatch that stays."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from trainwright import Trainer
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.core import rng
from trainwright.core.progress import Counters
from trainwright.core.rng import RngCheckpoint, set_random_state
from trainwright.data.data_state import Generators
from trainwright.data.dataloader import workers
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.data.row_batches import Batches
from trainwright.fit import rollback, saving
from trainwright.fit.boundary import Boundary
from trainwright.fit.early_stopping import EarlyStopper
from trainwright.fit.rollback import Rollback
from trainwright.observers.journal import Journal
from trainwright.optim.averaging import AveragedWeights
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.stepped import SteppedSchedule
from trainwright.schedules.table import TableSchedule
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.snapshot import Buffers

from .faults import around, without

# Random states.


def _not_put_back(patch, get, put):
    whole = rollback.set_random_state

    def changed(saved):
        now = get()
        whole(saved)
        put(now)

    for module in (rollback, rng):
        patch.setattr(module, "set_random_state", changed)


def pythons_random_state_is_forgotten(patch):
    _not_put_back(patch, random.getstate, random.setstate)


def numpys_random_state_is_forgotten(patch):
    _not_put_back(patch, np.random.get_state, np.random.set_state)


def torchs_random_state_is_forgotten(patch):
    _not_put_back(patch, torch.get_rng_state, torch.set_rng_state)


def the_state_at_the_epochs_start_is_that_of_the_boundary(patch):
    around(
        patch,
        RngCheckpoint,
        "load_state_dict",
        after=lambda self, tree: setattr(self, "epoch_start_state", tree["now"]),
    )


def the_state_after_the_skipping_is_kept(patch):
    def opened(self, opens=Rollback.open_epoch):
        iterator = opens(self)
        if self._trainer._counters.batch:  # resumed inside the epoch: as if only the order had been drawn
            set_random_state(self._random.epoch_start_state)
        return iterator

    patch.setattr(Rollback, "open_epoch", opened)


def a_pause_after_the_resume_draws_from_anywhere(patch):
    without(patch, RngCheckpoint, "restore_before_opening")


def what_the_fetch_has_drawn_is_saved(patch):
    restore = Rollback.restore
    patch.setattr(Rollback, "restore", lambda self: {name: t for name, t in restore(self).items() if name != "random"})


# Where the data stand.


def _skips(patch, source, more):
    whole = source.epoch
    patch.setattr(source, "epoch", lambda self, epoch, skip=0: whole(self, epoch, skip and max(skip + more, 0)))


def a_batch_is_lost(patch):
    _skips(patch, Batches, 1)


def a_batch_is_trained_on_twice(patch):
    _skips(patch, LoaderBatches, -1)


def a_loaders_own_generator_is_forgotten(patch):
    without(patch, Generators, "_set_generators")


def the_workers_random_states_are_forgotten(patch):
    without(patch, workers, "_restore_states")


def the_window_is_cut_where_it_was_left(patch):
    def less(self, tree):
        self.batch -= self.batch > 0

    around(patch, Counters, "load_state_dict", after=less)


# Parts.


def the_optimizers_steps_are_counted_from_0(patch):
    def anew(self, tree):
        for value in self.state.values():
            value["step"].zero_()

    around(patch, torch.optim.Adam, "load_state_dict", after=anew)


def the_moments_are_forgotten(patch):
    around(patch, torch.optim.Adam, "load_state_dict", after=lambda self, tree: self.state.clear())


def the_buffers_are_forgotten(patch):
    def anew(self, *_, **__):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()

    around(patch, nn.Module, "load_state_dict", after=anew)


def the_average_starts_anew(patch):
    whole = saving.parts_of

    def forgets(run, between):
        parts = whole(run, between)
        average = {"state_dict": parts["average"].state_dict, "load_state_dict": lambda tree: None}
        return parts | {"average": SimpleNamespace(**average)}

    patch.setattr(saving, "parts_of", forgets)


def the_average_forgets_how_many_it_has_taken(patch):
    around(patch, AveragedWeights, "load_state_dict", after=lambda self, tree: setattr(self, "taken", 0))


def the_scale_is_forgotten(patch):
    without(patch, LossScaler, "load_state_dict")


def the_scalers_count_of_good_updates_starts_anew(patch):
    around(patch, LossScaler, "load_state_dict", after=lambda self, tree: setattr(self, "_good", 0))


def patience_starts_anew(patch):
    around(patch, EarlyStopper, "load_state_dict", after=lambda self, tree: setattr(self, "waited", 0))


def the_best_is_forgotten(patch):
    without(patch, CheckpointManager, "load_state_dict")


def the_plateau_is_forgotten(patch):
    def forgetful(self, tree):
        for scheduled in self._groups:
            scheduled.written.clear()

    patch.setattr(SteppedSchedule, "load_state_dict", forgetful)


def the_schedule_starts_anew(patch):
    whole = TableSchedule.apply

    def late(self, updates):
        self.first = getattr(self, "first", updates)
        whole(self, updates - self.first)

    patch.setattr(TableSchedule, "apply", late)


def the_sums_of_the_epoch_are_forgotten(patch):
    without(patch, LossTracker, "load_state_dict")


def the_history_starts_anew(patch):
    around(patch, saving.RunProgress, "load_state_dict", after=lambda self, *_: self._run.trainer.history.clear())


def the_users_state_is_forgotten(patch):
    without(patch, saving._TrainerStatePart, "load_state_dict")


def it_is_forgotten_when_was_validated(patch):
    def never(self, tree):
        self.validated_at, self.last_boundary = -1, 0

    around(patch, Counters, "load_state_dict", after=never)


def a_pause_that_was_due_is_left_out(patch):
    around(patch, Boundary, "start", after=lambda self, **_: setattr(self.run, "unfinished_boundary", ""))


def what_is_saved_misses_the_last_update(patch):
    """Saves what a copy would hold that is taken without waiting for the end of the update."""
    kept = {}

    def copy(self, window):
        kept.update({name: value.clone() for name, value in self.model.state_dict().items()})

    around(patch, Trainer, "update", before=copy)
    whole = saving.gather
    patch.setattr(saving, "gather", lambda parts: whole(parts) | ({"model": dict(kept)} if kept else {}))


def an_error_leaves_the_buffers_moved(patch):
    without(patch, Buffers, "restore")


def an_error_leaves_the_random_states_moved(patch):
    what_the_fetch_has_drawn_is_saved(patch)


# The journal.


def the_journal_is_not_cut(patch):
    without(patch, Journal, "resume_at")


def the_journal_is_cut_by_updates_alone(patch):
    whole = Journal.resume_at
    patch.setattr(Journal, "resume_at", lambda self, update, skipped=0, **how: whole(self, update, 1 << 60, **how))


def the_journal_keeps_lines_back(patch):
    whole = Journal._open

    def buffered(self):
        whole(self)
        self._file.reconfigure(line_buffering=False)

    patch.setattr(Journal, "_open", buffered)
