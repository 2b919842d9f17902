"""Tries how a library stands kills, torn files, full disks, power cuts and signals: `python -m tests.durability -h`.

Another library is tried through an adapter of its own (`--adapter path/of/a.py`): a module with the four names that
`tests/durability/adapters/__init__.py` describes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from . import children
from .adapters import SHIPPED, load, words_of
from .faults import fault_all
from .judging import Subject, Table, show
from .kill import kill_many
from .power import cut_all
from .signals import signal_all
from .task import Task
from .tear import tear_all

SIZES = {"updates": 40, "every": 4, "width": 192}
"""Sizes of the training that can be asked for."""
_MOUNTED = "DURABILITY_MOUNTED"


def main() -> None:
    """Run one kind of trial."""
    asked = _parser().parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started it in the background
    if getattr(asked, "tmpfs", False):
        _in_small_file_system(asked)
    adapter = load(asked.adapter)
    task = Task(**{name: getattr(asked, name) for name in SIZES if getattr(asked, name)})
    subjects = [Subject(adapter, variant, words_of(adapter, variant), task) for variant in asked.variant]
    _warm(subjects[0])
    with tempfile.TemporaryDirectory(prefix="durability-", dir=asked.at, ignore_cleanup_errors=True) as base:
        tables: list[Table] = []
        for n, subject in enumerate(subjects):
            made = asked.does(subject, Path(base) / str(n), asked)
            tables += made if isinstance(made, list) else [made]
        bad = any(set(table.counts) - {"ok"} for table in tables)
        if bad and asked.keep:
            kept = Path(tempfile.mkdtemp(prefix="durability-kept-", dir=asked.at)) / "trials"
            Path(base).rename(kept)
            print(f"kept in {kept}", file=sys.stderr)
    show(tables, unit=asked.what)
    if asked.json:
        reported = {table.title: {"counts": dict(table.counts), "repeat": table.repeat} for table in tables}
        Path(asked.json).write_text(json.dumps(reported))
    sys.exit(int(bad))


def _kill(subject: Subject, base: Path, asked: argparse.Namespace) -> Table:
    base.mkdir()
    command = _again(subject, asked) + " --kills 1 --seed {seed}"
    return kill_many(subject, base, kills=asked.kills, seed=asked.seed, command=command, note=_note)


def _tear(subject: Subject, base: Path, asked: argparse.Namespace) -> Table:
    base.mkdir()
    command = _again(subject, asked) + f' --seed {asked.seed} --only "{{name}}"'
    return tear_all(subject, base, seed=asked.seed, command=command, only=asked.only, note=_note)


def _fault(subject: Subject, base: Path, asked: argparse.Namespace) -> Table:
    base.mkdir()
    command = _again(subject, asked) + (" --tmpfs" if asked.tmpfs else "") + ' --only "{name}"'
    return fault_all(subject, base, full=asked.tmpfs, command=command, only=asked.only, note=_note)


def _cut(subject: Subject, base: Path, asked: argparse.Namespace) -> Table:
    base.mkdir()
    planted = f" --without-fsync {asked.without_fsync}" if asked.without_fsync else ""
    return cut_all(
        subject,
        base,
        most=asked.cuts,
        seeds=asked.seeds,
        seed=asked.seed,
        planted=asked.without_fsync,
        only=asked.only,
        command=_again(subject, asked) + planted + f" --seeds {asked.seeds} --only {{cut}}",
        note=_note,
    )


def _signal(subject: Subject, base: Path, asked: argparse.Namespace) -> list[Table]:
    base.mkdir()
    command = _again(subject, asked) + (" --group" if asked.group else "") + " --times 1 --seed {seed}"
    return signal_all(subject, base, times=asked.times, seed=asked.seed, group=asked.group, command=command, note=_note)


def _in_small_file_system(asked: argparse.Namespace) -> None:
    """Start this command again where a file system of its own can be mounted, and mount it."""
    if os.environ.get(_MOUNTED):
        return
    with tempfile.TemporaryDirectory(prefix="durability-") as mounted:
        mount = f'mount -t tmpfs -o size={asked.size}m none {mounted} && exec "$@" --at {mounted}'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-m", "tests.durability", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, _MOUNTED: "1"}, check=False).returncode)


def _again(subject: Subject, asked: argparse.Namespace) -> str:
    variant = f" --variant {subject.variant}" if subject.variant else ""
    sizes = "".join(f" --{name} {getattr(asked, name)}" for name in SIZES if getattr(asked, name))
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
    for name, default in SIZES.items():
        shared.add_argument(f"--{name}", type=int, help=f"{name} of the training (default {default})")
    shared.add_argument("--at", help="directory to work in (default: that for temporary files)")
    shared.add_argument("--keep", action="store_true", help="keep the directories of trials that went wrong")
    shared.add_argument("--json", help="write the counts to this file")
    kill = kinds.add_parser(
        "kills", parents=[shared], help="SIGKILL at random moments, also twice and while it resumes"
    )
    kill.add_argument("--kills", type=int, default=100)
    kill.set_defaults(does=_kill, what="kills")
    tear = kinds.add_parser("tears", parents=[shared], help="cut, flip, zero and remove every file of a checkpoint")
    tear.add_argument("--only", default="", help="only damages whose name holds this")
    tear.set_defaults(does=_tear, what="tears")
    fault = kinds.add_parser("faults", parents=[shared], help="disk full, quota, read-only, I/O errors, directory gone")
    fault.add_argument("--only", default="", help="only faults whose name holds this")
    fault.add_argument(
        "--tmpfs", action="store_true", help="fill a real file system of its own (needs unshare and mount)"
    )
    fault.add_argument("--size", type=int, default=8, help="its size in MB")
    fault.set_defaults(does=_fault, what="faults")
    cut = kinds.add_parser(
        "cuts", parents=[shared], help="power cuts: replays what is synced, and parts of what is not"
    )
    cut.add_argument("--cuts", type=int, help="try this many of the different states, by chance (default: all)")
    cut.add_argument("--seeds", type=int, default=4, help="random selections of what is not synced, for each place")
    cut.add_argument("--without-fsync", choices=("file", "directory"), help="plant a fault: these fsyncs are left out")
    cut.add_argument("--only", default="", help="only the cut of this name")
    cut.set_defaults(does=_cut, what="cuts")
    sent = kinds.add_parser("signals", parents=[shared], help="SIGTERM, SIGUSR1 and Ctrl-C while it trains")
    sent.add_argument("--times", type=int, default=10, help="how often each is sent")
    sent.add_argument("--group", action="store_true", help="send them to the whole process group, loader workers too")
    sent.set_defaults(does=_signal, what="signals")
    return parser


def _warm(subject: Subject) -> None:
    """Import, once and before all forks, what the trainings import."""
    warnings.simplefilter("default")
    for name in subject.adapter.WARM:
        importlib.import_module(name)
    children.prepare()


if __name__ == "__main__":
    main()
