"""The Numbers law: every reported number is an exact count-weighted mean in the user's own scale; a NaN shows."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright import Derived, EarlyStopping, Mean, Observer, SettingError, Step, Sum, Trainer, accuracy


def close(value, expected, rel=1e-6):
    assert value == pytest.approx(expected, rel=rel), (value, expected)


def rows_of_data(rows=20, classes=3, seed=0):
    """Rows whose losses differ a lot, so that a mean of batch means is far from the mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator) * torch.linspace(0.1, 5, rows)[:, None]
    return x, torch.randint(0, classes, (rows,), generator=generator)


def cut(x, y, sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


UNEVEN = [6, 6, 6, 2]


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def trainer(model=None, loss=None, cls=Trainer, lr=0.1, **settings):
    model = linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return cls(model, optimizer, nn.CrossEntropyLoss() if loss is None else loss, console=False, **settings)


class Seen(Observer):
    def __init__(self):
        self.updates, self.rows = [], []

    def on_update(self, update):
        self.updates.append(update)

    def on_validate(self, record):
        self.rows.append(record)


class Fixed(Trainer):
    """A batch is (values, counts): its loss is the mean of the values over the counts, whatever the weights are."""

    def training_step(self, batch):
        values, counts = batch
        return Mean(values.float().mean() + 0 * self.model.weight.sum(), int(counts[0]))


def fixed(losses, counts, cls=Fixed, **settings):
    data = [(torch.full((2,), loss), torch.full((2,), count)) for loss, count in zip(losses, counts, strict=True)]
    return trainer(cls=cls, **settings), data


# Losses.


def check_training_loss_is_the_mean_over_rows(accumulate):
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
    seen = Seen()
    result = trainer(accumulate=accumulate, observers=[seen]).fit(pieces, epochs=1)
    close(result.history[0]["loss"], total / len(x))
    assert len(seen.updates) == len(by_update)
    for update, expected in zip(seen.updates, by_update, strict=True):
        close(update.loss, expected)
    if accumulate == 1:
        assert [update.loss for update in seen.updates] == by_update


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_training_loss_is_the_mean_over_rows_and_never_divided_by_accumulate(accumulate):
    check_training_loss_is_the_mean_over_rows(accumulate)


def check_validation_loss_is_the_mean_over_rows():
    x, y = rows_of_data()
    model = linear()
    numbers = trainer(model).evaluate(cut(x, y, UNEVEN))
    with torch.no_grad():
        close(numbers["val_loss"], F.cross_entropy(model(x).double(), y).item())


def test_validation_loss_is_the_mean_over_rows_for_an_uneven_last_batch():
    check_validation_loss_is_the_mean_over_rows()


def check_elements_weigh_a_loss_over_elements(accumulate):
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_over_elements_is_weighted_by_elements(accumulate):
    check_elements_weigh_a_loss_over_elements(accumulate)


def check_ignored_targets_do_not_count(accumulate):
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


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_micro_batch_that_counts_nothing_leaves_the_mean_of_the_others(accumulate):
    check_ignored_targets_do_not_count(accumulate)


def check_class_weights_are_counts():
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


def test_with_class_weights_the_mean_is_over_the_weights():
    check_class_weights_are_counts()


def check_a_steps_own_count_weighs_its_loss(accumulate):
    seen = Seen()
    made, data = fixed([1.0, 10.0, 4.0], [5, 1, 0], accumulate=accumulate, observers=[seen])
    result = made.fit(data, data, epochs=1)
    close(result.history[0]["loss"], 15 / 6, rel=1e-12)
    close(result.history[0]["val_loss"], 15 / 6, rel=1e-12)


def test_a_count_of_the_steps_own_weighs_its_loss():
    check_a_steps_own_count_weighs_its_loss(3)


def test_a_sum_without_count_is_reported_per_row():
    class Summed(Trainer):
        def training_step(self, batch):
            return Sum(F.mse_loss(self.model(batch[0]), batch[1], reduction="sum"))

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
            return Sum(total, count_as(len(batch[0]) if batch[0].isfinite().all() else 0))

    pieces = [(torch.ones(3),), (torch.full((4,), math.nan),), (torch.full((1,), 5.0),)]
    assert trainer(cls=Masked).evaluate(pieces)["val_loss"] == 8 / 4


def check_named_losses_are_reported_each(accumulate):
    class Two(Trainer):
        def training_step(self, batch):
            first, second = batch[0].mean(), batch[0].square().mean()
            return {"first": first + 0 * self.model.weight.sum(), "second": second}

    x = torch.arange(7.0)
    seen = Seen()
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_named_losses_are_reported_each_and_their_sum_as_the_loss(accumulate):
    check_named_losses_are_reported_each(accumulate)


# Many rows.


class Constant(Trainer):
    """The loss of a batch is its first number, over as many rows as it has; no row is touched."""

    count_as = staticmethod(int)

    def training_step(self, batch):
        loss = batch[0][0] + 0 * self.model.weight.sum()
        return Step(Mean(loss, self.count_as(len(batch[0]))), batch[0], batch[0])


def check_more_rows_than_a_float32_counts(count_as=int):
    many = [(torch.zeros(1).expand(2**24),), (torch.ones(1),), (torch.ones(1),), (torch.ones(1),)]
    expected = 3 / (2**24 + 3)

    class Counted(Constant):
        pass

    Counted.count_as = staticmethod(count_as)
    metrics = {
        "mean": lambda output, target: output[0],
        "counted": lambda output, target: Mean(output[0], count_as(len(output))),
        "summed": lambda output, target: Sum(output[0] * len(output), len(output)),
    }
    made = trainer(cls=Counted, metrics=metrics, lr=0.0)
    row = made.fit(many, many, epochs=1).history[0]
    names = ("loss", "val_loss", "val_mean", "val_counted", "val_summed", "mean", "counted", "summed")
    assert {name: row[name] for name in names} == dict.fromkeys(names, expected)


@pytest.mark.parametrize("count_as", [int, torch.tensor], ids=["host", "tensor"])
def test_rows_beyond_two_to_the_24_are_all_counted(count_as):
    check_more_rows_than_a_float32_counts(count_as)


def test_a_metric_of_one_value_per_row_counts_beyond_two_to_the_24():
    class One(Trainer):
        def validation_step(self, batch):
            return Step(None, batch[0], batch[0])

    hits = [(torch.ones(1, dtype=torch.bool).expand(2**24),), (torch.zeros(1, dtype=torch.bool),)]
    made = trainer(cls=One, metrics={"hit": lambda output, target: output})
    assert made.evaluate(hits)["val_hit"] == 2**24 / (2**24 + 1)


# Metrics and logged numbers.


class Errors:
    """A metric object: mean absolute error over all rows."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.rows = 0.0, 0

    def update(self, output, target):
        self.total += float((output[:, 0] - target).abs().double().sum())
        self.rows += len(target)

    def compute(self):
        return self.total / self.rows

    def state_dict(self):
        return {"total": self.total, "rows": self.rows}

    def load_state_dict(self, tree):
        self.total, self.rows = tree["total"], tree["rows"]


def distance(output, target):
    return (output[:, 0] - target).abs()


METRICS = {
    "by_mean": lambda output, target: distance(output, target).mean(),
    "by_row": distance,
    "by_mean_record": lambda output, target: Mean(distance(output, target).mean(), len(target)),
    "by_sum": lambda output, target: Sum(distance(output, target).sum(), len(target)),
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


def check_numbers_start_anew_each_epoch():
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


def test_numbers_start_anew_in_each_epoch_and_evaluation():
    check_numbers_start_anew_each_epoch()


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
    seen = Seen()
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


# NaN.


def check_a_nan_row_shows_in_validation():
    x, y = rows_of_data()
    x[13, 2] = math.nan
    made = trainer(metrics={"row": distance, "mean": lambda o, t: distance(o, t).mean(), "object": Errors()})
    numbers = made.evaluate(cut(x, y, UNEVEN))
    assert all(math.isnan(value) for value in numbers.values()), numbers


def test_a_nan_in_one_row_shows_in_every_number_of_the_evaluation():
    check_a_nan_row_shows_in_validation()


@pytest.mark.parametrize("policy", ["ignore", "skip"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_nan_in_one_training_row_shows_in_the_loss_of_the_epoch(policy, accumulate):
    check_a_nan_row_shows_in_training(policy, accumulate)


def check_a_nan_row_shows_in_training(policy, accumulate):
    x, y = rows_of_data()
    x[13, 2] = math.nan
    seen = Seen()
    made = trainer(nonfinite=policy, accumulate=accumulate, observers=[seen])
    assert math.isnan(made.fit(cut(x, y, UNEVEN), epochs=1).history[0]["loss"])
    assert math.isnan(seen.updates[2 // accumulate].loss)


class Planned(Trainer):
    """Validates to numbers that are planned, one per epoch."""

    planned = ()

    def validation_step(self, batch):
        return Step(Mean(torch.tensor(self.planned[self.progress.epoch - 1], dtype=torch.float64), 1), None, None)


def stops_at(values, patience, min_delta, mode):
    """The definition, by hand: (epochs run, epoch of the best)."""
    best, best_epoch, waited = None, None, 0
    for epoch, value in enumerate(values, 1):
        sign = 1 if mode == "min" else -1
        if not math.isnan(value) and (
            best is None or sign * value < sign * best - (min_delta if best is not None else 0)
        ):
            best, best_epoch, waited = value, epoch, 0
        else:
            waited += 1
        if waited == patience:
            return epoch, best_epoch
    return len(values), best_epoch


def run_planned(values, patience, min_delta, mode):
    class Here(Planned):
        planned = tuple(values)

    early = EarlyStopping("val_loss", mode=mode, patience=patience, min_delta=min_delta)
    made = trainer(cls=Here, early_stopping=early)
    batch = [(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))]
    return made.fit(batch, batch, epochs=len(values))


def check_early_stopping_follows_its_definition(rounds=40):
    rng = random.Random(0)
    for _ in range(rounds):
        length, patience = rng.randint(1, 10), rng.randint(1, 4)
        min_delta, mode = rng.choice([0.0, 0.1]), rng.choice(["min", "max"])
        sign = -1 if mode == "min" else 1
        values = [
            math.nan if rng.random() < 0.25 else 2 + sign * 0.04 * i * rng.choice([-1, 1, 1]) for i in range(length)
        ]
        epochs, best = stops_at(values, patience, min_delta, mode)
        result = run_planned(values, patience, min_delta, mode)
        assert result.epochs == epochs, (values, patience, min_delta, mode)
        assert (result.best.epoch if result.best else None) == best
        if epochs < length:
            assert "did not improve" in result.stopped or "never better" in result.stopped


def test_early_stopping_follows_its_definition_through_random_runs():
    check_early_stopping_follows_its_definition()


def check_a_nan_is_never_best_and_never_resets_patience():
    nan = math.nan
    assert run_planned([1.0, nan, nan, 0.5], 2, 0.0, "min").epochs == 3
    result = run_planned([nan, 1.0, 2.0, 3.0, 4.0], 2, 0.0, "min")
    assert (result.epochs, result.best.value, result.best.epoch) == (4, 1.0, 2)
    assert run_planned([nan, nan, 1.0], 2, 0.0, "max").epochs == 2


def test_a_nan_is_never_best_and_never_resets_patience():
    check_a_nan_is_never_best_and_never_resets_patience()


def check_min_delta_adds_up():
    """A gain of 0.04 an epoch beats the best by 0.1 every third epoch, so three epochs of patience never run out."""
    steady = [1.0 - 0.04 * i for i in range(12)]
    result = run_planned(steady, 3, 0.1, "min")
    assert (result.epochs, result.best.epoch) == (12, 10)
    assert run_planned(steady, 2, 0.1, "min").epochs == 3


def test_min_delta_is_cumulative():
    check_min_delta_adds_up()


def check_one_standard_error_is_over_rows():
    x, y = rows_of_data()
    model = linear()
    early = EarlyStopping("val_loss", min_delta="1se")
    made = trainer(model, early_stopping=early)
    made.evaluate(cut(x, y, UNEVEN))
    with torch.no_grad():
        losses = F.cross_entropy(model(x).double(), y, reduction="none")
    close(made.errors["val_loss"], losses.std(correction=0).item() / math.sqrt(len(x)))


def test_one_standard_error_is_taken_over_the_rows_of_the_validation():
    check_one_standard_error_is_over_rows()


def test_one_standard_error_decides_in_fit():
    x, y = rows_of_data()
    pieces = cut(x, y, UNEVEN)
    made = trainer(early_stopping=EarlyStopping("val_loss", min_delta="1se", patience=2), lr=1e-4)
    result = made.fit(pieces, pieces, epochs=9)
    assert result.epochs == 3  # gains far below the error of the mean
    assert result.best.epoch == 1


def test_one_standard_error_of_a_loss_without_rows_is_refused_before_the_first_update():
    x, y = rows_of_data()
    early = EarlyStopping("val_loss", min_delta="1se")

    def unknown(output, target):
        return F.cross_entropy(output, target)

    made = trainer(loss=unknown, early_stopping=early)
    before = made.model.weight.clone()
    with pytest.raises(SettingError, match="one value per row"):
        made.fit(cut(x, y, UNEVEN), cut(x, y, UNEVEN), epochs=1)
    assert torch.equal(before, made.model.weight)


def test_the_learning_rate_of_a_row_is_the_one_its_last_update_used():
    x, y = rows_of_data()
    seen = Seen()
    made = trainer(schedule=lambda update, total: 1 - update / total, observers=[seen])
    rows = made.fit(cut(x, y, UNEVEN), epochs=2).history
    assert [row["lr"] for row in rows] == [seen.updates[3].lr, seen.updates[7].lr]
    assert seen.updates[3].lr == pytest.approx(0.1 * (1 - 3 / 8))
