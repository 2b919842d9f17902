"""The Numbers law: every reported number is an exact count-weighted mean in the user's own scale."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from records import Records
from trainwright import MeanLoss, SettingError, SumLoss, Trainer, accuracy
from trainwright.metrics import Derived

from .numbers_runs import UNEVEN, Errors, close, cut, distance, linear, rows_of_data, trainer

# Records.


class Fixed(Trainer):
    """A batch is (values, counts): its loss is the mean of the values over the counts, whatever the weights are."""

    def training_step(self, batch):
        values, counts = batch
        return MeanLoss(values.float().mean() + 0 * self.model.weight.sum(), int(counts[0]))


def fixed(losses, counts, cls=Fixed, **settings):
    data = [(torch.full((2,), loss), torch.full((2,), count)) for loss, count in zip(losses, counts, strict=True)]
    return trainer(cls=cls, **settings), data


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_training_loss_is_the_mean_over_rows_and_never_divided_by_accumulate(accumulate):
    x, y = rows_of_data()
    model, lossf = linear(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, by_update = 0.0, []
    pieces = cut(x, y, UNEVEN)
    for start in range(0, len(pieces), accumulate):
        window = pieces[start : start + accumulate]
        a, b = torch.cat([a for a, _ in window]), torch.cat([b for _, b in window])
        optimizer.zero_grad()
        loss = lossf(model(a), b)
        loss.backward()
        by_update.append(loss.item())
        total += loss.double().item() * len(a)
        optimizer.step()
    seen = Records()
    result = trainer(accumulate=accumulate, observers=[seen]).fit(pieces, epochs=1)
    close(result.history[0]["loss"], total / len(x))
    assert len(seen.updates) == len(by_update)
    for update, expected in zip(seen.updates, by_update, strict=True):
        close(update.loss, expected)
    if accumulate == 1:
        assert [update.loss for update in seen.updates] == by_update


def test_validation_loss_is_the_mean_over_rows_for_an_uneven_last_batch():
    x, y = rows_of_data()
    model = linear()
    numbers = trainer(model).evaluate(cut(x, y, UNEVEN))
    with torch.no_grad():
        close(numbers["val_loss"], F.cross_entropy(model(x).double(), y).item())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_over_elements_is_weighted_by_elements(accumulate):
    """Batches of equal rows and unequal length: torch's MSE is a mean over elements."""
    torch.manual_seed(0)
    lengths = (3, 40, 5, 1)
    pieces = [(torch.randn(2, n) * n, torch.zeros(2, n)) for n in lengths]

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return x + self.shift

    expected = sum(float((x.double() ** 2).sum()) for x, _ in pieces) / sum(x.numel() for x, _ in pieces)
    result = trainer(Shift(), nn.MSELoss(), lr=0.0, accumulate=accumulate).fit(pieces, pieces, epochs=1)
    close(result.history[0]["val_loss"], expected)
    close(result.history[0]["loss"], expected)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_micro_batch_that_counts_nothing_leaves_the_mean_of_the_others(accumulate):
    """Among the micro-batches one has nothing that counts; it neither hides the others nor makes a NaN."""
    x, y = rows_of_data()
    y[6:12] = -100
    y[13] = -100
    pieces = cut(x, y, UNEVEN)
    model = linear()
    with torch.no_grad():
        expected = F.cross_entropy(model(x).double(), y).item()
    result = trainer(model, lr=0.0, accumulate=accumulate).fit(pieces, pieces, epochs=1)
    close(result.history[0]["loss"], expected)
    close(result.history[0]["val_loss"], expected)


def test_with_class_weights_the_mean_is_over_the_weights():
    x, y = rows_of_data()
    weight = torch.tensor([0.1, 3.0, 1.0])
    model = linear()
    with torch.no_grad():
        expected = F.cross_entropy(model(x).double(), y, weight=weight.double()).item()
    for accumulate in (1, 2):
        made = trainer(model, nn.CrossEntropyLoss(weight=weight), lr=0.0, accumulate=accumulate)
        result = made.fit(cut(x, y, UNEVEN), cut(x, y, UNEVEN), epochs=1)
        close(result.history[-1]["loss"], expected)
        close(result.history[-1]["val_loss"], expected)


def check_a_steps_own_count_weighs_its_loss(accumulate):
    seen = Records()
    made, data = fixed([1.0, 10.0, 4.0], [5, 1, 0], accumulate=accumulate, observers=[seen])
    result = made.fit(data, data, epochs=1)
    close(result.history[0]["loss"], 15 / 6, rel=1e-12)
    close(result.history[0]["val_loss"], 15 / 6, rel=1e-12)


def test_a_count_of_the_steps_own_weighs_its_loss():
    check_a_steps_own_count_weighs_its_loss(3)


def test_a_sum_without_count_is_reported_per_row():
    class Summed(Trainer):
        def training_step(self, batch):
            return SumLoss(F.mse_loss(self.model(batch[0]), batch[1], reduction="sum"))

    torch.manual_seed(0)
    pieces = [(torch.randn(n, 4), torch.randn(n, 3)) for n in (5, 2)]
    model = linear()
    with torch.no_grad():
        expected = sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in pieces) / 7
    result = trainer(model, cls=Summed, lr=0.0).fit(pieces, pieces, epochs=1)
    close(result.history[0]["loss"], expected)
    close(result.history[0]["val_loss"], expected)


@pytest.mark.parametrize("count_as", [int, torch.tensor], ids=["host", "tensor"])
def test_a_sum_over_nothing_leaves_the_mean_of_the_others_even_where_it_is_nan(count_as):
    class Masked(Trainer):
        def training_step(self, batch):
            total = batch[0].sum() + 0 * self.model.weight.sum()
            return SumLoss(total, count_as(len(batch[0]) if batch[0].isfinite().all() else 0))

    pieces = [(torch.ones(3),), (torch.full((4,), math.nan),), (torch.full((1,), 5.0),)]
    assert trainer(cls=Masked).evaluate(pieces)["val_loss"] == 8 / 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_named_losses_are_reported_each_and_their_sum_as_the_loss(accumulate):
    class Two(Trainer):
        def training_step(self, batch):
            first, second = batch[0].mean(), batch[0].square().mean()
            return {"first": first + 0 * self.model.weight.sum(), "second": second}

    x = torch.arange(7.0)
    seen = Records()
    made = trainer(cls=Two, observers=[seen], accumulate=accumulate)
    pieces = [(x[:5],), (x[5:],)]
    row = made.fit(pieces, pieces, epochs=1).history[0]
    first, second = x.mean().item(), x.square().mean().item()
    assert {"first", "second", "loss", "val_first", "val_second", "val_loss"} <= set(row)
    for prefix in ("", "val_"):
        close(row[prefix + "first"], first)
        close(row[prefix + "second"], second)
        close(row[prefix + "loss"], first + second)
    assert {"first", "second"} <= set(seen.updates[0].values)


# Metrics and logged numbers.


METRICS = {
    "by_mean": lambda output, target: distance(output, target).mean(),
    "by_row": distance,
    "by_mean_record": lambda output, target: MeanLoss(distance(output, target).mean(), len(target)),
    "by_sum": lambda output, target: SumLoss(distance(output, target).sum(), len(target)),
    "by_object": Errors(),
    "accuracy": accuracy,
    "doubled": Derived(lambda numbers: 2 * numbers["by_row"]),
    "perplexity": Derived(lambda numbers: math.exp(numbers["loss"])),
}


def check_metrics_are_exact_in_every_form(accumulate=1):
    x, y = rows_of_data()
    model = linear()
    with torch.no_grad():
        output = model(x)
        expected = distance(output, y).double().mean().item()
        loss = F.cross_entropy(output.double(), y).item()
        right = (output.argmax(1) == y).double().mean().item()
    made = trainer(model, metrics=METRICS, lr=0.0, accumulate=accumulate)
    pieces = cut(x, y, UNEVEN)
    row = made.fit(pieces, pieces, epochs=1).history[0]
    for prefix in ("val_", ""):
        for name in ("by_mean", "by_row", "by_mean_record", "by_sum", "by_object"):
            close(row[prefix + name], expected)
        close(row[prefix + "doubled"], 2 * expected)
        close(row[prefix + "perplexity"], math.exp(loss))
        assert row[prefix + "accuracy"] == right


@pytest.mark.parametrize("accumulate", [1, 3])
def test_metrics_of_every_form_are_exact_over_uneven_batches_in_training_and_validation(accumulate):
    check_metrics_are_exact_in_every_form(accumulate)


def test_numbers_start_anew_in_each_epoch_and_evaluation():
    model = linear()
    made = trainer(model, metrics={"object": Errors(), "row": distance}, lr=0.0)
    rows = made.fit(
        lambda epoch: cut(*rows_of_data(seed=epoch), UNEVEN), cut(*rows_of_data(), UNEVEN), epochs=3
    ).history
    for epoch, row in enumerate(rows):
        x, y = rows_of_data(seed=epoch)
        with torch.no_grad():
            close(row["loss"], F.cross_entropy(model(x).double(), y).item())
            expected = distance(model(x), y).double().mean().item()
        close(row["object"], expected)
        close(row["row"], expected)
        assert all(row[name] == rows[0][name] for name in ("val_loss", "val_row", "val_object"))


class Logging(Trainer):
    def training_step(self, batch):
        self.log("size", float(len(batch[1])))
        self.log("weighed", batch[0].sum(), count=int(batch[1][0]))
        return super().training_step(batch)


def check_logged_numbers_are_weighted(accumulate):
    x, y = rows_of_data()
    y[0] = y[12] = 2
    y[6] = y[18] = 0
    pieces = cut(x, y, UNEVEN)
    seen = Records()
    made = trainer(cls=Logging, accumulate=accumulate, observers=[seen])
    row = made.fit(pieces, pieces, epochs=1).history[0]
    weighed = (x[:6].double().sum() + x[12:18].double().sum()).item() / 2
    for prefix in ("", "val_"):
        close(row[prefix + "size"], (6 * 18 + 2 * 2) / 20)
        close(row[prefix + "weighed"], weighed)
    assert set(seen.updates[0].values) == {"size", "weighed"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_logged_numbers_are_weighted_by_their_count_which_is_the_batchs_by_default(accumulate):
    check_logged_numbers_are_weighted(accumulate)


def test_a_logged_value_is_detached():
    class Logs(Trainer):
        def training_step(self, batch):
            loss = super().training_step(batch)
            self.log("again", loss)
            return loss

    x, y = rows_of_data()
    row = trainer(cls=Logs).fit(cut(x, y, UNEVEN), epochs=1).history[0]
    assert row["again"] == row["loss"]


@pytest.mark.parametrize("name", ["loss", "lr", "val_x", "update", "grad_norm"])
def test_a_reserved_name_is_refused(name):
    class Logs(Trainer):
        def training_step(self, batch):
            self.log(name, 1.0)
            return super().training_step(batch)

    made, x = trainer(cls=Logs), rows_of_data()
    before = made.model.weight.clone()
    with pytest.raises(SettingError, match=name):
        made.fit(cut(*x, UNEVEN), epochs=1)
    assert torch.equal(before, made.model.weight)


# Names and rows.


def test_evaluate_names_its_numbers_after_the_data():
    x, y = rows_of_data()
    made = trainer(metrics={"accuracy": accuracy})
    assert set(made.evaluate(cut(x, y, UNEVEN), name="test")) == {"test_loss", "test_accuracy"}
    assert set(made.evaluate(cut(x, y, UNEVEN))) == {"val_loss", "val_accuracy"}
    assert made.history == []


def test_history_has_a_row_of_floats_for_each_epoch():
    x, y = rows_of_data()
    rows = trainer(metrics={"accuracy": accuracy}).fit(cut(x, y, UNEVEN), cut(x, y, UNEVEN), epochs=2).history
    assert [(row["epoch"], row["update"]) for row in rows] == [(1, 4), (2, 8)]
    names = {"epoch", "update", "loss", "accuracy", "val_loss", "val_accuracy", "lr"}
    assert all(set(row) == names for row in rows)
    assert all(isinstance(value, int | float) for row in rows for value in row.values())


def test_the_learning_rate_of_a_row_is_the_one_its_last_update_used():
    x, y = rows_of_data()
    seen = Records()
    made = trainer(schedule=lambda update, total: 1 - update / total, observers=[seen])
    rows = made.fit(cut(x, y, UNEVEN), epochs=2).history
    assert [row["lr"] for row in rows] == [seen.updates[3].lr, seen.updates[7].lr]
    assert seen.updates[3].lr == pytest.approx(0.1 * (1 - 3 / 8))
