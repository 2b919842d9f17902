"""Cuts the power after any of the operations of a run, in simulation, and judges how it goes on from what is left."""

from __future__ import annotations

import hashlib
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import children
from .children import When
from .disk import CUTS, Op, Recorder, Tree, after_cut, tree_of, without, write_tree
from .judging import Subject, Table, judge, reference_of


@dataclass
class _Case:
    """One state of the disk after a power cut; `cut` names one that leads to it."""

    cut: str
    tree: Tree
    acked: int


def cut_all(
    subject: Subject,
    base: Path,
    *,
    most: int | None,
    seeds: int,
    seed: int,
    planted: Literal["file", "directory"] | None,
    only: str,
    command: str,
    note: Callable[[str], None],
) -> Table:
    """Try every different state that a cut can leave (or `most` of them); `command` repeats one."""
    if not getattr(subject.adapter, "WRITES_WITH_OS", False):
        raise SystemExit(f"{subject.name} does not write by the functions of os alone: its writes cannot be followed")
    reference = reference_of(subject, base)
    shutil.rmtree(base / "reference")
    ops = _record(subject, base)
    if planted:
        ops = without(ops, planted)
    cases = [case for case in _cases(ops, seeds=seeds) if only in ("", case.cut)]
    found = len(cases)
    if most is not None and found > most:
        cases = random.Random(seed).sample(cases, most)
    note(
        f"{subject.name}: {len(ops)} operations, {found} different states after a cut, {len(cases)} tried, seed {seed}"
    )
    table = Table(subject.name + (f" without fsync of {planted}" if planted else ""))
    for case in cases:
        write_tree(_empty(base / "cut"), case.tree)
        ran = subject.run(base / "cut" / "run", when=When(0, "resumed"))
        verdict = judge(reference, ran, acked=case.acked)
        assert verdict is not None
        table.add(verdict, command.format(cut=case.cut))
        if verdict.word != "ok":
            note(f"cut {case.cut}: {verdict.word}: {verdict.why}")
    children.groups.clear()
    return table


def _record(subject: Subject, base: Path) -> list[Op]:
    """The log of an undisturbed run, which must explain all that lies on the disk at its end."""
    written, kept = base / "written", base / "ops"
    written.mkdir()

    def script(fd: int) -> None:
        recorder = Recorder(written)
        recorder.start()
        subject.script(written / "run", at=recorder.reported)(fd)
        kept.write_bytes(pickle.dumps(recorder.ops))

    ran = children.run(script, base / "log")
    if ran.code:
        raise SystemExit(f"{subject.name} cannot be followed:\n{ran.log}")
    ops: list[Op] = pickle.loads(kept.read_bytes())
    followed, real = after_cut(ops, len(ops), "all"), tree_of(written)
    if differing := sorted(name for name in {*followed, *real} if followed.get(name, 0) != real.get(name, 0)):
        raise SystemExit(f"{subject.name} writes by ways that are not followed: {differing}")
    return ops


def _cases(ops: list[Op], *, seeds: int) -> list[_Case]:
    """Every different state after a cut at any place, with the greatest update that was acknowledged in it."""
    found: dict[bytes, _Case] = {}
    acked = 0
    for end in range(1, len(ops) + 1):
        if ops[end - 1].what == "reported":
            acked = max(acked, ops[end - 1].at)
        for leaves in (*CUTS, *(f"{end}.{n}" for n in range(seeds))):
            tree = after_cut(ops, end, leaves)
            key = _key(tree)
            if key not in found or found[key].acked < acked:
                found[key] = _Case(f"{end}:{leaves}", tree, acked)
    return list(found.values())


def _key(tree: Tree) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tree):
        data = tree[name]
        digest.update(f"{name}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return digest.digest()


def _empty(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path
