"""World: the laws of one process, against the same plain loops, hold where its batches are dealt to three."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from distributed.pool import pool

from . import test_custom_updates_gan as gan
from . import test_custom_updates_sam as sam
from . import test_numbers as numbers
from . import test_window as window
from . import test_window_update as update
from .own_updates import Scaled
from .window_cases import RETURNED, UNEVEN, masked, stepping, tensor_count, valid
from .world_runs import holding

PROCESSES = 3


def check_adaptive() -> None:
    window.check(UNEVEN, nn.CrossEntropyLoss(), "tokens", optimizer="adamw")


def check_float32(kind: str) -> None:
    window.check_float32(UNEVEN, nn.CrossEntropyLoss(weight=window.WEIGHTS.float()), kind)
    window.check_float32(UNEVEN, None, kind, stepping(RETURNED["a mean over a tensor"][0]), masked)


def check_closed(search: str, tolerance: float) -> None:
    """LBFGS over the whole data as one window; on batches that change, its line search makes much of a last bit."""
    theirs, ours = sam.closed_twins(search)
    data = sam.drawn(3)
    sam.closed_by_hand(*theirs, sam.F.cross_entropy, sam.whole(data, len(data)) * 4)
    sam.run(sam.Closed, ours, data, epochs=4, accumulate=len(data), loss=nn.CrossEntropyLoss())
    assert sam.distance(ours[0], theirs[0]) <= tolerance


def held(check: Callable[..., None], *args: Any, **settings: Any) -> Any:
    shown = [arg if isinstance(arg, str) else getattr(arg, "__name__", "") for arg in args]
    name = "-".join([check.__name__, *[one for one in shown if one], *settings])
    return pytest.param(partial(check, *args, **settings), id=name)


WINDOWS = [
    *[held(window.check_known, UNEVEN, name) for name in window.KNOWN],
    *[held(window.check_returned, UNEVEN, name) for name in RETURNED],
    *[held(window.check_count, UNEVEN, count) for count in (valid, tensor_count)],
    *[held(check_float32, kind) for kind in ("classes", "tokens")],
    *[
        held(check)
        for check in (
            check_adaptive,
            window.test_a_sum_is_summed_over_the_window,
            update.test_gradients_left_over_from_before_never_enter,
            update.test_clip_schedule_scaler_and_clock_act_once_per_update,
        )
    ],
    held(window.check_own_count_wins, UNEVEN),
    *[
        held(update.check_empty_window, 2, policy, count)
        for policy in ("raise", "skip", "ignore")
        for count in (None, valid)
    ],
]
OWN_UPDATES = [
    *[held(update.test_an_overridden_update_finds_the_windows_own_gradient_and_loss, name) for name in RETURNED],
    held(sam.check_sharp, 3, optimizer="adamw"),
    held(sam.check_sharp, 3, clip=0.1, one_cycle=True),
    held(sam.check_sharp, 3, trainer=sam.Counted, precision=Scaled()),
    held(check_closed, "plain", 1e-12),
    held(check_closed, "strong_wolfe", 1e-10),
    *[held(gan.check_shared, trainer, 3) for trainer in (gan.Trainer, gan.Each)],
    held(gan.check_named),
]
NUMBERS = [
    held(numbers.test_training_loss_is_the_mean_over_rows_and_never_divided_by_accumulate, 3),
    held(numbers.test_validation_loss_is_the_mean_over_rows_for_an_uneven_last_batch),
    held(numbers.test_a_loss_over_elements_is_weighted_by_elements, 2),
    held(numbers.test_a_micro_batch_that_counts_nothing_leaves_the_mean_of_the_others, 2),
    held(numbers.test_with_class_weights_the_mean_is_over_the_weights),
]


@pytest.mark.sample(16)
@pytest.mark.parametrize("check", [*WINDOWS, *OWN_UPDATES, *NUMBERS])
def test_the_law_of_one_process_holds_on_several(check: Callable[[], None]) -> None:
    first, *others = pool(PROCESSES).run(holding, check)
    assert all(other == first for other in others)
