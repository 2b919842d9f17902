"""The console: aligned, never wrapped, nothing per update, and no control characters where nobody watches."""

import io
import math
import re
from dataclasses import replace

import pytest
import torch

from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.records import Best, Result, Update, Validation
from trainwright.observers.console import Console, console_observers, footer, header
from trainwright.protocols import Observer, listeners

PLAN = Plan(
    model="SmallCNN",
    parameters=5218,
    precision="bf16",
    train="TensorDataset",
    val="360 rows",
    batches=45,
    rows=1437,
    batch_size=32,
    accumulate=((0, 2),),
    epochs=12,
    notes=("switched to train: SmallCNN",),
)

LAST = ("time", "rows/s", "data", "skipped")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def record(epoch, update, metrics=None, **fields):
    fields = {
        "best": False,
        "waited": 0,
        "patience": 0,
        "seconds": 2.0,
        "rows": 1437,
        "waiting": 0.03,
        "skipped": 0,
        **fields,
    }
    return Validation(epoch, update, metrics or {"loss": 1 / update, "val_loss": 2 / update, "lr": 2.15e-3}, **fields)


def result(**fields):
    history = [{"loss": 1 / n, "val_loss": 2 / n} for n in range(1, 13)]
    fields = {"best": None, "updates": 276, "epochs": 12, "stopped": "all epochs done", "seconds": 1.3, **fields}
    return Result(history, **fields)


def update(n, epoch=0):
    return Update(n, epoch, 0.523, 9.3e-3, (9.3e-3,), None, 64, False)


def printed(records, *, plan=PLAN, width=None, end=None):
    stream = io.StringIO()
    console = Console(stream, width=width)
    console.on_fit_start(plan)
    for one in records:
        console.on_validate(one)
        console.on_epoch(one)
    if end is not None:
        console.on_fit_end(end)
    return stream.getvalue().splitlines()


@pytest.fixture(autouse=True)
def short_version(monkeypatch):
    """A version string of one length: lines break where a longer one stands."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")


def rows(lines):
    """The table, without what stands above it."""
    return lines[lines.index("") + 1 :]


# --- before and after


def test_the_header_tells_the_arithmetic_of_the_run():
    first, second, note = header(PLAN)
    assert re.fullmatch(
        r"trainwright [\d.]+ · torch [\d.]+\S* · cpu, 1 thread · bf16 · SmallCNN 5.2k parameters", first
    )
    assert second == (
        "train 1437 rows in 45 batches of 32 · accumulate 2 → 23 updates/epoch, 276 in all · val 360 rows"
    )
    assert note == "switched to train: SmallCNN"


def test_a_long_version_of_torch_breaks_the_line_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.0.dev20261101+cu130.of.a.vendor.with.a.long.name")
    first, second, *others = header(PLAN)
    assert " · ".join([first, second]).endswith("a.long.name · cpu, 1 thread · bf16 · SmallCNN 5.2k parameters")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert others == header(PLAN)[1:]


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (Plan(train="a stream", max_updates=100, device="cuda"), "train a stream · 100 updates in all"),
        (Plan(max_seconds=90.0, device="cuda"), "train data without a length · at most 90.0s"),
        (Plan(batches=1, rows=1, batch_size=8, epochs=1), "train 1 row in 1 batch of 8 · 1 update/epoch, 1 in all"),
        (
            Plan(batches=10, accumulate=((0, 1), (2, 5)), epochs=4),
            "train 10 batches · accumulate 1, 5 from epoch 3 → 24 updates in all",
        ),
        (Plan(train="a stream", epochs=3, epoch_updates=50), "train a stream · 50 updates/epoch, 150 in all"),
        (Plan(train="a stream", epochs=3), "train a stream · 3 epochs"),
        (
            Plan(train="9 rows in batches of 4 from a DataLoader, 2 workers", batches=3, rows=9, batch_size=4),
            "train 9 rows in 3 batches of 4 from a DataLoader, 2 workers · 3 updates/epoch",
        ),
    ],
)
def test_the_header_tells_what_is_known_only(plan, line):
    assert header(plan)[1] == line


def test_the_header_tells_slots_and_what_is_frozen_where_there_is_any():
    plan = replace(PLAN, frozen=4000, settings=("schedule OneCycle(max_lr=0.01)", "clip 1.0", "average EMA(0.999)"))
    first, _, slots, note = header(plan)
    assert first.endswith(" · SmallCNN 5.2k parameters, 4.0k frozen")
    assert slots == "schedule OneCycle(max_lr=0.01) · clip 1.0 · average EMA(0.999)"
    assert note == "switched to train: SmallCNN"
    assert header(plan, 60)[-3:-1] == ["schedule OneCycle(max_lr=0.01) · clip 1.0", "average EMA(0.999)"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_each_validation_set_is_reported_on_a_line_of_its_own_where_it_must_be(width):
    sets = [f"{name}: 397 rows in batches of 128 from a DataLoader" for name in ("clean", "noisy")]
    lines = header(replace(PLAN, val="; ".join(sets)), width)
    assert all(f"val {one}" in lines for one in sets)


def test_the_footer_tells_end_best_weights_and_course():
    best = Best("val_loss", 0.13239, 12, 276)
    assert footer(result(best=best, weights="best of epoch 12", stopped="stopped early", skipped=2)) == [
        " loss     1.0000 █▄▃▂▂▂▁▁▁▁▁▁ 0.0833",
        " val_loss 2.0000 █▄▃▂▂▂▁▁▁▁▁▁ 0.1667",
        " end      12 epochs, 276 updates, 1.3s · 2 skipped · stopped early",
        " best     val_loss 0.1324 at epoch 12, update 276 · weights: best of epoch 12",
    ]
    assert footer(Result([], None, 1, 1, "", 0.1, blocked=0.9)) == [" end      1 epoch, 1 update, 0.1s · weights: last"]
    for found in (best, None):
        reported = "\n".join(footer(result(best=found, seconds=1000.0, blocked=75.2, skipped=2)))
        assert " of it waiting for saves · 2 skipped" in reported


@pytest.mark.parametrize(("seconds", "waiting", "says"), [(2.0, 0.63, True), (2.0, 0.2, False), (0.2, 0.63, False)])
def test_the_last_line_says_where_training_waited_for_data(seconds, waiting, says):
    stream = io.StringIO()
    console = Console(stream)
    console.on_fit_start(PLAN)
    for epoch in (1, 2):
        numbers = record(epoch, 10 * epoch, seconds=seconds, waiting=waiting)
        console.on_validate(numbers)
        console.on_epoch(numbers)
    console.on_fit_end(result())
    last = stream.getvalue().splitlines()[-1]
    assert (last == " note     data waited 63%: try workers=4") == says
    assert says or "workers" not in stream.getvalue()


def test_the_footer_draws_the_losses_and_what_is_watched_in_four_lines_at_most():
    names = ["loss", "val_a_loss", "val_b_loss", "val_c_loss", "val_b_R2", "mae"]
    history = [dict.fromkeys(names, 1 / n) for n in range(1, 40)]
    end = Result(history, None, 39, 39, "", 1.0, weights="last")
    lines = [line.split()[0] for line in footer(end)]
    assert lines == ["loss", "val_a_loss", "val_b_loss", "val_c_loss", "end"]
    for width in (60, 80, 100):
        *courses, last = footer(end, width, watched=("val_b_R2", "mae"))
        assert [line.split()[0] for line in courses] == ["loss", "val_a_loss", "val_b_R2", "mae"]
        assert {line.index("1.0000") for line in courses} == {last.index("39 epochs")}
        assert max(map(len, courses)) <= width
    assert footer(result(), watched=("val_loss",)) == footer(result())
    name = "val_" + "x" * 40
    wide = Result([{name: 1.0}, {name: 0.5}], None, 1, 1, "", 1.0)
    assert max(map(len, footer(wide, 60, watched=(name,)))) <= 60


def test_the_console_draws_what_the_plan_says_is_watched():
    history = [{"loss": 1.0, "mae": 1.0, "f1": 0.5}, {"loss": 0.5, "mae": 2.0, "f1": 0.6}]
    end = Result(history, None, 1, 1, "", 1.0)
    lines = printed([], plan=replace(PLAN, watched=("mae",)), end=end)
    assert " mae      1.0000 ▁█ 2.0000" in lines
    assert not any(line.startswith(" f1") for line in lines)


# --- the table


def test_one_row_per_epoch_though_two_events_come():
    table = rows(printed([record(1, 23, best=True, patience=4), record(2, 46, waited=1, patience=4)]))
    assert table == [
        " epoch   update         lr       loss   val_loss    best     time   rows/s   data",
        "     1       23    2.15e-3     0.0435     0.0870       ●     2.0s      718     3%",
        "     2       46    2.15e-3     0.0217     0.0435     1/4     2.0s      718     3%",
    ]


def test_a_validation_between_epochs_has_a_row_of_its_own():
    stream = io.StringIO()
    console = Console(stream)
    console.on_fit_start(PLAN)
    console.on_validate(record(0, 10))
    console.on_validate(record(0, 20))
    console.on_epoch(record(1, 23, {"loss": 0.5, "lr": 1e-3}))
    console.on_epoch(record(2, 23, {"loss": 0.5, "lr": 1e-3}))  # an epoch of held back updates is an epoch
    table = [line.split()[:5] for line in rows(stream.getvalue().splitlines())]
    assert [row[:2] for row in table[1:]] == [["0", "10"], ["0", "20"], ["1", "23"], ["2", "23"]]
    assert table[3][2:4] == ["1.00e-3", "0.5000"]


def test_columns_stand_under_their_names():
    metrics = {"loss": 123.4, "val_loss": 1e-9, "lr": 0.0, "val_accuracy": math.nan, "val_mse": -123456.7, "epoch": 9}
    head, row = rows(printed([record(1, 23, metrics, best=True, skipped=3)], width=200))
    assert head.split() == ["epoch", "update", "lr", "loss", "val_loss", "val_accuracy", "val_mse", "best", *LAST]
    assert row.split() == ["1", "23", "0", "123.4000", "1.000e-9", "nan", "-123456.7", "●", "2.0s", "718", "3%", "3"]
    ends = [[match.end() for match in re.finditer(r"\S+", line)] for line in (head, row)]
    assert ends[0] == ends[1]


def test_columns_appear_when_there_is_something_to_tell():
    early = {"loss": 1.0, "lr": 0.1}
    table = rows(printed([record(1, 23, early), record(2, 46), record(3, 69, early, skipped=1), record(4, 92)]))
    heads = [line for line in table if "epoch" in line]
    assert len(heads) == 3
    assert "val_loss" not in heads[0]
    assert "skipped" not in heads[1]
    assert "val_loss" in heads[2]
    assert "skipped" in heads[2]
    assert "best" not in heads[2]
    assert len(table) == 4 + 3


def table_head(metrics, width, watched=()):
    """The names of a table's columns, and of those that it says it leaves out."""
    plan = replace(PLAN, watched=watched)
    table = rows(printed([record(1, 23, {"loss": 1.0, "lr": 0.1, **metrics}, best=True)], plan=plan, width=width))
    assert max(map(len, table)) <= width
    at = next(i for i, line in enumerate(table) if line.split()[0] == "epoch")
    return table[at].split(), " ".join(table[:at]).replace("not shown", "").replace(" · ", " ").split()


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("watched", ["val_R2", "val_noisy_R2", "loss_G", "inception"])
def test_a_watched_number_is_in_the_table(width, watched):
    sets = [f"val_{of}_{name}" for of in ("clean", "noisy") for name in ("loss", "mae", "R2")]
    metrics = {
        "val_R2": ["mse", "l1", "mae", "R2", "val_loss", "val_mse", "val_l1", "val_mae", "val_R2"],
        "val_noisy_R2": ["mae", "R2", *sets],
        "loss_G": ["loss_D", "loss_E", "loss_F", "loss_G", "lr_D", "lr_E", "lr_F", "lr_G"],
        "inception": ["loss_D", "loss_G", "lr_D", "lr_G", "val_fid_of_all", "inception"],
    }[watched]
    shown, hidden = table_head(dict.fromkeys(metrics, 0.5), width, (watched,))
    assert watched in shown
    assert {*shown, *hidden} >= {"epoch", "update", "lr", "loss", *metrics}
    assert not {"time", "rows/s", "data"} & set(hidden)
    if "lr" in shown:  # a rate is given up before what validation says
        assert not any(name.startswith("val_") for name in hidden)


@pytest.mark.parametrize("width", [60, 72, 100])
def test_no_line_is_wider_than_the_width(width):
    plan = Plan(model="M" * 70, parameters=10**9, train="x", notes=("word " * 60, "y" * 250), max_updates=5)
    best = Best("val_loss", 0.1, 12, 276)
    many = record(1, 23, {"loss": 1.0, "val_loss": 1.0, "lr": 0.1} | {f"val_{i}": 0.1 for i in range(30)}, best=True)
    end = result(best=best, stopped="because " * 30)
    lines = printed([many], plan=plan, width=width, end=end)
    assert max(map(len, lines)) <= width
    text = "".join(lines)
    assert text.count("word") == 60
    assert text.count("y") >= 250
    assert text.count("because") == 30


def test_the_table_begins_anew_with_every_fit():
    stream = io.StringIO()
    console = Console(stream)
    for _ in range(2):
        console.on_fit_start(PLAN)
        console.on_epoch(record(1, 23))
        console.on_fit_end(result())
    assert stream.getvalue().count(" epoch   update") == 2
    assert stream.getvalue().count("     1       23") == 2


# --- where it prints


def test_nothing_is_received_per_update_and_no_carriage_return_printed_without_a_terminal():
    observers = console_observers(Console(stream := io.StringIO()))
    assert listeners(observers, "on_update") == []
    observers[0].on_fit_start(PLAN)
    observers[0].on_epoch(record(1, 23))
    observers[0].on_fit_end(result())
    assert not set("\r\x1b") & set(stream.getvalue())


def test_true_prints_to_standard_output_and_false_nothing(capsys):
    (console,) = console_observers(True)
    console.on_fit_start(PLAN)
    assert "SmallCNN" in capsys.readouterr().out
    assert console_observers(False) == []


@pytest.mark.parametrize("console", [None, 1, "yes", Observer()])
def test_another_setting_is_refused(console):
    with pytest.raises(SettingError, match="True, False or Console"):
        console_observers(console)


@pytest.mark.parametrize("width", [59, 0, 80.0, True])
def test_a_width_is_a_number_of_characters(width):
    with pytest.raises(SettingError, match="at least 60"):
        Console(width=width)


def test_a_stream_of_few_letters_stops_nothing():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(stream)
    console.on_fit_start(Plan(notes=("größer",)))
    console.on_epoch(record(1, 23, best=True))
    console.on_fit_end(result())
    text = raw.getvalue().decode("ascii")
    assert " | " in text
    assert "#:-..." in text
    assert "gr??er" in text
