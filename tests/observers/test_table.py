"""The table and its numbers: what makes room first, short texts, honest about what is not finite."""

import math

import pytest

from trainwright.core.records import Validation
from trainwright.observers.table import ConsoleTable, amount, duration, joined, number, printable, rate, sparkline


def test_wide_tables_drop_times_then_trainings_side_then_rates_then_last_metrics_then_watched():
    names = ["loss", "lr", "val_loss", "f1", "accuracy", "val_f1", "val_accuracy"]
    order = ["data", "rows/s", "time", "accuracy", "f1", "lr", "val_accuracy", "update", "val_f1"]
    record = Validation(1, 23, dict.fromkeys(names, 0.5), True, 0, 0, seconds=2.0, rows=1437, waiting=0.03, skipped=0)
    dropped = []
    for width in range(140, 35, -1):
        table = ConsoleTable(width, watched=["val_f1"])
        *missing, head, _ = table.lines(record)
        dropped.append([name for name in order if name not in head.split()])
        assert set(" ".join(missing).replace("not shown", "").replace(" · ", " ").split()) == set(dropped[-1][3:])
        assert {"epoch", "loss", "val_loss", "best"} <= set(head.split())
    assert [names for i, names in enumerate(dropped) if names not in dropped[:i]] == [order[:n] for n in range(10)]


def test_an_epoch_of_which_nothing_was_trained_on_here_has_no_speed():
    """A resume at an epoch's end validates it."""
    table, lines = ConsoleTable(110), list[str]()
    for rows in (0, 8):
        record = Validation(1, 23, {"loss": 0.5}, False, 0, 0, seconds=2.0, rows=rows, waiting=0.03, skipped=0)
        lines += table.lines(record)
    assert [line.split()[-2] for line in lines] == ["rows/s", "-", "4"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.13239, "0.1324"),
        (2.2777, "2.2777"),
        (0, "0.0000"),
        (1.5e-5, "1.500e-5"),
        (22026.4658, "22026.5"),
        (-0.5, "-0.5000"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (3e8, "3.000e8"),
        (-2e-7, "-2.000e-7"),
        (0.001, "0.0010"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_rates_amounts_and_times():
    assert [rate(x) for x in (2.15e-3, 0.1, 1.0, 0.0, math.nan)] == ["2.15e-3", "1.00e-1", "1.00e0", "0", "nan"]
    assert [amount(x) for x in (0, 980, 999.6, 999.96, 19_830, 5_218_000, 7e9)] == [
        "0", "980", "1000", "1.0k", "19.8k", "5.2M", "7.0G",
    ]  # fmt: skip
    assert [duration(x) for x in (0.04, 9.96, 99.94, 99.96, 245, 3600, 9000)] == [
        "40ms", "10.0s", "99.9s", "1m40s", "4m05s", "1h00m", "2h30m",
    ]  # fmt: skip


def test_a_sparkline_shows_course_and_what_was_not_finite():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, math.nan, 1, math.inf, 1]) == "█\u00d7▁\u00d7▁"
    assert sparkline([2, 2]) == sparkline([1e20, 1e20 * (1 + 1e-9)]) == "▅▅"
    assert sparkline([1.00000002, 1.00000001, 1.0, 1.00000001]) == "▅▅▅▅"  # no fall where none can be read
    assert sparkline([1e-6, 2e-6, 1e-6]) == sparkline([1.0, 2.0, 1.0]) == "▁█▁"
    assert sparkline([0.20209, 0.20201]) == "█▁"
    assert sparkline([math.nan, math.nan]) == "\u00d7\u00d7"
    assert len(sparkline(list(range(1000)))) <= 24
    assert sparkline([1.0] * 90 + [math.nan] + [1.0] * 9).count("\u00d7") == 1


def test_parts_are_joined_under_each_other():
    assert joined(["aaaa", "bbbb", "cc"], 14, start=" end ") == [" end aaaa", "     bbbb · cc"]
    assert printable("a · b", "ascii") == "a | b"
    assert printable("a · b", None) == "a · b"
