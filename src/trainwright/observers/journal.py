"""Writes all numbers of a run as JSON lines, which survive a crash and continue after a resume."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from trainwright.core.checks import check_whole, local_path
from trainwright.core.durations import Updates
from trainwright.core.errors import DataError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.records import Result, Saved, Update, Validation
from trainwright.core.suggestions import suggests
from trainwright.protocols import Observer

if TYPE_CHECKING:
    from trainwright.observers.probes import ModelStatistics
    from trainwright.observers.throughput import Speed

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that a spreadsheet runs as a formula."""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


@suggests
class Journal(Observer):
    """Appends one JSON object per event to a file: start, update, speed, statistics, validate, epoch, save, end.

    Each line is flushed to the system when it is written, so that the journal holds all updates of a complete
    checkpoint. NaN and infinity are written as the strings "NaN", "Infinity", "-Infinity"; `read_journal` returns them
    as numbers. A save is written when its checkpoint is complete, some updates after the saved update. A checkpoint
    completed right before a crash may lack this line.

    Args:
        path: The file. An existing journal is appended to.
        updates: Write every nth update, and all skipped ones. Each line costs a few microseconds.

    Raises:
        DataError: If the file does not begin with a record.
        SettingError: If the path is not a regular file: a device or pipe cannot be read back on resume.
    """

    def __init__(self, path: str | os.PathLike[str], *, updates: int | Updates = 1) -> None:
        self.path = local_path(path, "Journal({})", file=True)
        if self.path.exists() and not self.path.is_file():
            want, fix = "a regular file, which a resume reads back", 'Journal("runs/journal.jsonl")'
            raise SettingError(f"Journal({str(self.path)!r})", want=want, fix=fix)
        self._every = updates.n if isinstance(updates, Updates) else updates
        fix = f'Journal("{path}", updates=100)'
        check_whole(self._every, f"Journal(updates={updates!r})", what="a whole number of updates", fix=fix)
        self._file: TextIO | None = None
        self._start: dict[str, Any] = {}
        self._held_back = self._resumed = 0
        """Skipped updates of this stage: so far, and at its resume. `Progress.updates` does not count them."""

    def resume_at(self, update: int, skipped: int = 0, *, continues: bool = True) -> None:
        """Remove the records of the last run after `update` and `skipped` skipped updates: the run repeats them.

        Records of saves of that update and earlier ones remain. `continues`: also remove the final validation at that
        update, which an uninterrupted run does not make.
        """
        is_open = self._file is not None
        self._close()
        self._held_back = self._resumed = skipped
        if self.path.exists():
            self._cut(update, skipped, continues=continues)
        if is_open:
            self._open()

    def on_fit_start(self, plan: Plan) -> None:
        """Open the file and write the plan of the run."""
        self._close()
        self._held_back, self._resumed = self._resumed, 0
        plan_fields = (field.name for field in fields(plan) if field.repr)
        self._start = {"event": "start", **{name: getattr(plan, name) for name in plan_fields}, "updates": plan.updates}
        self._open()

    def on_update(self, update: Update) -> None:
        """Write an update: every nth, and a skipped one."""
        if update.update % self._every and not update.skipped:
            return
        record = {
            "event": "update",
            "update": update.update,
            "epoch": update.epoch,
            "loss": update.loss,
            "lr": update.lr,
            "rows": update.rows,
        }
        if len(update.lrs) > 1:
            record["lrs"] = update.lrs
        if update.grad_norm is not None:
            record["grad_norm"] = update.grad_norm
        if update.loss_scale is not None:
            record["loss_scale"] = update.loss_scale
        if update.skipped:
            self._held_back += 1
            record |= {"skipped": True, "held_back": self._held_back}
        if update.values:
            record["values"] = dict(update.values)
        self._write(record)

    def on_validate(self, record: Validation) -> None:
        """Write a validation."""
        self._write_numbers("validate", record)

    def on_epoch(self, record: Validation) -> None:
        """Write an epoch."""
        self._write_numbers("epoch", record)

    def on_speed(self, speed: Speed) -> None:
        """Write the speed of training."""
        record = {"event": "speed", "epoch": speed.epoch, "update": speed.update}
        record |= {"held_back": self._held_back} if self._held_back else {}
        names = ("seconds", "rows", "updates", "rows_per_second", "updates_per_second", "waiting", "mfu", "bound")
        self._write(record | {name: getattr(speed, name) for name in names} | {"memory": dict(speed.memory)})

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Write statistics of weights, gradients and an update."""
        record = {"event": "statistics", "epoch": statistics.epoch, "update": statistics.update}
        record |= {"held_back": self._held_back} if self._held_back else {}
        parameters = {
            name: asdict(one) | {"update_ratio": one.update_ratio} for name, one in statistics.parameters.items()
        }
        self._write(record | {"parameters": parameters})

    def on_save(self, saved: Saved) -> None:
        """Write that a checkpoint is complete."""
        record = {"event": "save", "update": saved.update, "path": str(saved.path), "best": saved.best}
        costs = {name: getattr(saved, name) for name in ("seconds", "blocked", "size")}
        self._write(record | costs)

    def on_fit_end(self, result: Result) -> None:
        """Write the end of the run, and close the file."""
        best = result.best
        found = best and {"name": best.name, "value": best.value, "epoch": best.epoch, "update": best.update}
        names = ("updates", "epochs", "stopped", "seconds", "blocked", "skipped", "weights")
        self._write({"event": "end", **{name: getattr(result, name) for name in names}, "best": found})
        self._close()

    def _write_numbers(self, event: str, record: Validation) -> None:
        names = ("epoch", "update", "best", "waited", "patience", "seconds", "rows", "waiting", "skipped")
        numbers = {name: getattr(record, name) for name in names}
        final = {"final": True} if record.final else {}
        self._write({"event": event, **numbers, **final, "metrics": dict(record.metrics)})

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None, "on_fit_start opens the journal"
        self._file.write(_line(record))

    def _open(self) -> None:
        """Open the file after its last complete line, and write the start of this run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _end_last_line(self.path)
        # Line buffering: the process may be killed as soon as a checkpoint, written in the background, is complete.
        # A lone surrogate, from a file name that is not UTF-8, is written as its JSON escape.
        self._file = self.path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace", newline="\n")
        self._write(self._start)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut(self, update: int, held_back: int, *, continues: bool) -> None:
        lines = _lines(self.path)
        last_run = lines[_last_run(lines) :]
        at = (update, held_back, not continues)
        places = ((_position(one), _held_back(one), _is_final(one)) for _, one in last_run)
        cut = next((n for n, place in enumerate(places) if place > at), len(last_run))
        if cut == len(last_run):
            return
        later_saves = [record for _, record in last_run[cut:] if _is_save(record) and _position(record) <= update]
        os.truncate(self.path, last_run[cut][0])
        with self.path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.writelines(_line(record) for record in later_saves)


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a journal, oldest first. A last line cut off by a crash is left out.

    Args:
        path: The file of a `Journal`.

    Raises:
        DataError: If a line is not a record; the error holds the number of the line.
    """
    return [record for _, record in _lines(local_path(path, "read_journal({})", reads=True, file=True))]


def journal_to_csv(path: str | os.PathLike[str], csv_path: str | os.PathLike[str]) -> None:
    """Write the updates, validations and epochs of a journal as CSV: one row per record, one column per number.

    Text that begins with `=`, `+`, `-`, `@`, a tab or a carriage return is prefixed by an apostrophe, so that a
    spreadsheet does not run it as a formula.

    Args:
        path: The file of a `Journal`.
        csv_path: The file to write.
    """
    target = local_path(csv_path, "journal_to_csv(..., {})", file=True)
    rows = [_flat(record) for record in read_journal(path) if record["event"] in ("update", "validate", "epoch")]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if target.exists() and target.samefile(Path(path).expanduser()):
        what = f"journal_to_csv({str(path)!r}, {str(csv_path)!r}) would overwrite the journal"
        raise SettingError(what, fix=f"journal_to_csv({str(path)!r}, {str(Path(path).with_suffix('.csv'))!r})")
    with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(map(_cell, columns))
        writer.writerows([_cell(row.get(name, "")) for name in columns] for row in rows)


def _cell(value: Any) -> Any:
    """Return a value as a cell that a spreadsheet does not run as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (byte offset of the line, record) for each record."""
    records: list[tuple[int, dict[str, Any]]] = []
    with path.open("rb") as file:
        while line := file.readline():
            if not _is_torn(line):
                records.append((file.tell() - len(line), _record(line, path, len(records) + 1)))
    return records


def _is_torn(line: bytes) -> bool:
    """Return whether a line is a record cut off by a crash, or the zeros left by a power failure."""
    if line.endswith(b"\n"):
        return False
    line, head = line.rstrip(b"\0"), b'{"event":'
    return not _is_json(line) and (line.startswith(head) or head.startswith(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _record(line: bytes, path: Path, number: int | str) -> dict[str, Any]:
    """Return the record of a line. DataError if it is none, or if its counters are not counts."""
    try:
        record = _read_back(json.loads(line))
        why = _fault(record)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of 5,000 digits, nested too deeply
        record, why = {}, f"no JSON: {error}"
    if why:
        what = f"{path}: line {number} is no record of a journal"
        want = 'a line that a Journal has written: {"event":"update","update":1,...}'
        fix = "take that line out, or give the Journal another file; nothing was changed"
        raise DataError(what, have=why, want=want, fix=fix, where=False)
    found: dict[str, Any] = record
    return found


def _fault(record: Any) -> str:
    """Return why a value is not a record; empty if it is one."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}: {str(record)[:60]}"
    if not isinstance(record.get("event"), str):
        return 'no "event"'
    counts = ["update", "held_back", *(["skipped"] if record["event"] in ("validate", "epoch") else [])]
    for name in counts:
        value = record.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f'"{name}": {str(value)[:60]}, which is no count'
    return ""


def _end_last_line(path: Path) -> None:
    """Remove an incomplete last line, or add the missing line end to a complete one, before the next record.

    DataError if the file does not begin and end with a record: it is not a journal, and is not changed.
    """
    with path.open("rb+") as file:
        first = file.readline()
        if first.endswith(b"\n"):
            _record(first, path, 1)
        last = _after_last_line_end(file)
        if last and _is_torn(last):
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
        elif last:
            _record(last, path, "at the end")
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _after_last_line_end(file: BinaryIO) -> bytes:
    """Return the bytes after the last line end. Reads growing blocks from the end of the file."""
    size, block, found = file.seek(0, os.SEEK_END), 1 << 16, b""
    while b"\n" not in found and len(found) < size:
        file.seek(max(0, size - block))
        found, block = file.read(), 2 * block
    return found.rpartition(b"\n")[2]


def _last_run(lines: list[tuple[int, dict[str, Any]]]) -> int:
    """Return the index of the first record of the last run: a start whose first update is below earlier ones.

    Only the first record after a start is compared: updates rise within a session, but saves are written late.
    """
    begin = session = 0
    highest, is_fresh = -1, True
    for i, (_, record) in enumerate(lines):
        if record["event"] == "start" and not is_fresh:
            session, is_fresh = i, True
        elif "update" in record:
            if is_fresh and _position(record) < highest:
                begin, highest = session, -1
            highest, is_fresh = max(highest, _position(record)), False
    return begin


def _position(record: Mapping[str, Any]) -> int:
    """Return the update of a record; -1 for a record without one, which belongs to the record before it."""
    at: int = record.get("update", -1)
    return at


def _held_back(record: Mapping[str, Any]) -> int:
    """Return the number of skipped updates in a record, its own included; 0 if it has none."""
    counts = record["event"] in ("validate", "epoch")
    held_back: int = record.get("skipped" if counts else "held_back", 0)
    return held_back


def _is_final(record: Mapping[str, Any]) -> bool:
    """Return whether a record is the validation at an early end."""
    return bool(record.get("final", False))


def _is_save(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a save, which may follow records of later updates."""
    return bool(record["event"] == "save")


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of strict JSON."""
    try:
        return _encode(record) + "\n"
    except ValueError:  # NaN or infinity, which strict JSON lacks
        return _encode(_as_strings(record)) + "\n"


def _as_strings(value: Any) -> Any:
    """Return a value with NaN and infinity as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _as_strings(inner) for key, inner in value.items()}
    return [_as_strings(inner) for inner in value] if isinstance(value, list | tuple) else value


def _read_back(value: Any) -> Any:
    """Return a value with the strings of `_as_strings` as numbers."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _read_back(inner) for key, inner in value.items()}
    return [_read_back(inner) for inner in value] if isinstance(value, list) else value


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without nested mappings: `metrics` and `values` become columns, `lrs` becomes lr_0, lr_1, ..."""
    row: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            inner = {key: number for key, number in value.items() if key not in ("epoch", "update")}
            row.update({f"{name}.{key}" if key in record else key: number for key, number in inner.items()})
        elif isinstance(value, list):
            row.update({f"{name.removesuffix('s')}_{i}": number for i, number in enumerate(value)})
        else:
            row[name] = int(value) if isinstance(value, bool) else value
    return row
