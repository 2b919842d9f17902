"""A checkpoint is complete or absent, and every defect has one error that names its file."""

import json
import os
import signal
import time
import zlib
from pathlib import Path

import pytest
from checkpoints import lock

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import files
from trainwright.checkpointing.commit import commit, make_directory, remove
from trainwright.checkpointing.format import list_checkpoints, read_manifest, update_name, verify
from trainwright.core.errors import CheckpointError

MANIFEST = {"run": "r", "update": 3, "epoch": 1, "metrics": {"loss": 0.5}}


def put(root, update=3, data=b"weights", **manifest):
    contents = {"one.bin": data, "two.bin": b""}
    return commit(root, contents, manifest=MANIFEST | {"update": update} | manifest)


def hidden(root):
    return sorted(name for name in os.listdir(root) if name != ".lock" and not name.startswith("update-"))


def test_a_commit_is_complete_and_its_manifest_comes_back(tmp_path):
    path = put(tmp_path, metrics={"loss": float("nan"), "up": float("inf")})
    manifest = verify(path)
    assert path == tmp_path / "update-0000000003" and hidden(tmp_path) == []
    assert str(manifest["metrics"]) == "{'loss': nan, 'up': inf}"
    assert (manifest["format"], manifest["version"]) == ("trainwright-checkpoint", 4)
    assert manifest["files"] == {
        "one.bin": {"size": 7, "crc32": f"{zlib.crc32(b'weights'):08x}"},
        "two.bin": {"size": 0, "crc32": "00000000"},
    }
    assert {"trainwright", "torch", "python"} == manifest["versions"].keys()
    assert json.loads((path / "manifest.json").read_text())["run"] == "r"


def test_only_the_owner_may_read(tmp_path):
    make_directory(tmp_path / "a" / "run")
    os.umask(old := os.umask(0))
    before = os.umask(0)
    try:
        path = put(tmp_path / "a" / "run")
        make_directory(tmp_path / "b")
        with lock(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    assert before == old
    assert {p.stat().st_mode & 0o777 for p in (path, tmp_path / "a" / "run", tmp_path / "b")} == {0o700}
    assert {p.stat().st_mode & 0o777 for p in (*path.iterdir(), tmp_path / "b" / ".lock")} == {0o600}


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_of_a_save_that_fails(error, tmp_path, monkeypatch):
    old = put(tmp_path)
    before = (old / "one.bin").read_bytes()

    def fails(fd):
        raise error

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)) as caught:
        commit(tmp_path, {"one.bin": b"half"}, manifest=MANIFEST)
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value) and caught.value.__cause__ is error
    assert os.listdir(tmp_path) == [old.name] and (old / "one.bin").read_bytes() == before
    verify(old)


def test_the_order_of_the_protocol_is_kept(tmp_path, monkeypatch):
    """Files synced, then the manifest, then the directory, then the rename, then the root."""
    events = []

    def watch(name, describe):
        real = getattr(os, name)

        def call(*args, **kwargs):
            events.append(f"{name} {describe(*args)}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    watch("fsync", lambda fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split("-")[0])
    watch("rename", lambda one, other: f"{Path(one).name.split('-')[0]} {Path(other).name}")
    put(tmp_path)
    root = tmp_path.name.split("-")[0]
    assert events == [
        "fsync one.bin",
        "fsync two.bin",
        "fsync manifest.json",
        "fsync .tmp",
        "rename .tmp update-0000000003",
        f"fsync {root}",
    ]


def test_a_checkpoint_of_the_same_update_is_replaced(tmp_path):
    put(tmp_path, data=b"old")
    path = put(tmp_path, data=b"new")
    assert (path / "one.bin").read_bytes() == b"new" and os.listdir(tmp_path) == [path.name]
    verify(path)


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_a_pipe_in_place_of_an_empty_file_is_no_empty_file(tmp_path):
    path = put(tmp_path)
    (path / "two.bin").unlink()
    os.mkfifo(path / "two.bin")
    with pytest.raises(CheckpointError, match=r"two\.bin is no regular file"):
        verify(path)


def forged(path, change):
    """A manifest that was changed and sealed again."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("crc32")
    change(manifest)
    body = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    (path / "manifest.json").write_bytes(body + b',\n "crc32": "%08x"\n}\n' % zlib.crc32(body))


@pytest.mark.parametrize(
    "name", ["../outside", "a/b", "/etc/passwd", "..", ".", "", "a\\b", "c:x", "a\0b", "manifest.json"]
)
def test_a_name_in_a_manifest_cannot_leave_its_directory(name, tmp_path):
    path = put(tmp_path)
    (tmp_path / "outside").write_bytes(b"")
    forged(path, lambda manifest: manifest["files"].update({name: {"size": 0, "crc32": "00000000"}}))
    with pytest.raises(CheckpointError, match="no plain name"):
        verify(path)
    with pytest.raises(CheckpointError, match="no plain name"):
        commit(tmp_path, {name: b""}, manifest=MANIFEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=5), "format version 5"),
        (lambda m: m.update(version="1"), "format version '1'"),
        (lambda m: m.update(format="other"), "not the manifest"),
        (lambda m: m.update(update=4), "update-0000000004"),
        (lambda m: m.update(update="3"), "'update' is a str"),
        (lambda m: m.pop("run"), "'run' is missing"),
        (lambda m: m.pop("files"), "'files' is missing"),
        (lambda m: m["files"].update({"one.bin": 3}), "one.bin"),
        (lambda m: m["files"].update({"one.bin": {"size": 7}}), "one.bin"),
        (lambda m: m["files"]["one.bin"].update(sha256="00"), "one.bin"),
        (lambda m: m["files"]["one.bin"].update(size=-1), "one.bin"),
        (lambda m: m.update(mode=3), "'mode' is 3"),
        (lambda m: m.update(metrics={"$pickle": "x"}), "pickle"),
    ],
)
def test_a_manifest_that_this_version_cannot_read_is_refused(change, words, tmp_path):
    path = put(tmp_path)
    forged(path, change)
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert words in str(caught.value)
    if "version" in words:
        assert "a later trainwright: git pull" in str(caught.value)


def test_a_link_to_a_checkpoint_is_not_followed(tmp_path):
    path = put(tmp_path)
    (tmp_path / update_name(9)).symlink_to(path)
    assert list_checkpoints(tmp_path)[0].name == update_name(9)
    with pytest.raises(CheckpointError, match="links are not followed"):
        verify(tmp_path / update_name(9))
    remove(tmp_path / update_name(9))
    verify(path)


def test_checkpoints_are_listed_by_their_full_name_newest_first(tmp_path):
    for update in (5, 40, 12_345_678_901):
        put(tmp_path, update)
    for name in (
        ".tmp-update-0000000006-1-00000000",
        "update-6",
        "update-00000000006",
        "update-0000000007.bak",
        "notes",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "update-12345678901",
        "update-0000000040",
        "update-0000000005",
    ]
    assert list_checkpoints(tmp_path / "nowhere") == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        list_checkpoints(tmp_path / "file")


def test_reading_the_manifest_alone_notices_files_of_another_size(tmp_path):
    path = put(tmp_path)
    flip(path / "one.bin", 0)
    read_manifest(path)
    (path / "one.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"one\.bin is damaged: it has 5 bytes and should have 7"):
        read_manifest(path)


def test_a_removed_checkpoint_is_renamed_before_its_files_are_deleted(tmp_path, monkeypatch):
    path = put(tmp_path)
    seen = []
    monkeypatch.setattr(commits.shutil, "rmtree", lambda victim, **_: seen.append((Path(victim).name, path.exists())))
    remove(path)
    assert len(seen) == 1 and seen[0][0].startswith(".trash-update-0000000003-") and seen[0][1] is False


def test_two_writers_of_one_root_are_refused(tmp_path):
    with lock(tmp_path):
        with pytest.raises(CheckpointError, match=f"another run\n.*process {os.getpid()} on "), lock(tmp_path):
            pass
        with pytest.raises(CheckpointError), lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


def test_a_released_lock_is_free_before_a_forked_process_has_closed_its_copy(tmp_path):
    with lock(tmp_path):
        copy = os.dup(next(iter(commits._locked)))
    try:
        with lock(tmp_path):
            pass
    finally:
        os.close(copy)


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_lock(tmp_path):
    ready, go = os.pipe()
    run = os.fork()
    if run == 0:
        with lock(tmp_path):
            if os.fork() == 0:
                os.write(go, str(os.getpid()).encode())
            time.sleep(20)
        os._exit(0)
    worker = int(os.read(ready, 100))
    with pytest.raises(CheckpointError), lock(tmp_path):
        pass
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    try:
        os.kill(worker, 0)
        with lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_leftovers_of_dead_writers_are_cleaned_and_nothing_else(tmp_path):
    path = put(tmp_path)
    for name in (".tmp-update-0000000006-1-0123abcd", ".trash-update-0000000001-77-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.bin").touch()
    for name in (".tmp-mine", ".trash", "notes", "update-6"):
        (tmp_path / name).mkdir()
    with lock(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [
            ".lock",
            ".tmp-mine",
            ".trash",
            "notes",
            "update-0000000003",
            "update-6",
        ]
    verify(path)


def test_leftovers_of_a_living_writer_are_not_cleaned(tmp_path):
    with lock(tmp_path):
        (tmp_path / ".tmp-update-0000000006-1-0123abcd").mkdir()
        with pytest.raises(CheckpointError), lock(tmp_path):
            pass
        assert (tmp_path / ".tmp-update-0000000006-1-0123abcd").is_dir()


def test_a_writer_killed_between_two_renames_loses_nothing(tmp_path):
    old = put(tmp_path, data=b"old")
    os.rename(old, tmp_path / ".trash-update-0000000003-1-00000000")
    new = put(tmp_path, data=b"new")
    os.rename(new, tmp_path / ".tmp-update-0000000003-1-00000000")
    with lock(tmp_path):
        pass
    assert [path.name for path in list_checkpoints(tmp_path)] == [old.name] and hidden(tmp_path) == []
    assert (old / "one.bin").read_bytes() == b"new"
    verify(old)


def test_a_half_written_leftover_never_becomes_a_checkpoint(tmp_path):
    new = put(tmp_path, data=b"new")
    flip(new / "one.bin", 3)
    os.rename(new, tmp_path / ".tmp-update-0000000003-1-00000000")
    with lock(tmp_path):
        assert list_checkpoints(tmp_path) == [] and hidden(tmp_path) == []


def test_a_root_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            make_directory(root)
    make_directory(tmp_path / "a" / "b" / "c")
    assert os.listdir(tmp_path / "a" / "b" / "c") == []


def test_a_planted_link_is_replaced_and_not_written_through(tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (tmp_path / "weights").symlink_to(target)
    files.replace_file(tmp_path / "weights", b"new")
    assert target.read_bytes() == b"precious" and (tmp_path / "weights").read_bytes() == b"new"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    with pytest.raises(CheckpointError, match="cannot be locked"), lock(tmp_path / "run"):
        pass
    assert target.read_bytes() == b"precious"


def test_a_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "fcntl", None)
    with pytest.warns(UserWarning, match="no flock"), lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_single_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    files.replace_file(tmp_path / "w", b"old")

    def fails(fd):
        raise RuntimeError

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(RuntimeError):
        files.replace_file(tmp_path / "w", b"half")
    assert os.listdir(tmp_path) == ["w"] and (tmp_path / "w").read_bytes() == b"old"
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o600
