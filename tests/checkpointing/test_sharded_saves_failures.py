"""Checkpoints that all processes write, where one of them is refused, slow, killed, or its file damaged afterwards."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import threading
import time
import warnings
from pathlib import Path

import pytest
import sharded_runs

from distributed.pool import RankFailed, pool
from durability.tear import _all_damages
from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import files, sharded_files
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.format import load_tree
from trainwright.checkpointing.load import latest_checkpoint, load_checkpoint, load_weights
from trainwright.core.errors import CheckpointError
from trainwright.distributed.world import ProcessGroupWorld


def on_all(size, function, *given, seconds=60):
    return pool(size).run(function, *given, seconds=seconds)


# While it is written


class Fault:
    """What goes wrong on one process while `update` 2 is saved, until `mend`."""

    def __init__(self, name, rank):
        self.name, self.rank = name, rank
        self._write, self._os_write = sharded_files.write_file, os.write
        self._storage_write = commits.write_file
        self._patience = sharded_files.PATIENCE

    def start(self):
        if self.name == "slow":
            sharded_files.PATIENCE = 0.3  # on all, as it is set
        if ProcessGroupWorld().rank == self.rank:
            getattr(self, self.name.replace(" ", "_"))()

    def mend(self):
        sharded_files.write_file, os.write = self._write, self._os_write
        sharded_files.PATIENCE, commits.write_file = self._patience, self._storage_write

    def full_disk(self):
        def write(fd, data):
            if len(data) > 500:  # the file of pieces, not the words about it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._os_write(fd, data)

        files.os.write = write

    def disk_without_a_byte(self):
        def write(fd, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files.os.write = write

    def slow(self):
        def write(path, *given, **named):
            time.sleep(1.0)
            return self._write(path, *given, **named)

        sharded_files.write_file = write

    def torn(self):
        def write(path, *given, **named):
            entry = self._write(path, *given, **named)
            if path.suffix == ".safetensors":
                os.truncate(path, entry["size"] - 1)
            return entry

        sharded_files.write_file = write

    def mistake(self):
        def write(path, *given, **named):
            if path.suffix == ".safetensors":
                raise ZeroDivisionError("a mistake")
            return self._write(path, *given, **named)

        sharded_files.write_file = write

    def first_refused(self):
        def write(path, *given, **named):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        commits.write_file = write


def saves_with_a_fault(directory, name, rank, on_error):
    """Three saves, of which the second meets a fault."""
    _, manager = sharded_runs.keep(directory, on_save_error=on_error)
    model, optimizer = sharded_runs.made()
    sharded_runs.train(model, optimizer, 1)
    fault, said = Fault(name, rank), []
    with warnings.catch_warnings(record=True) as received:
        warnings.simplefilter("always")
        for update in (1, 2, 3):
            if update == 2:
                fault.start()
            manager.save(sharded_runs.tree_of(model, optimizer, update), update=update, epoch=0)
            began = time.monotonic()
            manager.wait()  # and not `written(wait=True)`: it is not the last save, which must succeed
            try:
                said.append([one.update for one in manager.completed()])
            except CheckpointError as error:
                said.append(str(error))
            took = time.monotonic() - began
            fault.mend()
            assert took < 20, took
    names = [path.name for path in manager.saved]
    manager.release()
    return said, [str(one.message) for one in received], names


FAULTS = {
    "full disk": (1, "the disk is full"),
    "disk without a byte": (1, "the disk is full"),
    "first refused": (0, "the disk is full"),
    "slow": (1, "a rank has not written its part"),
    "torn": (1, "input/output error"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_process_that_cannot_write_its_part_makes_it_no_save_for_anybody(tmp_path, name):
    rank, reason = FAULTS[name]
    (said, received, names), (second, silent, same) = on_all(2, saves_with_a_fault, tmp_path, name, rank, "warn")
    assert said == second == [[1], [], [3]] and names == same
    assert len(received) == 1 and reason in received[0] and "update-0000000002" in received[0] and silent == []
    if rank:
        assert "rank 1" in received[0]
    assert names == [formats.update_name(3), formats.update_name(1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *reversed(names)]
    for path in formats.list_checkpoints(tmp_path):
        formats.verify(path)


def test_it_ends_all_of_them_where_that_is_asked_for(tmp_path):
    (said, _, _), (second, _, _) = on_all(2, saves_with_a_fault, tmp_path, "full disk", 1, "raise")
    assert said == second and "the disk is full" in said[1] and (said[0], said[2]) == ([1], [3])


def test_what_is_no_fault_of_the_system_ends_all_of_them_in_any_case(tmp_path):
    (said, _, _), (second, _, _) = on_all(2, saves_with_a_fault, tmp_path, "mistake", 1, "warn")
    assert said == second and "ZeroDivisionError: a mistake" in said[1] and "rank 1 on " in said[1]


def slow_but_seen(directory):
    """A process that takes longer than the patience lasts, and is seen to write."""
    sharded_files.PATIENCE, write = 0.4, sharded_files.write_file

    def by_and_by(path, *given, **named):
        for n in range(6):
            time.sleep(0.2)
            path.with_suffix(".part").write_bytes(bytes(n + 1))
        path.with_suffix(".part").unlink()
        return write(path, *given, **named)

    try:
        if ProcessGroupWorld().rank == 1:
            sharded_files.write_file = by_and_by
        return sharded_runs.run(directory, (1,)) is not None
    finally:
        sharded_files.PATIENCE, sharded_files.write_file = 300.0, write


@pytest.mark.slow
def test_a_process_that_is_slow_and_seen_to_write_is_waited_for(tmp_path):
    assert on_all(2, slow_but_seen, tmp_path) == [True, True]
    assert [formats.verify(path)["update"] for path in formats.list_checkpoints(tmp_path)] == [1]


def dies_in_a_save(directory, notes):
    """The second process is gone while it writes; the first ends in the error that its training meets."""
    world, manager = sharded_runs.keep(directory)
    model, optimizer = sharded_runs.made()
    sharded_runs.train(model, optimizer, 1)
    manager.save(sharded_runs.tree_of(model, optimizer, 1), update=1, epoch=0)
    manager.completed(wait=True)
    sharded_files.HURRY = 0.5
    begun = threading.Event()
    if world.rank == 1:
        files.tensorfile.write = lambda *given: (begun.wait(10), os._exit(9))
    manager.save(sharded_runs.tree_of(model, optimizer, 2), update=2, epoch=0)
    begun.set()
    began = time.monotonic()
    with pytest.raises(CheckpointError) as received:
        manager.completed(wait=True, alone=True)
    manager.release()
    said = [str(received.value), time.monotonic() - began]
    Path(notes).write_text(json.dumps(said))


@pytest.mark.slow
def test_a_process_killed_in_a_save_leaves_the_checkpoint_before_and_the_others_do_not_wait_for_it(tmp_path):
    with pytest.raises(RankFailed, match="exit code 9"):
        on_all(2, dies_in_a_save, tmp_path / "run", str(tmp_path / "notes"))
    received, seconds = json.loads((tmp_path / "notes").read_text())
    assert seconds < 15 and "a rank has not written its part" in received and "rank 1" in received
    assert [formats.verify(path)["update"] for path in formats.list_checkpoints(tmp_path / "run")] == [1]


def killed_first(directory):
    """The first process is gone between its own files and the manifest."""
    world, manager = sharded_runs.keep(directory)
    model, optimizer = sharded_runs.made()
    sharded_runs.train(model, optimizer, 1)
    manager.save(sharded_runs.tree_of(model, optimizer, 1), update=1, epoch=0)
    manager.completed(wait=True)
    if world.is_main:
        commits.manifest_text = lambda *given: os._exit(9)
    manager.save(sharded_runs.tree_of(model, optimizer, 2), update=2, epoch=0)
    time.sleep(3.0)


@pytest.mark.slow
def test_what_a_killed_first_process_leaves_is_cleaned_up_by_the_next_run(tmp_path):
    with pytest.raises(RankFailed, match="exit code 9"):
        on_all(2, killed_first, tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]) == 1
    answers = on_all(2, sharded_runs.resume_and_save, tmp_path)
    assert answers == [[formats.update_name(3), formats.update_name(1)]] * 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


# After it was written


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded") / "run"
    on_all(2, sharded_runs.run, directory, (1, 2))
    return directory


def test_every_damage_to_any_file_is_noticed_named_and_passed_over(written, tmp_path):
    newest, older = formats.list_checkpoints(written)
    tried = set()
    for n, (name, file, damage) in enumerate(_all_damages(newest, random.Random(0))):
        copy = tmp_path / str(n)
        shutil.copytree(written, copy)
        damage(copy / newest.name / file.name)
        with pytest.warns(UserWarning, match="passed over"):
            loaded = load_checkpoint("auto", copy)
        assert loaded is not None and loaded.path.name == older.name, name
        with pytest.raises(CheckpointError):
            load_weights(copy / newest.name)
            load_tree(copy / newest.name)
        tried.add(file.name)
        shutil.rmtree(copy)
    assert tried == {path.name for path in newest.iterdir()} and len(tried) == 6


def found(directory, later):
    world = ProcessGroupWorld()
    with warnings.catch_warnings(record=True) as received:
        warnings.simplefilter("always")
        loaded = load_checkpoint("auto", directory, world=world, lazy_shards=later)
    return loaded.path.name, [str(one.message).partition("\n")[0] for one in received]


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00001.safetensors", "shards.json", "state.json"])
def test_processes_that_check_a_share_of_the_files_each_agree_on_the_older_one(written, tmp_path, name):
    newest, older = formats.list_checkpoints(written)
    copy = tmp_path / "run"
    shutil.copytree(written, copy)
    data = bytearray((copy / newest.name / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / newest.name / name).write_bytes(data)
    (first, received), (second, silent) = on_all(2, found, copy, True)
    assert first == second == older.name and silent == []
    assert len(received) == 1 and name in received[0]


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def planted(directory, name, payload):
    """Put bytes in the place of a file, and have the manifest vouch for them."""
    manifest = formats.read_manifest(directory)
    (directory / name).unlink(missing_ok=True)
    entry = commits.write_file(directory / name, payload)
    fields = {key: value for key, value in manifest.items() if key not in ("format", "version", "versions", "crc32")}
    (directory / formats.MANIFEST).unlink()
    text = formats.manifest_text({**fields, "files": {**fields["files"], name: entry}}, "crc32")
    commits.write_file(directory / formats.MANIFEST, text)


@pytest.mark.parametrize(
    "name",
    [
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "shards.json",
        "state.json",
        "state.safetensors",
        ".metadata",
    ],
)
def test_a_pickle_in_the_place_of_any_file_runs_nothing(written, tmp_path, name):
    newest = formats.list_checkpoints(written)[0]
    copy = tmp_path / "run" / newest.name
    shutil.copytree(newest, copy)
    ran = tmp_path / "it-ran"
    pickle.loads(pickle.dumps(Payload(ran)))
    ran.rmdir()  # the payload works
    planted(copy, name, pickle.dumps(Payload(ran)))
    if name != ".metadata":  # that one is no name of a file that a checkpoint has
        formats.verify(copy)  # its checksums are right
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_tree(copy)
    with pytest.warns(UserWarning, match=name.replace(".", r"\.")):
        assert latest_checkpoint(copy.parent) is None  # it cannot be decoded: there is nothing to resume from
    assert on_all(2, error_of_all, copy.parent) == [False, False]
    assert not ran.exists()


def error_of_all(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sharded_runs.resume(directory)
        except CheckpointError:
            return False
    return True


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["pieces"].pop(),
        lambda one: one["pieces"].append(one["pieces"][0]),
        lambda one: one["pieces"][0].update(offsets=[1, 0]),
        lambda one: one["pieces"][0].update(file="../model.safetensors"),
        lambda one: one["pieces"][0].update(file="shard-00007.safetensors"),
        lambda one: one["pieces"][0].update(sizes=[True, 5]),
        lambda one: one.update(shape=[1 << 61, 5]),
        lambda one: one.update(dtype="O"),
        lambda one: one.clear(),
    ],
)
def test_a_list_of_pieces_that_do_not_make_up_their_tensor_is_refused(written, tmp_path, change):
    newest = formats.list_checkpoints(written)[0]
    copy = tmp_path / newest.name
    shutil.copytree(newest, copy)
    listed = json.loads((copy / "shards.json").read_text())
    change(listed["tensors"]["model.embed.weight"])
    planted(copy, "shards.json", json.dumps(listed).encode())
    with pytest.raises(CheckpointError, match=r"shards\.json is damaged"):
        load_tree(copy)
