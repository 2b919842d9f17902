"""R2, MAE, RMSE and F1: scikit-learn's numbers over all rows, however they are cut; a NaN shows; nothing is read."""

from __future__ import annotations

import math

import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import EarlyStopping, StepOutput, Trainer
from trainwright.core.errors import DataError, SettingError
from trainwright.metrics.metric_set import MetricSet, check_metrics
from trainwright.metrics.scores import F1, MAE, R2, RMSE
from trainwright.metrics.totals import Total


def of_arrays(score):
    """A score of scikit-learn for tensors; its version 1.6.0 refuses them."""
    return lambda *tensors, **settings: score(*(one.numpy() for one in tensors), **settings)


r2_score, f1_score = of_arrays(sklearn.metrics.r2_score), of_arrays(sklearn.metrics.f1_score)
mean_absolute_error = of_arrays(sklearn.metrics.mean_absolute_error)
root_mean_squared_error = of_arrays(sklearn.metrics.root_mean_squared_error)
NEAR = pytest.approx
UNEVEN = [1, 7, 2, 30, 3]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def measured(metric, output, target, cuts=UNEVEN):
    meters = MetricSet({"it": metric})
    for some, others in zip(output.split(cuts), target.split(cuts), strict=True):
        meters.update(some, others, len(some))
    return meters.compute()["it"]


# --- values


@pytest.mark.parametrize("shape", [(43,), (43, 1), (43, 4)])
@pytest.mark.parametrize(
    ("metric", "reference"), [(R2(), r2_score), (MAE(), mean_absolute_error), (RMSE(), root_mean_squared_error)]
)
def test_values_are_scored_as_scikit_learn_scores_all_rows_at_once(metric, reference, shape):
    target = normal(*shape)
    output = target + 0.3 * normal(*shape, seed=5)
    expected = reference(target, output)
    if metric.__class__ is RMSE and shape == (43, 4):
        mean_squared_error = of_arrays(sklearn.metrics.mean_squared_error)
        expected = math.sqrt(mean_squared_error(target, output))  # theirs is a mean of columns' roots
    assert measured(metric, output, target) == NEAR(expected, rel=1e-12)


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda cuts: sum(cuts) > 1),
    seed=st.integers(0, 2**20),
    offset=st.sampled_from([0.0, -3.0, 1e6]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
@settings(max_examples=60, deadline=None)
def test_any_batches_give_the_numbers_of_all_rows(cuts, seed, offset, scale):
    target = offset + scale * normal(sum(cuts), seed=seed)
    output = target + scale * normal(sum(cuts), seed=seed + 1)
    for metric, reference in ((R2(), r2_score), (MAE(), mean_absolute_error), (RMSE(), root_mean_squared_error)):
        assert measured(metric, output, target, cuts) == NEAR(reference(target, output), rel=1e-9 if offset else 1e-12)


def test_a_large_offset_of_the_target_does_not_cancel():
    near = (whole(1000, 43).double() - 500) / 64  # the same deviations, to the last bit, far out as well
    output = near + whole(64, 43, seed=3).double() / 64
    far = measured(R2(), output + 2.0**36, near + 2.0**36)
    assert far == NEAR(r2_score(near, output), rel=1e-12)


def test_float32_rows_are_summed_in_float64():
    target, output = normal(43).float(), normal(43, seed=2).float()
    for metric, reference in ((R2(), r2_score), (MAE(), mean_absolute_error), (RMSE(), root_mean_squared_error)):
        assert measured(metric, output, target) == NEAR(reference(target.double(), output.double()), rel=1e-12)


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_r2_of_a_target_that_never_varies_is_scikit_learns(off):
    target = torch.full((43,), 0.1, dtype=torch.float64)
    assert measured(R2(), target + off, target) == (1.0 if off == 0 else 0.0)


def test_r2_of_one_row_is_nan():
    assert math.isnan(measured(R2(), normal(1), normal(1), [1]))


@pytest.mark.parametrize("metric", [R2(), MAE(), RMSE()])
@pytest.mark.parametrize("where", ["output", "target"])
def test_a_nan_value_shows(metric, where):
    output, target = normal(43), normal(43, seed=1)
    (output if where == "output" else target)[20] = math.nan
    assert math.isnan(measured(metric, output, target))


@pytest.mark.parametrize("metric", [R2(), MAE(), RMSE()])
@pytest.mark.parametrize(
    ("output", "target", "fix"),
    [
        (normal(8, 1), normal(8), r"output.squeeze\(-1\) in the model, or targets of shape \(n, 1\): y\[:, None\]"),
        (normal(8), normal(8, 1), r"y.squeeze\(-1\)"),
        (normal(8, 2), normal(8, 3), "bring output and target to one shape"),
    ],
)
def test_values_that_torch_would_broadcast_are_refused(metric, output, target, fix):
    with pytest.raises(SettingError, match=fix):
        measured(metric, output, target, [8])


def test_rows_of_other_shapes_are_refused_by_r2():
    metric = R2()
    metric.update(normal(4, 2), normal(4, 2))
    with pytest.raises(SettingError, match="3 after 2"):
        metric.update(normal(4, 3), normal(4, 3))


def test_mae_gives_early_stopping_its_standard_error():
    errors = (normal(43) - normal(43, seed=1)).abs()
    meters = MetricSet({"mae": MAE()}, spread=True)
    meters.update(normal(43), normal(43, seed=1), 43)
    assert meters.errors()["mae"] == NEAR(float(errors.std(correction=0)) / math.sqrt(43), rel=1e-9)


# --- F1


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("classes", [None, range(6), [1, 4]])
def test_f1_is_scikit_learns(average, classes):
    output, target = normal(43, 6), whole(6, 43)
    output[torch.arange(43), target] += 1.5
    target[target == 2] = 3
    output[:, 2] -= 9  # class 2 is never seen
    expected = f1_score(target, output.argmax(1), average=average, labels=classes, zero_division=0)
    assert measured(F1(average, classes=classes), output, target) == NEAR(expected, abs=1e-12)


@given(
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
    average=st.sampled_from(["macro", "micro", "weighted"]),
)
@settings(max_examples=60, deadline=None)
def test_f1_of_any_batches_is_that_of_all_rows(cuts, seed, average):
    output, target = normal(sum(cuts), 4, seed=seed), whole(4, sum(cuts), seed=seed)
    expected = f1_score(target, output.argmax(1), average=average, zero_division=0)
    assert measured(F1(average), output, target, cuts) == NEAR(expected, abs=1e-12)


@pytest.mark.parametrize("shape", [(43,), (43, 1)])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_binary_f1_reads_a_logit(shape, kind):
    output, target = normal(*shape), whole(2, 43)
    expected = f1_score(target, (output.flatten() > 0).long())
    assert measured(F1("binary"), output, target.to(kind)) == NEAR(expected, abs=1e-12)
    scores = torch.stack([torch.zeros(43), output.flatten()], 1)
    assert measured(F1("binary"), scores, target) == NEAR(expected, abs=1e-12)


def test_f1_counts_positions_and_leaves_out_ignored_ones():
    output, target = normal(43, 3, 5), whole(3, 43, 5)
    target[::3] = -100
    kept = target != -100
    expected = f1_score(target[kept], output.argmax(1)[kept], average="macro")
    assert measured(F1(), output, target) == NEAR(expected, abs=1e-12)


def test_f1_of_nothing_that_counts_is_nan():
    assert math.isnan(measured(F1(), normal(43, 3), torch.full((43,), -100)))
    assert math.isnan(F1().compute())


@pytest.mark.parametrize("shape", [(43, 3), (43,)])
def test_a_nan_score_shows_in_f1(shape):
    output = normal(*shape)
    output[20] = math.nan
    assert math.isnan(measured(F1(), output, whole(2, 43)))
    assert math.isnan(measured(F1(), normal(43), whole(2, 43).float().index_fill(0, torch.tensor(7), math.nan)))


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_target_that_is_no_class_is_refused_and_not_counted(wrong):
    target = whole(3, 43)
    target[5] = wrong
    with pytest.raises(DataError, match=r"1 targets are no class.*\n.*0 to 2"):
        measured(F1(), normal(43, 3), target)


@pytest.mark.parametrize(
    ("output", "target", "fix"),
    [
        (normal(8, 3), normal(8, 3), r"target.argmax\(1\)"),
        (normal(8, 5, 3), whole(3, 8, 5), r"output.movedim\(-1, 1\)"),
        (normal(8), whole(2, 7), "want  scores"),
    ],
)
def test_shapes_that_are_no_classes_are_refused(output, target, fix):
    with pytest.raises(SettingError, match=fix):
        F1().update(output, target)


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: F1("mean"), "'macro' or 'micro' or 'weighted' or 'binary'"),
        (lambda: F1("binary", classes=[1]), r'F1\("binary"\)'),
        (lambda: F1(classes=10), r"classes=\[1, 2\]"),
        (lambda: F1(classes=[1, 1]), "each once"),
        (lambda: F1("binary").update(normal(8, 3), whole(3, 8)), 'F1."macro"'),
        (lambda: F1(classes=[3]).update(normal(8, 3), whole(3, 8)), "0 to 2"),
        (lambda: check_metrics({"mae": MAE}), r"MAE\(\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, fix):
    with pytest.raises(SettingError, match=fix):
        make()


# --- all of them


def everything():
    return {"r2": R2(), "mae": MAE(), "rmse": RMSE()}


def test_a_pass_that_is_saved_half_way_goes_on_as_if_it_had_not_been():
    output, target = normal(43, 2), normal(43, 2, seed=1)
    first, second = MetricSet(everything()), MetricSet(everything())
    first.update(output[:20], target[:20], 20)
    second.update(target, output, 43)
    second.load_state_dict(first.state_dict())
    for meters in (first, second):
        meters.update(output[20:], target[20:], 23)
    assert first.compute() == second.compute()


def test_f1_that_is_saved_half_way_goes_on_as_if_it_had_not_been():
    output, target = normal(43, 3), whole(3, 43)
    first, second = MetricSet({"f1": F1()}), MetricSet({"f1": F1()})
    first.update(output[:20], target[:20], 20)
    tree = first.state_dict()
    first.update(output[20:], target[20:], 23)
    second.load_state_dict(tree)
    second.update(output[20:], target[20:], 23)
    assert first.compute() == second.compute()


def test_reset_forgets_every_batch():
    for make in (R2, RMSE, F1):
        output, target = (normal(9, 3), whole(3, 9)) if make is F1 else (normal(9), normal(9, seed=1))
        metric, fresh = make(), make()
        metric.update(output, target)
        metric.update(output.flip(0), target)
        metric.reset()
        assert math.isnan(metric.compute())
        for one in (metric, fresh):
            one.update(output, target)
        assert float(metric.compute()) == float(fresh.compute())


class Reads(TorchDispatchMode):
    """Counts reads of a number from a tensor."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func._schema.name in {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("metric", [R2(), MAE(), RMSE(), F1()])
def test_an_update_reads_nothing_from_a_device(metric, monkeypatch):
    monkeypatch.setitem(Total.__init__.__kwdefaults__, "wide", True)  # sums as on an accelerator
    output, target = (normal(9, 3), whole(3, 9)) if isinstance(metric, F1) else (normal(9), normal(9, seed=1))
    meters = MetricSet({"it": type(metric)()})
    with Reads() as reads:
        meters.update(output, target, 9)
        meters.update(output, target, 9)
    assert reads.seen == 0


class Regression(Trainer):
    def training_step(self, batch):
        x, y = batch
        output = self.model(x)
        return StepOutput(nn.functional.mse_loss(output, y), output, y)


def test_scores_are_numbers_of_a_run_and_can_be_watched():
    x = normal(90, 3).float()
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 5
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Regression(
        model,
        torch.optim.Adam(model.parameters(), lr=0.5),
        metrics=everything(),
        early_stopping=EarlyStopping("val_r2", mode="max", patience=3),
        console=False,
    )
    result = trainer.fit((x[:60], y[:60]), (x[60:], y[60:]), epochs=5, batch_size=16)
    assert result.best.name == "val_r2" and result.best.value > 0.9
    with torch.no_grad():
        expected = r2_score(y[60:], model(x[60:]))
    assert trainer.evaluate((x[60:], y[60:]), batch_size=7)["val_r2"] == NEAR(expected, rel=1e-5)
