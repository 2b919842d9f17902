"""A save that the system refuses leaves nothing of itself, leaves older checkpoints unchanged, and names the reason."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import lock

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing.commit import commit, make_directory, remove
from trainwright.checkpointing.format import list_checkpoints, read_manifest, update_name, verify
from trainwright.checkpointing.tensorfile import Contents
from trainwright.checkpointing.weights import save_weights
from trainwright.core.errors import CheckpointError

CALLS = ("open", "write", "fsync", "rename", "mkdir", "close")
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOENT)


def put(root, update=1, data=b"weights", **options):
    files = {"model": Contents({"w": torch.ones(3)}, {}), "one.bin": data, "two.bin": b""}
    return commit(root, files, manifest={"run": "r", "update": update, "epoch": 0, "metrics": {}}, **options)


class Faults:
    """A layer between us and the system: the call of that number fails, and with `lasting` every one after it."""

    def __init__(self, monkeypatch, fails_at=None, *, number=errno.EIO, lasting=False):
        self.seen = []
        self._at, self._number, self._lasting = fails_at, number, lasting
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, real):
        def call(*args, **kwargs):
            at = len(self.seen)
            self.seen.append(name)
            fails = self._at is not None and (at == self._at or (self._lasting and at > self._at))
            if fails and name != "close":
                raise OSError(self._number, os.strerror(self._number))
            result = real(*args, **kwargs)
            if fails:  # the descriptor is gone, and its error is reported
                raise OSError(self._number, os.strerror(self._number))
            return result

        return call


def contents(root):
    """Every name below a root with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def counted(tmp_path, **options):
    """The calls of a save that nothing disturbs, up to the one after which it is done."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        put(tmp_path, **options)
    assert set(faults.seen) == set(CALLS)
    last = len(faults.seen) - faults.seen[::-1].index("fsync")
    return faults.seen[: last + 1]  # and the close of what was synced last


@pytest.mark.parametrize("number", REFUSALS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("replaces", [False, True])
def test_whichever_call_of_a_save_is_refused_all_is_as_it_was(replaces, number, tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2) if replaces else None
    (tmp_path / "scratch").mkdir()
    put(tmp_path / "scratch", 2)
    calls = counted(tmp_path / "scratch", update=2 if replaces else 3, data=b"new")
    before = contents(tmp_path)
    for at in range(len(calls)):
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at, number=number)
            with pytest.raises(CheckpointError, match="could not be written to") as caught:
                put(tmp_path, 2, b"new")
        assert contents(tmp_path) == before, (at, calls[at])
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == number
        assert os.strerror(number) in str(caught.value) and "those before it are as they were" in str(caught.value)
    assert verify(put(tmp_path, 2, b"new"))["update"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_a_drive_that_stays_broken_loses_nothing_once_it_is_back(replaces, tmp_path):
    first = put(tmp_path, 1)
    second = put(tmp_path, 2, b"old") if replaces else None
    (tmp_path / "scratch").mkdir()
    put(tmp_path / "scratch", 2)
    for at in range(len(counted(tmp_path / "scratch", update=2 if replaces else 3))):
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at, number=errno.EIO, lasting=True)
            with pytest.raises(CheckpointError):
                put(tmp_path, 2, b"new")
        verify(first)
        with lock(tmp_path):
            pass
        assert all(verify(path) for path in list_checkpoints(tmp_path))
        if second:
            assert (second / "one.bin").read_bytes() in (b"old", b"new")
            put(tmp_path, 2, b"old")
        elif len(list_checkpoints(tmp_path)) > 1:
            remove(list_checkpoints(tmp_path)[0])
        assert not [name for name in os.listdir(tmp_path) if name.startswith((".tmp", ".old", ".trash"))]


def test_an_interrupt_during_a_replacement_restores_the_old_checkpoint(tmp_path, monkeypatch):
    old = put(tmp_path, data=b"old")
    real = os.rename

    def rename(one, other):
        if Path(one).name.startswith(".tmp"):
            raise KeyboardInterrupt
        real(one, other)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, data=b"new")
    assert os.listdir(tmp_path) == [old.name] and (old / "one.bin").read_bytes() == b"old"


def test_a_checkpoint_hidden_by_a_killed_writer_gets_its_name_again(tmp_path):
    old, other = put(tmp_path, 1, b"old"), put(tmp_path, 2)
    os.rename(old, tmp_path / ".old-update-0000000001-1-00000000")
    os.rename(other, tmp_path / ".trash-update-0000000002-1-00000000")  # that one was to go
    (tmp_path / ".old-update-0000000003-1-00000000").mkdir()
    with lock(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [".lock", old.name] and (old / "one.bin").read_bytes() == b"old"
    os.rename(old, tmp_path / ".old-update-0000000001-1-00000000")
    put(tmp_path, 1, b"new")
    with lock(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [".lock", old.name] and (old / "one.bin").read_bytes() == b"new"


def test_leftovers_that_cannot_be_cleaned_up_are_reported(tmp_path, monkeypatch):
    os.rename(put(tmp_path), tmp_path / ".tmp-update-0000000001-1-00000000")
    real = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.warns(UserWarning, match="could not be given its name: .*Input/output"), lock(tmp_path):
            pass
        patch.setattr(os, "rename", real)
        patch.setattr(
            commits, "sync_directory", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
        )
        with pytest.raises(CheckpointError, match=r"could not be cleaned(.|\n)*Input/output"), lock(tmp_path):
            pass
    with lock(tmp_path):
        assert [path.name for path in list_checkpoints(tmp_path)] == ["update-0000000001"]


def test_a_checkpoint_that_cannot_be_renamed_stays_complete(tmp_path, monkeypatch):
    path = put(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "not permitted")))
        with pytest.raises(OSError, match="not permitted"):
            remove(path)
    verify(path)
    remove(path)
    assert os.listdir(tmp_path) == []


def test_a_root_that_vanished_is_not_made_anew(tmp_path):
    make_directory(tmp_path / "run")
    with lock(tmp_path / "run"):
        put(tmp_path / "run")
        os.rename(tmp_path / "run", tmp_path / "moved")
        with pytest.raises(CheckpointError, match="No such file") as caught:
            put(tmp_path / "run", 2)
    assert caught.value.__cause__.errno == errno.ENOENT and os.listdir(tmp_path) == ["moved"]
    verify(tmp_path / "moved" / update_name(1))


def test_the_newest_checkpoint_is_not_found_by_clock_or_file_times(tmp_path, monkeypatch):
    for update in (1, 2, 3):
        monkeypatch.setattr(time, "time", lambda update=update: 1e9 - 1e8 * update)
        os.utime(put(tmp_path, update), (1e9 - 1e8 * update,) * 2)
    assert [read_manifest(path)["update"] for path in list_checkpoints(tmp_path)] == [3, 2, 1]


def test_a_weights_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    save_weights(tmp_path / "w", {"w": torch.ones(3)})
    before = contents(tmp_path)
    for at in range(1, 5):  # behind the one that makes the directory
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at, number=errno.ENOSPC)
            with pytest.raises(CheckpointError, match=r"w could not be written\n.*No space left"):
                save_weights(tmp_path / "w", {"w": torch.zeros(3)})
        assert contents(tmp_path) == before


LIMITED = """
import os, resource, sys, torch
from pathlib import Path
from trainwright.core.errors import CheckpointError
from trainwright.checkpointing.commit import commit
from trainwright.checkpointing.tensorfile import Contents
resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20,) * 2)
files = {"model": Contents({"w": torch.ones(8 << 20)}, {})}
try:
    commit(Path(sys.argv[1]), files, manifest={"run": "r", "update": 2, "epoch": 0, "metrics": {}})
except CheckpointError as error:
    print(error.__cause__.errno, error)
"""


@pytest.mark.slow
def test_a_file_size_limit_of_the_system_leaves_no_trace(tmp_path):
    put(tmp_path)
    before = contents(tmp_path)
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{errno.EFBIG} ") and "File too large" in done.stdout, done
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_large_files_have_the_checksum_of_small_ones(tmp_path):
    data = torch.arange(5 << 20).view(torch.uint8)
    for checksum in ("crc32", "sha256"):
        path = put(tmp_path, data=data.numpy().tobytes(), checksum=checksum)
        verify(path)
        for at in (0, 9_000_000, data.numel() - 1):
            with open(path / "one.bin", "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 4]))
            with pytest.raises(CheckpointError, match=f"checksum .{checksum}"):
                verify(path)
            with open(path / "one.bin", "r+b") as file:
                file.seek(at)
                file.write(bytes([byte]))
        verify(path)


def test_checksums_are_the_same_if_no_thread_can_be_started(tmp_path, monkeypatch):
    data = bytes(range(256)) * 50_000
    with_thread = put(tmp_path, 1, data)

    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    without = put(tmp_path, 2, data)
    assert verify(without)["files"] == verify(with_thread)["files"]


def test_no_thread_outlives_a_save_that_fails(tmp_path):
    before = set(threading.enumerate())
    data = bytes(20 << 20)
    for at in range(2, 16):
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at)
            with pytest.raises(CheckpointError):
                put(tmp_path, 1, data)
    assert set(threading.enumerate()) <= before
