"""Early stopping: when the best moves, when a run ends, and what a resume keeps."""

import math

import pytest
import torch

from trainwright.core.errors import CheckpointError, SettingError
from trainwright.fit.early_stopping import EarlyStopping, resolve_mode
from trainwright.protocols import Stateful

NAN = math.nan


def run(settings, values, errors=()):
    """Judge values until it stops; return the epochs of new bests, and how many were judged."""
    watch, bests = settings.bind(), []
    for epoch, value in enumerate(values, start=1):
        error = {settings.monitor: errors[epoch - 1]} if errors else {}
        if watch.judge({settings.monitor: value, "loss": 0.0}, error, epoch=epoch, update=10 * epoch):
            bests.append(epoch)
        if watch.stopped:
            return watch, bests, epoch
    return watch, bests, len(values)


@pytest.mark.parametrize(
    ("options", "values", "bests", "judged"),
    [
        ({"patience": 2}, [3, 2, 2.5, 1, 1, 1, 0], [1, 2, 4], 6),  # an equal value is no improvement
        ({"patience": 1}, [3, 3, 1], [1], 2),
        ({"patience": 2, "mode": "max"}, [1, 2, 1.5, 3, 3, 2, 9], [1, 2, 4], 6),
        ({"patience": 3, "min_delta": 0.1}, [1, 0.96, 0.92, 0.88, 0.84, 0.77], [1, 4, 6], 6),  # small gains add up
        ({"patience": 3, "min_delta": 0.5}, [1, 0.5, 0.6, 0.7, 0.0], [1], 4),  # by more than min_delta, not by it
        ({"patience": 3, "min_delta": 0.5, "mode": "max"}, [1, 1.5, 1.6, 1.2], [1, 3], 4),
        ({"patience": 2, "min_delta": "10%"}, [10, 9.5, 8.9, 8.5, 8.1], [1, 3], 5),
        ({"patience": 2, "min_delta": "10%"}, [-10, -10.5, -11.5], [1, 3], 3),  # of |best|
        ({"patience": 2, "min_delta": "10%", "mode": "max"}, [10, 10.5, 11.5], [1, 3], 3),
        ({"patience": 2, "min_delta": "0%"}, [10, 9.9], [1, 2], 2),
        ({"patience": 2}, [NAN, NAN, 1], [], 2),  # a NaN first is a bad validation
        ({"patience": 2}, [NAN, 5, NAN, 4, NAN, NAN, 1], [2, 4], 6),
        ({"patience": 2, "mode": "max"}, [NAN, 5, NAN, 6, NAN, NAN, 9], [2, 4], 6),
        ({"patience": 2, "min_delta": "1%"}, [math.inf, 5, 4, 4, 4], [2, 3], 5),  # the worst value is no best
        ({"patience": 2, "min_delta": "1%", "mode": "max"}, [-math.inf, 5, 6, 6, 6], [2, 3], 5),
        ({"patience": 2}, [-math.inf, 5, 4, 3], [1], 3),
    ],
)
def test_the_best_moves_and_the_run_ends_when_they_should(options, values, bests, judged):
    _, seen, stopped = run(EarlyStopping("val_loss", **options), values)
    assert (seen, stopped) == (bests, judged)


def test_one_standard_error_is_that_of_the_best():
    settings = EarlyStopping("val_loss", min_delta="1se", patience=3)
    # 0.95 is within 0.1 of the best, whatever its own error; 0.8 is not; then the error is that of 0.8, 0.74's is 9.
    _, bests, judged = run(
        settings, [1, 0.95, 0.8, 0.77, 0.74, 0.5, 0.1, 0, 0], [0.1, 0.001, 0.05, 0.001, 9, 0, 0, 0, 0]
    )
    assert (bests, judged) == ([1, 3, 5], 8)


def test_one_standard_error_without_an_error_says_what_to_return():
    watch = EarlyStopping("val_f1", mode="max", min_delta="1se").bind()
    with pytest.raises(SettingError, match=r"standard errors of val_accuracy(.|\n)*one value per row"):
        watch.judge({"val_f1": 0.5}, {"val_accuracy": 0.01}, epoch=1, update=1)


def test_the_reason_names_number_value_epoch_and_wait():
    watch, _, _ = run(EarlyStopping("val_loss", patience=2), [1.0, 0.13239, 0.2, 0.2])
    assert watch.stopped == "val_loss did not improve on its best, 0.1324 (epoch 2), for 2 validations"
    assert (watch.best.name, watch.best.value, watch.best.epoch, watch.best.update) == ("val_loss", 0.13239, 2, 20)
    watch, _, _ = run(EarlyStopping("val_loss", patience=1), [NAN])
    assert watch.stopped == "val_loss was never a finite number for 1 validation"
    assert watch.best is None


@pytest.mark.parametrize("cut", range(7))
def test_a_resumed_watch_ends_where_the_whole_one_does(cut):
    settings = EarlyStopping("val_loss", min_delta="1se", patience=3)
    values, errors = [NAN, 1, 0.95, 0.8, 0.79, 0.78, 0.77], [NAN, 0.1, 0, 0.05, 0, 0, 0]

    def judge(watch, start, end):
        return [
            (
                watch.judge({"val_loss": values[i]}, {"val_loss": errors[i]}, epoch=i, update=i),
                watch.waited,
                watch.stopped,
            )
            for i in range(start, end)
        ]

    whole = judge(settings.bind(), 0, 7)
    first, second = settings.bind(), settings.bind()
    judge(first, 0, cut)
    second.load_state_dict(first.state_dict())
    assert second.best == first.best
    assert judge(second, cut, 7) == whole[cut:]
    assert whole[-1][2]


def test_the_weights_of_the_best_are_part_of_the_state():
    first, second = EarlyStopping("val_loss").bind(), EarlyStopping("val_loss").bind()
    assert isinstance(first, Stateful)
    second.load_state_dict(first.state_dict())
    assert second.weights is None
    first.weights = {"weight": torch.ones(2)}
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.weights["weight"], torch.ones(2))


@pytest.mark.parametrize("other", [EarlyStopping("loss"), EarlyStopping("val_loss", mode="max")])
def test_the_best_of_another_number_is_not_loaded(other):
    with pytest.raises(CheckpointError, match="another number"):
        other.bind().load_state_dict(EarlyStopping("val_loss").bind().state_dict())


def test_without_standard_errors_the_numbers_are_enough():
    watch = EarlyStopping("val_loss", patience=1).bind()
    assert watch.judge({"val_loss": 1.0}, epoch=1, update=10)
    assert not watch.judge({"val_loss": 1.0}, epoch=2, update=20) and watch.stopped


def test_a_number_that_is_not_produced_is_refused_with_the_near_name():
    watch = EarlyStopping("val_los", mode="min").bind()
    with pytest.raises(SettingError) as caught:
        watch.judge({"loss": 1.0, "val_loss": 1.0, "epoch": 1, "update": 3, "lr": 0.1}, {}, epoch=1, update=3)
    assert "Did you mean 'val_loss'?" in str(caught.value)
    assert "one of loss, lr, val_loss" in str(caught.value)
    assert watch.waited == 0


@pytest.mark.parametrize(
    ("monitor", "fix"),
    [
        ("val_accuracy", "EarlyStopping('val_accuracy', mode='max')"),
        ("val_mae", "EarlyStopping('val_mae', mode='min')"),
        ("val_class_error", "EarlyStopping('val_class_error', mode='min')"),
        ("val_los", "EarlyStopping('val_loss', mode='min')"),
    ],
)
def test_the_suggested_mode_fits_the_name(monitor, fix):
    with pytest.raises(SettingError) as caught:
        EarlyStopping(monitor)
    assert f"fix   {fix}\n" in str(caught.value)
    assert ("Did you mean 'val_loss'?" in str(caught.value)) is (monitor == "val_los")


def test_mode_may_be_left_out_for_losses_only():
    assert EarlyStopping("val_loss").mode == "min"
    assert EarlyStopping("val_reconstruction_loss").bind().mode == "min"
    assert EarlyStopping("val_loss", mode="max").mode == "max"
    with pytest.raises(SettingError, match=r"EarlyStopping\('val_accuracy', mode='max'\)"):
        EarlyStopping("val_accuracy")
    with pytest.raises(SettingError, match="less or more"):
        EarlyStopping("val_loss", mode="lower")
    with pytest.raises(SettingError, match=r"Checkpoint\(best='val_f1', mode='max'\)"):
        resolve_mode("val_f1", None, "Checkpoint(best={!r}, mode={!r})")


@pytest.mark.parametrize("patience", [0, -1, 2.0, True, None])
def test_patience_is_a_whole_number_of_validations(patience):
    with pytest.raises(SettingError, match=r"at least 1"):
        EarlyStopping("val_loss", patience=patience)


@pytest.mark.parametrize("min_delta", [-0.1, NAN, math.inf, True, None, "1", "-1%", "2se", "one"])
def test_min_delta_is_a_distance_a_share_or_one_standard_error(min_delta):
    with pytest.raises(SettingError, match="min_delta"):
        EarlyStopping("val_loss", min_delta=min_delta)


@pytest.mark.parametrize("monitor", ["", None, 3])
def test_the_monitor_is_a_name(monitor):
    with pytest.raises(SettingError, match="name of a number"):
        EarlyStopping(monitor, mode="min")
