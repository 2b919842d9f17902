"""What libraries leave behind, and what their evaluations change: each function plants one fault, by a monkeypatch."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from trainwright import Trainer, Window, trainer
from trainwright.core import rng
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.data.row_batches import Batches
from trainwright.evaluation import passes, predictions, weights
from trainwright.evaluation.weights import OptimizerWeights
from trainwright.fit import context, inspection
from trainwright.fit.run import Run
from trainwright.modules import modes
from trainwright.modules.modes import wake
from trainwright.optim.averaging import AveragedWeights
from trainwright.precision import autocast, mixed_precision
from trainwright.precision.mixed_precision import matmul_precisions
from trainwright.schedules import bound

from .faults import around, without


def nothing(*_, **__):
    """In the place of a context that puts something back."""
    return nullcontext()


# What is left behind in the process when `fit` is over.


def _left(patch, change):
    around(patch, context, "_release_run", after=lambda trainer, run: change(trainer))


def _nobody(*_):
    return None


def leaves_a_default_dtype(patch):
    _left(patch, lambda _: torch.set_default_dtype(torch.float64))


def leaves_a_thread_count(patch):
    _left(patch, lambda _: torch.set_num_threads(2))


def leaves_autocast_on(patch):
    _left(patch, lambda _: torch.set_autocast_enabled("cpu", True))


def leaves_the_autocast_cache_off(patch):
    _left(patch, lambda _: torch.set_autocast_cache_enabled(False))


def leaves_an_autocast_open(patch):
    _left(patch, lambda _: torch.autocast_increment_nesting())


def leaves_deterministic_algorithms_on(patch):
    _left(patch, lambda _: torch.use_deterministic_algorithms(True, warn_only=True))


def leaves_a_matmul_precision(patch):
    _left(patch, lambda _: torch.set_float32_matmul_precision("medium"))


def leaves_the_precision_of_a_backend(patch):
    without(patch, mixed_precision, "matmul_precisions", [])


def leaves_gc_off(patch):
    _left(patch, lambda _: gc.disable())


def leaves_a_signal_handler(patch):
    _left(patch, lambda _: signal.signal(signal.SIGTERM, _nobody))


def leaves_a_warnings_filter(patch):
    _left(patch, lambda _: warnings.filterwarnings("ignore", "nothing"))


def leaves_an_excepthook(patch):
    _left(patch, lambda _: setattr(sys, "excepthook", _nobody))


def leaves_a_logging_handler(patch):
    _left(patch, lambda _: logging.getLogger().addHandler(_HANDLER))


def leaves_a_variable_in_the_environment(patch):
    _left(patch, lambda _: os.environ.update(TRAINWRIGHT_LEFT="1"))


def leaves_another_directory(patch):
    _left(patch, lambda _: os.chdir("/"))


def leaves_a_thread(patch):
    def start(_):
        _THREADS.append(threading.Thread(target=_STOP.wait, daemon=True))
        _THREADS[-1].start()

    _left(patch, start)


def leaves_a_hook_on_all_modules(patch):
    _left(patch, lambda _: _HANDLES.append(nn.modules.module.register_module_forward_hook(_nobody)))


_HANDLER, _STOP, _HERE = logging.NullHandler(), threading.Event(), os.getcwd()
_BACKENDS = matmul_precisions()
_THREADS: list[threading.Thread] = []
_HANDLES: list[Any] = []


@contextmanager
def process_put_back():
    """Undo what these faults have left in the process."""
    hook, handler, filters = sys.excepthook, signal.getsignal(signal.SIGTERM), list(warnings.filters)
    _STOP.clear()
    try:
        yield
    finally:
        _STOP.set()
        while _THREADS:
            _THREADS.pop().join()
        while _HANDLES:
            _HANDLES.pop().remove()
        while torch.autocast_increment_nesting() > 1:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_cache_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        for backend, before in _BACKENDS:
            backend.fp32_precision = before
        gc.enable()
        signal.signal(signal.SIGTERM, handler)
        warnings.filters[:] = filters
        sys.excepthook = hook
        logging.getLogger().removeHandler(_HANDLER)
        os.environ.pop("TRAINWRIGHT_LEFT", None)
        os.chdir(_HERE)


# What is left behind in the user's own objects.


def leaves_a_hook_on_a_module(patch):
    _left(patch, lambda trainer: trainer.model.last.register_forward_pre_hook(_nobody))


def leaves_the_model_wrapped(patch):
    class Wrapped(nn.Module):
        pass

    _left(patch, lambda trainer: setattr(trainer.model.twice, "__class__", Wrapped))


def leaves_an_attribute_on_a_module(patch):
    _left(patch, lambda trainer: setattr(trainer.model.twice, "was_trained", True))


def leaves_train_mode(patch):
    _left(patch, lambda trainer: trainer.model.train())


def leaves_eval_mode(patch):
    _left(patch, lambda trainer: trainer.model.eval())


def leaves_parameters_frozen(patch):
    _left(patch, lambda trainer: trainer.model.last.weight.requires_grad_(False))


def leaves_another_parameter(patch):
    _left(patch, lambda trainer: setattr(trainer.model.last, "bias", nn.Parameter(trainer.model.last.bias.detach())))


def leaves_the_optimizer_patched(patch):
    _left(patch, lambda trainer: setattr(trainer.optimizer, "step", _nobody))


def leaves_a_hook_on_the_optimizer(patch):
    _left(patch, lambda trainer: trainer.optimizer.register_step_post_hook(_nobody))


def leaves_other_groups(patch):
    _left(patch, lambda trainer: trainer.optimizer.load_state_dict(trainer.optimizer.state_dict()))


def leaves_a_key_in_the_groups(patch):
    _left(patch, lambda trainer: trainer.optimizer.param_groups[0].update(initial_lr=0.01))


def leaves_an_attribute_on_the_loader(patch):
    around(patch, LoaderBatches, "epoch", after=lambda self, *_: vars(self._loader).update(epoch=1))


def leaves_a_model_awake(patch):
    patch.setattr(context, "wake", lambda model: wake(model)[:0])


def leaves_a_frozen_module_changed(patch):
    patch.setattr(context, "untrained", lambda *roots: nullcontext([root.requires_grad_(False) for root in roots]))


# What a fit, or a trainer that is only built, draws, touches or believes.


def seeds_the_process(patch):
    around(patch, Run, "__init__", after=lambda *_, **__: torch.manual_seed(0))


def draws_when_it_is_built(patch):
    around(patch, Trainer, "__init__", after=lambda *_, **__: torch.rand(1))


def passes_move_the_generators(patch):
    patch.setattr(passes, "rng_preserved", nothing)


def plans_draw(patch):
    patch.setattr(trainer, "rng_preserved", nothing)


def makes_tuples_of_batches(patch):
    patch.setattr(Window, "__iter__", lambda self: map(tuple, self.batches))


def trains_in_what_surrounds_it(patch):
    patch.setattr(context, "reset_grad_and_autocast", nothing)


def computes_in_the_autocast_around(patch):
    patch.setattr(autocast, "_autocast_off", nothing)


def all_trainers_share_what_they_know(patch):
    known = []

    def share(self, *_, **__):
        known.append(self)
        self._counters, self._tracker = known[0]._counters, known[0]._tracker

    around(patch, Trainer, "__init__", after=share)


def a_refused_fit_is_forgotten(patch):
    without(patch, context.LastStage, "_restore")
    without(patch, context.TrainedStage, "_restore")


def a_refused_fit_takes_the_rates(patch):
    without(patch, context._UndoneSchedule, "restore_groups")


# What a pass without a trace leaves.


def a_pass_settles_the_seed(patch):
    patch.setattr(Batches, "independent_copy", lambda self: self)


def a_pass_moves_gradients_and_statistics(patch):
    patch.setattr(modes, "untouched", nothing)


def a_pass_adds_to_gradients(patch):
    whole = modes.untouched
    patch.setattr(modes, "untouched", lambda *roots, shows_gradients: whole(*roots, shows_gradients=True))


def a_pass_moves_statistics(patch):
    patch.setattr(modes, "has_running_statistics", lambda module: False)


def a_pass_leaves_merged_weights_rounded(patch):
    patch.setattr(modes, "_changed_by_mode", lambda module: [])


def a_pass_freezes(patch):
    around(patch, predictions, "predict", after=lambda trainer, *_: trainer.model.last.requires_grad_(False))


def a_pass_is_noticed_by_a_backward(patch):
    for module in (modes, weights):
        patch.setattr(module, "versions_preserved", nothing)


def a_pass_reads_casts_of_training(patch):
    patch.setattr(passes, "beside_training", nothing)


def a_pass_changes_the_state(patch):
    patch.setattr(passes, "copy_tree", lambda tree: tree)


def a_pass_moves_the_generator_of_the_loader(patch):
    patch.setattr(passes, "rng_preserved", lambda generators=(): rng.rng_preserved())


def a_pass_logs_in_training(patch):
    around(patch, passes._Instead, "__enter__", after=lambda self: setattr(self._trainer, "_tracker", self._outer[0]))


def a_pass_wakes_what_is_in_eval_mode(patch):
    around(patch, predictions, "predict", after=lambda trainer, *_: trainer.model.train())


def a_pass_leaves_averaged_weights(patch):
    def forget(self):
        self.is_applied = False

    patch.setattr(AveragedWeights, "_load_raw", forget)


def a_pass_leaves_weights_rounded(patch):
    patch.setattr(OptimizerWeights, "_load_trained", OptimizerWeights.start)


def a_pass_adapts_the_scale(patch):
    around(patch, passes, "evaluate", after=lambda trainer, *_, **__: trainer._run.scaler.adapt(True))


def a_pass_counts_its_rows(patch):
    def count(trainer, *_):
        trainer._counters.rows += 1

    around(patch, predictions, "predict", after=count)


def a_plan_sets_the_rates(patch):
    whole = bound.bind_schedules

    def bind(*args):
        bound = whole(*args)
        for rates in bound.values():
            rates.apply(1)
        return bound

    patch.setattr(bound, "bind_schedules", bind)


def a_probe_is_a_callback(patch):
    patch.setattr(inspection, "probe_context", nothing)


def a_pass_takes_over_the_workers(patch):
    patch.setattr(LoaderBatches, "_iterator", lambda self: iter(self._loader))
