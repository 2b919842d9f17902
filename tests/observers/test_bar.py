"""The live bar: whole at every width, drawn by time, and gone when a row of the table is printed."""

import os
import pty
import re

import pytest

from observers.test_console import PLAN, Terminal, printed, record, result, update
from trainwright.core.plan import Plan
from trainwright.observers.console import Console, console_observers
from trainwright.observers.live import LiveBar
from trainwright.observers.table import printable


def test_a_terminal_gets_a_bar_that_leaves_only_the_rows():
    bar, console = console_observers(Console(stream := Terminal(), width=80))
    assert isinstance(bar, LiveBar)
    for observer in (bar, console):
        observer.on_fit_start(PLAN)
    bar.on_update(update(1))
    bar._bar.delay = bar._bar.mininterval = 0  # draw at every update
    for n in range(2, 11):
        bar.on_update(update(n))
    assert "epoch 1/12" in stream.getvalue()
    assert "10/23 · loss 0.5230 · lr 9.30e-3 ·" in stream.getvalue()
    assert max(len(part) for part in re.split(r"[\r\n]", stream.getvalue())) <= 100
    for event in ("on_validate", "on_epoch"):
        for observer in (bar, console):
            getattr(observer, event)(record(1, 23))
    bar.on_update(update(24, epoch=1))
    for observer in (bar, console):
        observer.on_fit_end(result())
    seen = screen(stream.getvalue())
    assert not any("loss 0.5230" in line for line in seen)
    assert seen[-5:] == printed([record(1, 23)], end=result(), width=80)[-5:]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("pace", [10.0, 0.01])
def test_a_bar_is_whole_at_every_width(width, encoding, pace):
    stream = Terminal()
    stream.encoding = encoding
    bar = LiveBar(stream, width=width)
    bar.on_fit_start(Plan(batches=4567, epochs=1200))
    bar.on_update(update(1, epoch=1150))
    bar._bar.n, bar._seen, bar._done = 1234, 1234, 1200 * 4567 - 3333
    bar._began -= 1234 / pace
    line = str(bar._bar)  # what it draws
    bar.on_fit_end(result())
    head, *parts = line.split(printable(" · ", encoding))
    assert len(line) <= width
    assert re.fullmatch(r" epoch 1151/1200 [█▏▎▍▌▋▊▉#\d ]{8,24} 1234/4567", head)
    assert parts[:2] == ["loss 0.5230", "lr 9.30e-3"][: 1 if width == 60 else 2]
    assert re.fullmatch("" if width == 60 else r"(05:3|92:3\d:)\d\d? left", "".join(parts[2:]))


def test_a_bar_draws_by_time_and_starts_no_thread():
    bar = LiveBar(stream := Terminal())
    bar.on_fit_start(PLAN)
    for n in range(1, 2000):
        bar.on_update(update(n))
    assert "monitor" not in vars(type(bar._bar))  # tqdm's own thread, where it makes one
    assert stream.getvalue().count("loss") <= 20
    bar.on_fit_end(result())


def test_a_bar_without_a_length_counts_updates():
    bar = LiveBar(stream := Terminal())
    bar.on_fit_start(Plan(train="a stream", max_updates=10))
    bar.on_update(update(1))
    bar._bar.delay = bar._bar.mininterval = 0
    bar.on_update(update(2))
    bar.on_fit_end(result())
    assert " epoch 1 2 updates · loss 0.5230" in stream.getvalue()


def test_a_narrow_terminal_is_not_overrun(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    main, other = pty.openpty()
    try:
        with os.fdopen(other, "w", encoding="utf-8") as stream:
            assert Console(stream).width == 72
            bar, _ = console_observers(Console(stream))
            assert bar._width == 72
    finally:
        os.close(main)


def screen(text):
    """What is left on a terminal once carriage returns have been obeyed."""
    lines = []
    for line in text.split("\n"):
        cells = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines[:-1] if lines[-1] == "" else lines


def test_a_bar_shows_the_time_left_for_the_run_and_not_for_the_epoch_alone():
    bar = LiveBar(Terminal())
    bar.on_fit_start(Plan(batches=100, epochs=10))
    for n in range(1, 51):
        bar.on_update(update(n))
    bar._began -= 50  # a second for each update
    assert bar.seconds_left() == pytest.approx(950, abs=1)
    bar.on_fit_end(result(updates=1000))
    bar.on_fit_start(Plan(batches=100, epochs=2))  # the next stage
    for n in range(1001, 1051):
        bar.on_update(update(n))
    bar._began -= 50
    assert bar.seconds_left() == pytest.approx(150, abs=1)
    bar.on_fit_end(result())
    bar.on_fit_start(Plan(batches=100, epochs=10, max_seconds=20))
    assert bar.seconds_left() == pytest.approx(20, abs=1)
    bar.on_fit_start(Plan(train="a stream"))
    assert bar.seconds_left() is None


def test_the_line_of_the_bar_is_blank_after_ctrl_c():
    bar = LiveBar(stream := Terminal(), width=80)
    bar.on_fit_start(PLAN)
    bar.on_update(update(1))
    stream.write("^C")  # the terminal's echo
    bar.on_fit_end(result())
    assert screen(stream.getvalue() + "\n") == [""]
