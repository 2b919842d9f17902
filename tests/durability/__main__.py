"""Tries how a library stands kills, torn files, full disks, power cuts and signals: `python -m tests.durability -h`.

Another library is tried through an adapter of its own (`--adapter path/of/a.py`): a module with the four names that
`tests/durability/adapters/__init__.py` describes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path

from . import children
from .adapters import SHIPPED, load, words_of
from .judging import Subject, Table, show
from .kill import kill_many
from .task import Task


def main() -> None:
    """Run one kind of trial."""
    asked = _parser().parse_args()
    adapter = load(asked.adapter)
    task = Task(**{name: value for name, value in (("updates", asked.updates), ("every", asked.every)) if value})
    subjects = [Subject(adapter, variant, words_of(adapter, variant), task) for variant in asked.variant]
    _warm(subjects[0])
    with tempfile.TemporaryDirectory(prefix="durability-", dir=asked.at, ignore_cleanup_errors=True) as base:
        tables = [asked.does(subject, Path(base) / str(n), asked) for n, subject in enumerate(subjects)]
        bad = any(set(table.counts) - {"ok"} for table in tables)
        if bad and asked.keep:
            kept = Path(tempfile.mkdtemp(prefix="durability-kept-", dir=asked.at)) / "trials"
            Path(base).rename(kept)
            print(f"kept in {kept}", file=sys.stderr)
    show(tables, unit=asked.what)
    if asked.json:
        told = {table.title: {"counts": dict(table.counts), "repeat": table.repeat} for table in tables}
        Path(asked.json).write_text(json.dumps(told))
    sys.exit(int(bad))


def _kill(subject: Subject, base: Path, asked: argparse.Namespace) -> Table:
    base.mkdir()
    command = _again(subject, asked) + " --kills 1 --seed {seed}"
    return kill_many(subject, base, kills=asked.kills, seed=asked.seed, command=command, note=_note)


def _again(subject: Subject, asked: argparse.Namespace) -> str:
    variant = f" --variant {subject.variant}" if subject.variant else ""
    sizes = "".join(f" --{name} {getattr(asked, name)}" for name in ("updates", "every") if getattr(asked, name))
    return f"python -m tests.durability {asked.what} --adapter {asked.adapter}{variant}{sizes} --keep"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.durability", description=__doc__)
    kinds = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--adapter", default="trainwright", help=f"{', '.join(SHIPPED)}, or a Python file")
    shared.add_argument(
        "--variant", nargs="+", default=[""], help='words of the adapter joined by "+", such as sync+workers'
    )
    shared.add_argument("--seed", type=int, default=1)
    shared.add_argument("--updates", type=int, help="updates of the training (default 40)")
    shared.add_argument("--every", type=int, help="updates between two saves (default 4)")
    shared.add_argument("--at", help="directory to work in (default: that for temporary files)")
    shared.add_argument("--keep", action="store_true", help="keep the directories of trials that went wrong")
    shared.add_argument("--json", help="write the counts to this file")
    kill = kinds.add_parser(
        "kills", parents=[shared], help="SIGKILL at random moments, also twice and while it resumes"
    )
    kill.add_argument("--kills", type=int, default=100)
    kill.set_defaults(does=_kill, what="kills")
    return parser


def _warm(subject: Subject) -> None:
    """Import, once and before all forks, what the trainings import."""
    warnings.simplefilter("default")
    for name in subject.adapter.WARM:
        importlib.import_module(name)
    children.prepare()


if __name__ == "__main__":
    main()
