"""The journal: complete, readable after a crash, one history over resumes, and honest about NaN."""

import csv
import json
import math
import os
from pathlib import Path

import pytest
import torch

from trainwright import Checkpoint, Trainer
from trainwright.core.durations import Updates
from trainwright.core.errors import DataError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.records import Best, Result, Saved, Update, Validation
from trainwright.observers.journal import Journal, journal_to_csv, read_journal
from trainwright.protocols import listeners


def update(n, loss=0.5, **fields):
    fields = {"lr": 0.1, "lrs": (0.1,), "grad_norm": None, "rows": 64, "skipped": False, **fields}
    return Update(n, 0, loss, **fields)


def validation(n, epoch=1, **metrics):
    return Validation(epoch, n, {"loss": 0.5, **metrics}, True, 0, 4, 1.5, 640, 0.25, 0)


def result(updates, best=None):
    return Result([], best, updates, 1, "all epochs done", 2.5)


def write(path, start, stop, *, resume=None, end=True):
    """One run from update `start` to `stop`, an epoch each 10 updates."""
    journal = Journal(path)
    if resume is not None:
        journal.resume_at(resume)
    journal.on_fit_start(Plan(model="Net"))
    for n in range(start, stop + 1):
        journal.on_update(update(n, loss=1 / n))
        if n % 10 == 0:
            journal.on_epoch(validation(n, epoch=n // 10))
    if end:
        journal.on_fit_end(result(stop))
    return journal


def shape(records):
    return [(record["event"], record.get("update")) for record in records]


def test_every_event_is_a_line_of_strict_json(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    journal = Journal(path)
    assert all(
        listeners([journal], f"on_{event}") for event in ("fit_start", "update", "validate", "epoch", "save", "fit_end")
    )
    journal.on_fit_start(Plan(model="Net", epochs=3, batches=4, notes=("a note",)))
    journal.on_update(update(1, loss=0.1 + 0.2, lrs=(0.1, 0.01), grad_norm=2.0, skipped=True, values={"kl": 0.25}))
    journal.on_validate(validation(1, val_loss=0.25))
    journal.on_epoch(validation(1))
    journal.on_save(Saved(tmp_path / "update_1", 1, True, seconds=2.0, blocked=0.25, size=1000))
    journal.on_fit_end(result(1, Best("val_loss", 0.25, 1, 1)))
    lines = path.read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert records == read_journal(path)
    start, one, judged, epoch, saved, end = records
    assert (start["event"], start["model"], start["updates"], start["notes"]) == ("start", "Net", 12, ["a note"])
    assert one == {
        "event": "update", "update": 1, "epoch": 0, "loss": 0.1 + 0.2, "lr": 0.1, "rows": 64,
        "lrs": [0.1, 0.01], "grad_norm": 2.0, "skipped": True, "held_back": 1, "values": {"kl": 0.25},
    }  # fmt: skip
    assert judged == {
        "event": "validate", "epoch": 1, "update": 1, "best": True, "waited": 0, "patience": 4, "seconds": 1.5,
        "rows": 640, "waiting": 0.25, "skipped": 0, "metrics": {"loss": 0.5, "val_loss": 0.25},
    }  # fmt: skip
    assert epoch["event"] == "epoch"
    assert saved == {
        "event": "save", "update": 1, "path": str(tmp_path / "update_1"), "best": True, "seconds": 2.0, "blocked": 0.25,
        "size": 1000,
    }  # fmt: skip
    assert end == {
        "event": "end", "updates": 1, "epochs": 1, "stopped": "all epochs done", "seconds": 2.5, "blocked": 0.0,
        "skipped": 0, "weights": "last", "best": {"name": "val_loss", "value": 0.25, "epoch": 1, "update": 1},
    }  # fmt: skip


def test_nan_and_infinity_are_written_as_words_and_read_as_numbers(tmp_path):
    journal = Journal(tmp_path / "run.jsonl")
    journal.on_fit_start(Plan())
    journal.on_update(update(1, loss=math.nan, lrs=(math.inf, 0.1), grad_norm=-math.inf, values={"kl": math.nan}))
    journal.on_epoch(validation(1, val_loss=math.inf))
    journal.on_fit_end(result(1, Best("loss", -math.inf, 1, 1)))
    text = journal.path.read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=pytest.fail)
    assert '"loss":"NaN"' in text
    _, one, epoch, end = read_journal(journal.path)
    assert math.isnan(one["loss"])
    assert math.isnan(one["values"]["kl"])
    assert (one["lrs"], one["grad_norm"]) == ([math.inf, 0.1], -math.inf)
    assert epoch["metrics"]["val_loss"] == math.inf
    assert end["best"]["value"] == -math.inf


@pytest.mark.parametrize("every", [4, Updates(4)])
def test_updates_can_be_thinned_but_a_skipped_one_is_always_there(tmp_path, every):
    journal = Journal(tmp_path / "run.jsonl", updates=every)
    journal.on_fit_start(Plan())
    for n in range(1, 13):
        journal.on_update(update(n, skipped=n == 6))
    journal.on_fit_end(result(12))
    assert [record["update"] for record in read_journal(journal.path)[1:-1]] == [4, 6, 8, 12]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_every_how_many_updates_is_a_whole_number(tmp_path, every):
    with pytest.raises(SettingError, match="a whole number of updates"):
        Journal(tmp_path / "run.jsonl", updates=every)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_torn_anywhere_costs_that_line_only(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    write(path, 1, 12)
    whole = read_journal(path)
    last = len(path.read_bytes().splitlines(keepends=True)[-1])
    os.truncate(path, path.stat().st_size - min(cut, last))
    expected = whole if cut == 1 else whole[:-1]  # only the line's end is missing
    assert read_journal(path) == expected
    write(path, 13, 14)
    again = read_journal(path)
    assert shape(again) == [*shape(expected), ("start", None), ("update", 13), ("update", 14), ("end", None)]


def test_a_line_torn_between_two_braces_is_a_torn_one(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 10, end=False)._close()
    records = read_journal(path)
    assert path.read_bytes().endswith(b"}}\n")
    os.truncate(path, path.stat().st_size - 2)
    assert read_journal(path) == records[:-1]
    write(path, 11, 11)
    assert shape(read_journal(path))[-4:] == [("update", 10), ("start", None), ("update", 11), ("end", None)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 3)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-4]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="line 3"):
        read_journal(path)


def test_an_empty_or_wholly_torn_journal_has_no_records(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"")
    assert read_journal(path) == []
    path.write_bytes(b'{"event":"sta')
    assert read_journal(path) == []
    write(path, 1, 1)
    assert shape(read_journal(path)) == [("start", None), ("update", 1), ("end", None)]


NO_RECORDS = {
    "a list": b"[1]",
    "a number": b"5",
    "null": b"null",
    "a text": b'"update"',
    "no JSON": b'{"event":"update","update":3',
    "no UTF-8": b'{"event":"\xff"}',
    "an empty line": b"",
    "zeros": b"\0\0\0",
    "no event": b'{"update":3}',
    "an event that is no text": b'{"event":["update"],"update":3}',
    "nesting": b"[" * 5000 + b"]" * 5000,
    "a text for the update": b'{"event":"update","update":"3"}',
    "null for the update": b'{"event":"update","update":null}',
    "a list for the update": b'{"event":"update","update":[3]}',
    "infinity for the update": b'{"event":"update","update":1e999}',
    "a NaN for the update": b'{"event":"update","update":"NaN"}',
    "true for the update": b'{"event":"update","update":true}',
    "an update below 0": b'{"event":"update","update":-3}',
    "an update of 5,000 digits": b'{"event":"update","update":' + b"9" * 5000 + b"}",
    "a text for what was held back": b'{"event":"update","update":3,"held_back":"1"}',
    "a text for what was skipped": b'{"event":"epoch","update":3,"skipped":"1"}',
}


@pytest.mark.parametrize("place", [1, 2, -1])
@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_line_that_is_no_record_is_named_wherever_a_journal_is_read_and_nothing_is_lost(tmp_path, line, place):
    path, table = tmp_path / "run.jsonl", tmp_path / "run.csv"
    write(path, 1, 3)
    lines = path.read_bytes().splitlines()
    lines.insert(place % (len(lines) + 1), line)
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    for use in (read_journal, lambda it: journal_to_csv(it, table), lambda it: Journal(it).resume_at(1)):
        with pytest.raises(DataError, match=f"line {lines.index(line) + 1} is no record of a journal"):
            use(path)
    assert path.read_bytes() == before and not table.exists()


def test_a_resumed_fit_names_the_line_and_leaves_the_journal_as_it_was(tmp_path):
    path = tmp_path / "run.jsonl"

    def fit(**how):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = Checkpoint(tmp_path / "run")
        settings = {"console": False, "checkpoint": checkpoint, "observers": [Journal(path)]}
        trainer = Trainer(model, optimizer, torch.nn.MSELoss(), **settings)
        trainer.fit((torch.ones(4, 2), torch.ones(4, 1)), batch_size=2, **how)

    fit(epochs=1)
    path.write_bytes(path.read_bytes() + b"[1]\n")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"is no record of a journal\n +have +a list: \[1\]"):
        fit(epochs=2, resume="auto")
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["a note of mine", "a note\nof mine\n", "[1]", "[1]\n", "{}\n", "import torch\nx = 1"])
def test_a_file_that_is_no_journal_is_neither_appended_to_nor_cut(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(DataError, match="no record of a journal"):
        Journal(path).on_fit_start(Plan())
    assert path.read_text() == text


def test_zeros_that_a_power_cut_leaves_behind_the_last_line_are_cut_off(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 3)
    records = read_journal(path)
    for tail in (bytes(5000), b'{"event":"upd' + bytes(5000)):
        with path.open("ab") as file:
            file.write(tail)
        assert read_journal(path) == records
        Journal(path).resume_at(3)
        write(path, 4, 4)
        records = read_journal(path)
    assert [record["update"] for record in records if record["event"] == "update"] == [1, 2, 3, 4]


def test_a_last_line_longer_than_a_block_is_found_to_its_beginning(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 1)
    records = read_journal(path)
    with path.open("ab") as file:
        file.write(b'{"event":"statistics","parameters":"' + b"x" * 300_000)
    write(path, 2, 2)
    assert read_journal(path)[: len(records)] == records and len(read_journal(path)) == len(records) + 3


@pytest.mark.parametrize("kind", ["a device", "a pipe", "a link to a device", "a directory"])
def test_a_device_a_pipe_and_a_directory_are_refused_before_they_are_read(tmp_path, kind):
    path = tmp_path / "run.jsonl"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
        path = Path("/dev/zero") if kind == "a device" else path
    with pytest.raises(SettingError, match="a regular file"):
        Journal(path)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_resume_takes_back_what_will_be_done_again(tmp_path, when):
    path = tmp_path / "run.jsonl"
    write(path, 1, 27)
    journal = Journal(path)
    if when == "before":
        journal.resume_at(20)
    journal.on_fit_start(Plan())
    if when == "after":
        journal.resume_at(20)
    journal.on_update(update(21))
    journal.on_fit_end(result(21))
    numbers = [record["update"] for record in read_journal(path) if record["event"] == "update"]
    assert numbers == list(range(1, 22))
    assert shape(read_journal(path))[-5:] == [
        ("update", 20),
        ("epoch", 20),
        ("start", None),
        ("update", 21),
        ("end", None),
    ]


def test_a_resume_takes_back_updates_that_were_held_back_after_its_checkpoint(tmp_path):
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.on_fit_start(Plan())
    for n, skipped in ((1, False), (1, True), (1, True), (2, False), (2, True)):
        journal.on_update(update(n, skipped=skipped, loss=n))
    journal.on_fit_end(result(2))
    for held_back in (3, 2):  # of which the first two stand before update 2
        again = Journal(path)
        again.resume_at(2, held_back)
        again.on_fit_start(Plan())
        again.on_update(update(2, skipped=True, loss=held_back))
        again.on_fit_end(result(2))
    found = [
        (one["update"], one.get("held_back"), one["loss"]) for one in read_journal(path) if one["event"] == "update"
    ]
    assert found == [(1, None, 1), (1, 1, 1), (1, 2, 1), (2, None, 2), (2, 3, 2)]


def test_each_line_is_in_the_file_when_it_is_written(tmp_path):
    path = tmp_path / "run.jsonl"
    journal = write(path, 1, 3, end=False)
    assert shape(read_journal(path)) == [("start", None), ("update", 1), ("update", 2), ("update", 3)]
    journal.on_fit_end(result(3))


def test_a_resume_touches_only_the_last_run_of_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 30)  # a run
    write(path, 31, 40)  # its second stage
    write(path, 1, 25)  # another run
    write(path, 21, 22, resume=20)
    numbers = [record["update"] for record in read_journal(path) if record["event"] == "update"]
    assert numbers == [*range(1, 41), *range(1, 23)]


def test_a_resume_into_an_earlier_stage_drops_the_later_one(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 30)
    write(path, 31, 40)
    write(path, 26, 27, resume=25)
    numbers = [record["update"] for record in read_journal(path) if record["event"] == "update"]
    assert numbers == list(range(1, 28))


def test_a_resume_without_a_journal_starts_one(tmp_path):
    write(tmp_path / "run.jsonl", 21, 22, resume=20)
    assert shape(read_journal(tmp_path / "run.jsonl"))[:2] == [("start", None), ("update", 21)]


def with_saves(path, start, stop, *, every, late, updates=1, resume=None):
    """One run as `write` makes it, saving each `every` updates, which is reported `late` updates later."""
    journal = Journal(path, updates=updates)
    if resume is not None:
        journal.resume_at(resume)
    journal.on_fit_start(Plan(model="Net"))
    for n in range(start, stop + 1):
        journal.on_update(update(n, loss=1 / n))
        if (n - late) % every == 0 and n - late >= start:
            journal.on_save(Saved(path.parent / f"update-{n - late}", n - late, False))
    journal._close()  # as a crash leaves it


def numbers(path, event):
    return [record["update"] for record in read_journal(path) if record["event"] == event]


@pytest.mark.parametrize("updates", [1, 4, 100])
@pytest.mark.parametrize("late", [0, 1, 3, 7])
def test_saves_that_are_reported_late_leave_no_gap_and_no_repeat_after_a_resume(tmp_path, late, updates):
    path = tmp_path / "run.jsonl"
    with_saves(path, 1, 27, every=5, late=late, updates=updates)
    reported = max(n for n in range(5, 28, 5) if n + late <= 27)
    with_saves(path, reported + 1, 43, every=5, late=late, updates=updates, resume=reported)
    reported_again = max(n for n in range(5, 44, 5) if n + late <= 43)
    with_saves(path, reported_again + 1, 50, every=5, late=0, updates=updates, resume=reported_again)
    assert numbers(path, "update") == [n for n in range(1, 51) if n % updates == 0]
    assert numbers(path, "save") == list(range(5, 51, 5))


@pytest.mark.parametrize("updates", [1, 100])
def test_a_late_save_is_not_taken_for_another_run_and_another_run_is_not_touched(tmp_path, updates):
    path = tmp_path / "run.jsonl"
    with_saves(path, 1, 30, every=10, late=4, updates=updates)
    first = read_journal(path)
    with_saves(path, 1, 25, every=10, late=4, updates=updates)  # another run
    with_saves(path, 11, 12, every=10, late=0, updates=updates, resume=10)
    assert read_journal(path)[: len(first)] == first
    rest = read_journal(path)[len(first) :]
    assert [record["update"] for record in rest if record["event"] == "save"] == [10]
    assert [record["update"] for record in rest if record["event"] == "update"] == [
        n for n in range(1, 13) if n % updates == 0
    ]


def test_the_last_run_begins_where_updates_are_behind_the_furthest_before_not_behind_a_late_save(tmp_path):
    path = tmp_path / "run.jsonl"
    with_saves(path, 1, 24, every=20, late=4)
    first = read_journal(path)
    other = Journal(path, updates=100)
    other.on_fit_start(Plan())
    other.on_epoch(validation(22))
    other.on_epoch(validation(44))
    other._close()
    Journal(path).resume_at(22)
    assert read_journal(path)[: len(first)] == first and len(read_journal(path)) == len(first) + 2


def test_csv_has_a_column_per_number(tmp_path):
    journal = Journal(tmp_path / "run.jsonl")
    journal.on_fit_start(Plan())
    journal.on_update(update(1, loss=math.nan, lrs=(0.1, 0.01), values={"kl": 0.25, "rows": 7.0}))
    journal.on_update(update(2, skipped=True))
    journal.on_epoch(validation(2, val_loss=0.75))
    journal.on_fit_end(result(2))
    journal_to_csv(journal.path, tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        one, two, epoch = csv.DictReader(file)
    assert one["event"] == "update"
    assert math.isnan(float(one["loss"]))
    assert (one["lr_0"], one["lr_1"], one["kl"], one["rows"], one["values.rows"]) == (
        "0.1",
        "0.01",
        "0.25",
        "64",
        "7.0",
    )
    assert (two["loss"], two["kl"], two["skipped"]) == ("0.5", "", "1")
    assert (epoch["event"], epoch["update"], epoch["loss"], epoch["val_loss"]) == ("epoch", "2", "0.5", "0.75")


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_in_the_csv_can_be_a_formula_and_numbers_are_as_they_were(tmp_path, begin):
    text = begin + 'cmd|" /C calc"!A0'
    path = tmp_path / "run.jsonl"
    path.write_text(
        json.dumps(
            {"event": "epoch", "update": 1, "skipped": 0, "metrics": {text: -0.5, "low": "-Infinity"}, "a": text}
        )
        + "\n"
        + json.dumps({"event": "update", "update": 2, "lrs": [text, -1], "values": {"nested": [text]}})
        + "\n"
    )
    journal_to_csv(path, tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["event", "update", "skipped", "'" + text, "low", "a", "lr_0", "lr_1", "nested"]
    assert rows[0] == ["epoch", "1", "0", "-0.5", "-inf", "'" + text, "", "", ""]
    assert rows[1][6:8] == ["'" + text, "-1"] and not rows[1][8].startswith(begin)


def test_a_csv_does_not_take_the_journals_own_place(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, 1, 2)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    for other in (path, tmp_path / "link"):
        with pytest.raises(SettingError, match="overwrite the journal"):
            journal_to_csv(path, other)
    assert path.read_bytes() == before


def test_a_name_that_is_no_utf8_is_written_and_read_back(tmp_path):
    journal = Journal(tmp_path / "run.jsonl")
    journal.on_fit_start(Plan())
    odd = Path(os.fsdecode(b"caf\xe9"))
    journal.on_save(Saved(odd, 1, False))
    journal.on_update(update(1, values={str(odd): 1.0}))
    journal.on_fit_end(result(1))
    assert read_journal(journal.path)[1]["path"] == str(odd)
    Journal(journal.path).resume_at(0)
    journal_to_csv(journal.path, tmp_path / "run.csv")
