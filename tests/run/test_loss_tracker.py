"""The loss tracker: the count of a loss, the numbers of a window, means over windows, state."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from trainwright import MeanLoss, MixedPrecision, SettingError, StepError, StepOutput, SumLoss, TrainwrightError, Window
from trainwright.precision.mixed_precision import LossScaler
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.window import rows_of


def tracker_of(count=None, overrides_count=False):
    """A tracker of a trainer whose `count` returns this; None: it has none."""
    own = dict.fromkeys(("overrides_update", "overrides_compute_gradients"), False)
    counter = None if count is None else lambda batch: count
    return LossTracker(None, SimpleNamespace(count=counter, overrides_count=overrides_count, rows=rows_of, **own))


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def begun(tracker, rows, counts=None):
    window = Window([torch.zeros(n) for n in rows], rows, counts=counts)
    window.begun = True
    tracker.begin(window)
    return tracker


def taken(tracker, *returned):
    losses = [weighted(tracker, one) for one in returned]
    tracker.read()
    return losses


def weighted(tracker, returned):
    """A loss times its grad_tensor; 0 where that is 0."""
    (loss,), (grad_tensor,) = tracker.backward_args(returned)
    weight = 1.0 if grad_tensor is None else float(grad_tensor)
    return weight and float(loss.detach()) * weight


def test_a_lone_mean_is_handed_on_as_it_is():
    tracker, loss = begun(tracker_of(), [4]), number(2.5)
    assert tracker.backward_args(loss) == ((loss,), (None,))
    tracker.read()
    assert (tracker.loss, tracker.counted, tracker.has_loss) == (2.5, 4, True)


def test_micro_batches_are_weighed_by_rows_and_reported_as_one_mean():
    tracker = begun(tracker_of(), [1, 3])
    assert taken(tracker, number(8.0), number(4.0)) == [2.0, 3.0]
    assert tracker.loss == 5.0 and tracker.counted == 4


def test_a_count_of_the_steps_own_comes_first_then_the_users_then_torchs_then_rows():
    output = torch.zeros(6, 3, requires_grad=True)
    by_torch = F.cross_entropy(output, torch.tensor([0, -100, 1, 2, -100, 0]))

    def counted(tracker, returned, counts=None):
        taken(begun(tracker, [6], counts), returned)
        return tracker.counted

    trusting = tracker_of(9, overrides_count=True)
    assert counted(trusting, MeanLoss(by_torch, 2), [9]) == 2
    assert counted(trusting, by_torch, [9]) == 9
    assert counted(tracker_of(5), by_torch) == 4
    assert counted(tracker_of(5), number(1.0)) == 5
    assert counted(tracker_of(), number(1.0)) == 6


def test_named_losses_are_reported_each_under_its_name():
    tracker = begun(tracker_of(), [1, 3])
    taken(tracker, {"a": number(1.0), "b": number(3.0)}, {"a": number(5.0), "b": number(7.0)})
    assert tracker.values == {"a": 4.0, "b": 6.0} and tracker.loss == 10.0
    assert tracker.means() == {"loss": 10.0, "a": 4.0, "b": 6.0}


def test_means_are_weighted_over_windows_and_start_anew_after_a_reset():
    tracker = tracker_of()
    for rows, loss in ((4, 1.0), (1, 6.0)):
        taken(begun(tracker, [rows]), number(loss))
    assert tracker.means("train_") == {"train_loss": 2.0}
    tracker.reset()
    assert tracker.means() == {}


def test_a_sum_without_a_count_is_trained_as_it_is_and_reported_per_row():
    tracker = begun(tracker_of(), [1, 3])
    assert taken(tracker, SumLoss(number(2.0)), SumLoss(number(6.0))) == [2.0, 6.0]
    assert tracker.loss == 2.0


@pytest.mark.parametrize("nothing", [0, torch.tensor(0)])
def test_a_nan_over_nothing_is_left_out_and_one_over_something_is_not(nothing):
    tracker = begun(tracker_of(), [2, 2])
    weighed = taken(tracker, MeanLoss(number(math.nan), nothing), MeanLoss(number(3.0), 2))
    assert weighed[0] == 0.0 and tracker.loss == 3.0
    taken(begun(tracker, [2, 2]), MeanLoss(number(math.nan), 1), MeanLoss(number(3.0), 2))
    assert math.isnan(tracker.loss) and math.isnan(tracker.means()["loss"])


def test_a_window_over_nothing_is_nan():
    tracker = begun(tracker_of(), [2, 2])
    taken(tracker, SumLoss(number(0.0), 0), SumLoss(number(0.0), 0))
    assert math.isnan(tracker.loss) and tracker.counted == 0


def test_a_second_pass_is_weighed_as_the_first_and_not_recorded():
    tracker = begun(tracker_of(), [1, 3])
    first = [weighted(tracker, number(loss)) for loss in (8.0, 4.0)]
    tracker.start_extra_pass()
    tracker.log("late", 1.0, None)
    assert taken(tracker, number(8.0), number(4.0)) == first
    assert tracker.loss == 5.0 and tracker.means() == {"loss": 5.0}


def test_logged_numbers_default_to_the_count_of_the_current_batch():
    tracker = begun(tracker_of(), [1, 3])
    for loss, value in ((number(1.0), 10.0), (number(1.0), torch.tensor(2.0, requires_grad=True))):
        tracker.log("extra", value, None)
        tracker.backward_args(loss)
    tracker.log("own", 5.0, 7)
    tracker.read()
    assert tracker.values == {"extra": 4.0, "own": 5.0}


@pytest.mark.parametrize("name", ["loss", "lr", "epoch", "rows", "val_x"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(SettingError, match=r"is reserved|starts with val_"):
        begun(tracker_of(), [1]).log(name, 1.0, None)


def test_logging_outside_a_step_is_refused():
    with pytest.raises(TrainwrightError, match="outside a step"):
        tracker_of().log("x", 1.0, None)


def test_the_return_of_an_update_is_reported_where_no_step_was_run():
    tracker = begun(tracker_of(), [2, 3])
    tracker.record_returned({"g": number(2.0), "d": 4.0})
    tracker.read()
    assert tracker.values == {"g": 2.0, "d": 4.0} and math.isnan(tracker.loss)
    begun(tracker, [2]).record_returned(number(7.0))
    tracker.read()
    assert tracker.loss == 7.0


def test_read_returns_further_numbers_that_are_asked_for():
    tracker = begun(tracker_of(), [2])
    tracker.backward_args(number(1.0))
    assert tracker.read(number(8.0), 9) == [8.0, 9.0]
    assert tracker.read() == [] and tracker.read(number(3.0)) == [3.0]


def test_the_running_sums_continue_after_a_resume():
    tracker, other = tracker_of(), tracker_of()
    taken(begun(tracker, [4]), number(1.0))
    other.load_state_dict(tracker.state_dict())
    for one in (tracker, other):
        taken(begun(one, [1]), number(6.0))
    assert other.means() == tracker.means() == {"loss": 2.0}


def test_a_step_that_returns_no_loss_is_refused():
    for returned in (None, torch.zeros(3), StepOutput(None)):
        with pytest.raises(StepError, match="a step returned"):
            begun(tracker_of(), [2]).backward_args(returned)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_grad_tensor_is_like_its_loss_made_once_and_again_after_a_hook_wrote_into_it(dtype):
    tracker = begun(tracker_of(), [1, 3])
    tracker.bind(LossScaler(MixedPrecision("fp16", init_scale=8.0)))
    loss = torch.zeros(3, dtype=dtype, requires_grad=True).sum()
    made = tracker.grad_tensor(loss, 0.25)
    assert made.dtype == dtype and made.shape == () and made == 2.0
    assert tracker.grad_tensor(loss, 0.25) is made and tracker.grad_tensor(loss, 0.125) is None
    made.zero_()
    assert tracker.grad_tensor(loss, 0.25) == 2.0
