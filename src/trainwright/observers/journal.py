"""The journal: every number of a run as lines of JSON, which survive a crash, go on after a resume, and read back."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainwright.base.checks import local_path
from trainwright.base.contracts import Observer
from trainwright.base.errors import DataError, SettingError, message
from trainwright.base.names import suggests
from trainwright.base.plan import Plan
from trainwright.base.records import Result, Saved, Update, Validation
from trainwright.base.spans import Updates

if TYPE_CHECKING:
    from trainwright.base.model_statistics import ModelStatistics
    from trainwright.base.speed import Speed

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


@suggests
class Journal(Observer):
    """Appends one JSON object per event to a file: start, update, speed, statistics, validate, epoch, save, end.

    `updates=n` writes every nth update (a skipped one always); each line costs a few microseconds. Lines are handed
    to the system as they are written, so that no checkpoint becomes whole before what it has seen is told. NaN and
    infinity are written as the strings "NaN", "Infinity", "-Infinity", which `read_journal` turns back into numbers.

    A save is written when the checkpoint is whole, some updates later than the one that it is of. A checkpoint that
    became whole right before a crash may have no such line.
    """

    def __init__(self, path: str | os.PathLike[str], *, updates: int | Updates = 1) -> None:
        self.path = local_path(path, "Journal({})", file=True)
        self._every = updates.n if isinstance(updates, Updates) else updates
        if not isinstance(self._every, int) or isinstance(self._every, bool) or self._every < 1:
            raise SettingError(
                message(
                    f"Journal(updates={updates!r})",
                    want="a whole number: every how many updates one is written",
                    fix=f'Journal("{path}", updates=100)',
                )
            )
        self._file: TextIO | None = None
        self._start: dict[str, Any] = {}
        self._held_back = self._resumed = 0
        """Updates of this stage that were held back, so far and where it was resumed: the clock does not count them."""

    def resume_at(self, update: int, held_back: int = 0) -> None:
        """Drop what the last run in the file wrote after `update` and so many held back: it will be done again.

        Saves of that update or earlier ones stay, though they were told later.
        """
        is_open = self._file is not None
        self._close()
        self._held_back = self._resumed = held_back
        if self.path.exists():
            self._cut(update, held_back)
        if is_open:
            self._open()

    def on_fit_start(self, plan: Plan) -> None:
        """Open the file and write what the run will do."""
        self._close()
        self._held_back, self._resumed = self._resumed, 0
        plan_fields = (field.name for field in fields(plan))
        self._start = {"event": "start", **{name: getattr(plan, name) for name in plan_fields}, "updates": plan.updates}
        self._open()

    def on_update(self, update: Update) -> None:
        """Write an update, where its turn has come."""
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
        """Write how fast training went."""
        record = {"event": "speed", "epoch": speed.epoch, "update": speed.update}
        record |= {"held_back": self._held_back} if self._held_back else {}
        names = ("seconds", "rows", "updates", "rows_per_second", "updates_per_second", "waiting", "mfu", "bound")
        self._write(record | {name: getattr(speed, name) for name in names} | {"memory": dict(speed.memory)})

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Write what weights, gradients and an update look like."""
        record = {"event": "statistics", "epoch": statistics.epoch, "update": statistics.update}
        record |= {"held_back": self._held_back} if self._held_back else {}
        told = {name: asdict(one) | {"update_ratio": one.update_ratio} for name, one in statistics.parameters.items()}
        self._write(record | {"parameters": told})

    def on_save(self, saved: Saved) -> None:
        """Write that a checkpoint is whole."""
        record = {"event": "save", "update": saved.update, "path": str(saved.path), "best": saved.best}
        costs = {name: getattr(saved, name) for name in ("seconds", "blocked", "size")}
        self._write(record | costs)

    def on_fit_end(self, result: Result) -> None:
        """Write how the run ended and close the file."""
        best = result.best
        found = best and {"name": best.name, "value": best.value, "epoch": best.epoch, "update": best.update}
        names = ("updates", "epochs", "stopped", "seconds", "blocked", "skipped", "weights")
        self._write({"event": "end", **{name: getattr(result, name) for name in names}, "best": found})
        self._close()

    def _write_numbers(self, event: str, record: Validation) -> None:
        names = ("epoch", "update", "best", "waited", "patience", "seconds", "rows", "waiting", "skipped")
        numbers = {name: getattr(record, name) for name in names}
        self._write({"event": event, **numbers, "metrics": dict(record.metrics)})

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None, "on_fit_start opens the journal"
        self._file.write(_line(record))

    def _open(self) -> None:
        """Open the file behind its last whole line, and write how this run started."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _drop_torn_line(self.path)
        # By lines: checkpoints are written beside the training, and a kill may come as soon as one is whole.
        self._file = self.path.open("a", buffering=1, encoding="utf-8", newline="\n")
        self._write(self._start)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut(self, update: int, held_back: int) -> None:
        lines = _lines(self.path)
        behind = lines[_last_run(lines) :]
        at = (update, held_back)
        cut = next((n for n, (_, one) in enumerate(behind) if (_position(one), _held_back(one)) > at), len(behind))
        if cut == len(behind):
            return
        told_later = [record for _, record in behind[cut:] if _is_save(record) and _position(record) <= update]
        os.truncate(self.path, behind[cut][0])
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(_line(record) for record in told_later)


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a journal, oldest first; a last line that a crash has torn is left out."""
    return [record for _, record in _lines(local_path(path, "read_journal({})", reads=True, file=True))]


def journal_to_csv(path: str | os.PathLike[str], csv_path: str | os.PathLike[str]) -> None:
    """Write the updates, validations and epochs of a journal as CSV: one row per record, one column per number."""
    target = local_path(csv_path, "journal_to_csv(..., {})", file=True)
    rows = [_flat(record) for record in read_journal(path) if record["event"] in ("update", "validate", "epoch")]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the records with the byte each starts at."""
    lines = path.read_bytes().splitlines(keepends=True)
    records, start = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append((start, _read_back(json.loads(line))))
        except ValueError as error:  # no JSON, or no UTF-8
            if number < len(lines):
                raise DataError(message(f"{path}: line {number} is no JSON: {error}", where=False)) from None
        start += len(line)
    return records


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line without an end: another line written behind it would be lost with it."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    size = len(whole) + 1 if whole else 0
    if size < path.stat().st_size:
        os.truncate(path, size)


def _last_run(lines: list[tuple[int, dict[str, Any]]]) -> int:
    """Return the index of the first record of the last run: where what follows a start is behind what stood before it.

    Only the first record after a start is asked: updates rise within a session, but saves are told late.
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
    """Return the update a record belongs to; those without one stay with what stands before them."""
    return int(record.get("update", -1))


def _held_back(record: Mapping[str, Any]) -> int:
    """Return how many updates a record says were held back, its own included; 0 where it does not say."""
    counts = record["event"] in ("validate", "epoch")
    return int(record["skipped"] if counts else record.get("held_back", 0))


def _is_save(record: Mapping[str, Any]) -> bool:
    """Whether a record is one that may stand behind later ones."""
    return bool(record["event"] == "save")


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of strict JSON."""
    try:
        return _encode(record) + "\n"
    except ValueError:  # NaN or infinity, which JSON has no word for
        return _encode(_spelt(record)) + "\n"


def _spelt(value: Any) -> Any:
    """Return the value with NaN and infinity as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelt(inner) for key, inner in value.items()}
    return [_spelt(inner) for inner in value] if isinstance(value, list | tuple) else value


def _read_back(value: Any) -> Any:
    """Return the value with the words of `_spelt` as numbers."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _read_back(inner) for key, inner in value.items()}
    return [_read_back(inner) for inner in value] if isinstance(value, list) else value


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without inner mappings: `metrics` and `values` become columns, `lrs` lr_0, lr_1, ..."""
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
