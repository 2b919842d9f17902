"""Checkpoints of several ranks: rank 0 writes, all ranks have the same results and errors."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import warnings
from functools import partial

import pytest
import torch
from checkpoints import flip, lock, tree_of, updates
from torch import nn

from distributed.pool import pool
from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import coordinator, load
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.load import load_checkpoint
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.distributed.world import ProcessGroupWorld


def on_all(size, function, *given):
    """What each of `size` processes returns."""
    return pool(size).run(function, *given)


def keep(directory, *, resuming=False, **settings):
    """A world and its prepared manager, with a run id that each process has made up for itself."""
    world = ProcessGroupWorld()
    manager = Checkpoint(directory, **settings).bind(f"run-{world.rank}", world=world)
    manager.prepare(resuming=resuming)
    return world, manager


def save(manager, update, **metrics):
    """Judge and save, as a run does on every process; only the first one's state is what is to be saved."""
    if manager.settings.best in metrics:
        manager.judge(metrics, epoch=0, update=update)
    torch.manual_seed(update)
    model = nn.Linear(3, 2)
    tree = tree_of(model, update) if manager.world.is_main else {}
    manager.save(tree, update=update, epoch=0, metrics=metrics)


def reported(manager):
    """What a manager says, as plain text and numbers."""
    best = manager.best
    where = None if best is None else (best.update, None if best.path is None else best.path.name)
    return [path.name for path in manager.saved], where, manager.failing, manager.run_id


def error_of(function, *given):
    try:
        function(*given)
    except (CheckpointError, SettingError) as error:
        return type(error).__name__, str(error)
    return None


# Keeping


def three_saves(directory):
    world, manager = keep(directory, keep=1, best="val_loss")
    for update, value in ((1, 0.5), (2, 0.1), (3, 0.3)):
        save(manager, update, val_loss=value)
    whole = [one.update for one in manager.completed(wait=True)]
    said = reported(manager), whole, manager.state_dict()
    manager.release()
    assert world.size > 1
    return said


@pytest.mark.parametrize("size", [2, 3])
def test_rank_zero_writes_and_all_ranks_know_the_complete_and_the_best(tmp_path, size):
    said = on_all(size, three_saves, tmp_path / "run")
    assert said == [said[0]] * size
    names, best, failing, run = said[0][0]
    assert (names, best, failing) == ([formats.update_name(3), formats.update_name(2)], (2, formats.update_name(2)), "")
    assert run == "run-0" and said[0][1] == [1, 2, 3]
    assert updates(tmp_path / "run") == [2, 3]
    assert {formats.read_manifest(path)["run"] for path in formats.list_checkpoints(tmp_path / "run")} == {"run-0"}


def count_collectives(directory):
    world, manager = keep(directory)
    asked = []
    for name in ("broadcast", "all_gather"):
        plain = getattr(world, name)
        setattr(world, name, lambda *given, plain=plain, name=name: (asked.append(name), plain(*given))[1])
    counts = []
    for step in (
        lambda: [manager.completed() for _ in range(100)],
        lambda: (
            manager.judge({}, epoch=0, update=1),
            manager.best,
            manager.saved,
            manager.failing,
        ),
        lambda: save(manager, 1),
        lambda: manager.completed(wait=True),
        lambda: [manager.completed() for _ in range(100)],
        manager.release,
    ):
        step()
        counts.append(len(asked))
        asked.clear()
    return counts


def test_only_a_save_and_its_result_are_collectives(tmp_path):
    assert on_all(2, count_collectives, tmp_path / "run") == [[0, 0, 1, 1, 0, 0]] * 2


def slow_write(directory):
    world, manager = keep(directory)
    beats, commit, broadcast = [], commits.commit, world.broadcast
    coordinator.BEAT = 0.05
    world.broadcast = lambda value: (beats.append(value), broadcast(value))[1]
    commits.commit = lambda *given, **named: (time.sleep(0.5), commit(*given, **named))[1]
    try:
        save(manager, 1)
        (one,) = manager.completed(wait=True)
    finally:
        commits.commit, coordinator.BEAT = commit, 5.0
        manager.release()
    return one.update, len(beats)


def test_ranks_that_wait_for_a_long_write_get_heartbeats(tmp_path):
    for update, said in on_all(2, slow_write, tmp_path / "run"):
        assert update == 1 and said > 5  # each shorter than a time-out, where one long silence is not


# Errors are everybody's


def twice_held(directory):
    world = ProcessGroupWorld()
    other = CheckpointManager(Checkpoint(directory), "other") if world.is_main else None
    if other is not None:
        other.prepare(resuming=False)
    world.sum_numbers(0)
    said = error_of(keep, directory)
    if other is not None:
        other.release()
    return said


def test_a_directory_that_another_run_holds_is_refused_on_all(tmp_path):
    first, second = on_all(2, twice_held, tmp_path / "run")
    assert first == second and first[0] == "CheckpointError"
    assert "is being written to by another run" in first[1]


def on_drives_of_their_own(directory):
    """As on machines that have a drive each: the second process sees nothing of what the first one makes."""
    world, lexists = ProcessGroupWorld(), os.path.lexists
    if world.rank == 1:
        os.path.lexists = lambda path: False
        coordinator._LOOKS_FOR = 0.2
    try:
        return error_of(keep, directory)
    finally:
        os.path.lexists, coordinator._LOOKS_FOR = lexists, 5.0


def test_a_rank_that_sees_another_directory_is_named_with_the_fix(tmp_path):
    first, second = on_all(2, on_drives_of_their_own, tmp_path / "run")
    assert first == second
    assert "rank 1 on " in first[1] and "rank 0 on" not in first[1].partition("cannot see")[0]
    assert "a directory that all ranks share" in first[1]
    with lock(tmp_path / "run"):
        pass  # it was let go of
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def started_elsewhere(directory):
    """A relative directory means the first process's."""
    world = ProcessGroupWorld()
    os.chdir(directory / str(world.rank))
    try:
        world, manager = keep("runs/x")
        save(manager, 1)
        manager.completed(wait=True)
        said = manager.saved, manager.directory
        manager.release()
    finally:
        os.chdir("/")
    return said


def test_a_relative_directory_is_that_of_rank_zero(tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    run = tmp_path / "0/runs/x"
    assert on_all(2, started_elsewhere, tmp_path) == [([run / formats.update_name(1)], run)] * 2


def full_disk(directory, on_error):
    world, manager = keep(directory, on_save_error=on_error)
    save(manager, 1)
    manager.completed(wait=True)
    write = commits.write_file
    if world.is_main:
        commits.write_file = partial(_refuse, errno.ENOSPC)
    try:
        with warnings.catch_warnings(record=True) as received:
            warnings.simplefilter("always")
            save(manager, 2)
            error = error_of(partial(manager.completed, wait=True))
    finally:
        commits.write_file = write
    said = error, [str(one.message) for one in received], reported(manager)
    manager.release()
    return said


def _refuse(number, *given, **named):
    raise OSError(number, os.strerror(number), "there")


def test_a_failed_save_ends_all_ranks_with_raise(tmp_path):
    (first, received, state), second = on_all(2, full_disk, tmp_path / "run", "raise")
    assert first[0] == "CheckpointError" and "the disk is full" in first[1]
    assert second == (first, [], state) and received == []
    assert state[0] == [formats.update_name(1)] and "the last save failed" in state[2]


def test_the_last_save_must_succeed_on_all_ranks(tmp_path):
    (first, received, state), second = on_all(2, full_disk, tmp_path / "run", "warn")
    assert first[0] == "CheckpointError" and f"complete checkpoint is {tmp_path}" in first[1] and received == []
    assert second == (first, [], state) and "the disk is full" in state[2]


def unstorable(directory):
    world, manager = keep(directory)
    said = error_of(partial(manager.save, {"state": {1, 2}} if world.is_main else {}, update=1, epoch=0))
    manager.release()
    return said


def test_an_unsavable_value_is_an_error_on_all_ranks(tmp_path):
    first, second = on_all(2, unstorable, tmp_path / "run")
    assert first == second and "sorted(x)" in first[1]


def one_fails_alone(directory):
    """The second process ends in an error of its own: the first waits for its saves without it."""
    world, manager = keep(directory)
    save(manager, 1)
    save(manager, 2)
    whole = [one.update for one in manager.completed(wait=True, alone=True)]
    manager.release()
    return whole, updates(directory) if world.is_main else []


def test_a_call_alone_makes_no_collective(tmp_path):
    assert on_all(2, one_fails_alone, tmp_path / "run") == [([1, 2], [1, 2]), ([], [])]


# Loading


def resume(directory, where="auto"):
    world = ProcessGroupWorld()
    with warnings.catch_warnings(record=True) as received:
        warnings.simplefilter("always")
        error, loaded = None, None
        try:
            loaded = load_checkpoint(where, directory, run="one", world=world)
        except (CheckpointError, SettingError) as failed:
            error = type(failed).__name__, str(failed)
    found = (
        None if loaded is None else (loaded.path.name, loaded.tree["progress"]["updates"], sorted(loaded.tree["model"]))
    )
    return found, error, [str(one.message) for one in received]


def saved_run(directory, *at):
    manager = Checkpoint(directory, keep=9).bind("one")
    manager.prepare(resuming=False)
    for update in at:
        manager.save(tree_of(nn.Linear(3, 2), update), update=update, epoch=0)
    manager.completed(wait=True)
    manager.release()
    return formats.list_checkpoints(directory)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_read_the_newest_complete_one_and_rank_zero_names_the_damaged(tmp_path, size):
    newest, older = saved_run(tmp_path, 1, 2)
    flip(newest / "state.safetensors")
    first, *others = on_all(size, resume, tmp_path)
    assert first[0][0] == older.name and first[0][1] == 1
    assert len(first[2]) == 1 and newest.name in first[2][0] and "passed over" in first[2][0]
    assert others == [(first[0], None, [])] * (size - 1)


def test_nothing_to_resume_is_none_on_all_ranks(tmp_path):
    assert on_all(2, resume, tmp_path) == [(None, None, [])] * 2


def test_without_a_complete_checkpoint_all_ranks_raise_the_same_error(tmp_path):
    (only,) = saved_run(tmp_path, 1)
    flip(only / "model.safetensors")
    (_, first, received), (_, second, silent) = on_all(2, resume, tmp_path)
    assert first == second and "holds no complete checkpoint" in first[1]
    assert len(received) == 1 and silent == []


def test_a_path_that_is_missing_is_the_same_error_on_all(tmp_path):
    saved_run(tmp_path, 1)
    (_, first, _), (_, second, _) = on_all(2, resume, tmp_path, tmp_path / "update-7")
    assert first == second and "does not exist" in first[1]


def reading_that_fails_on_the_second(directory):
    world = ProcessGroupWorld()
    read, newest = load.read_manifest, formats.list_checkpoints(directory)[0]

    def refuses(path):
        if path == newest and threading.current_thread() is threading.main_thread():
            raise CheckpointError(f"checkpoint {path} cannot be read: Input/output error")
        return read(path)

    if world.rank == 1:
        load.read_manifest = refuses
    try:
        return resume(directory)
    finally:
        load.read_manifest = read


def test_a_checkpoint_that_any_rank_cannot_read_is_passed_over_by_all(tmp_path):
    saved_run(tmp_path, 1, 2)
    first, second = on_all(2, reading_that_fails_on_the_second, tmp_path)
    assert first[0] == second[0] and first[0][0] == formats.update_name(1)
    assert "Input/output error" in first[2][0] and "read by rank 1 on " in first[2][0]


def resume_on_own_drive(directory):
    """As on two machines: one name, two drives."""
    world, read, read_manifest = ProcessGroupWorld(), load.load_tree, load.read_manifest
    own = directory.with_name(f"drive{world.rank}")
    load.load_tree = lambda path, **given: read(own / path.name, **given)
    load.read_manifest = lambda path: read_manifest(own / path.name)
    try:
        return resume(directory)
    finally:
        load.load_tree, load.read_manifest = read, read_manifest


def test_another_run_of_the_same_name_on_a_local_drive_is_detected(tmp_path):
    for name in ("drive0", "drive1"):
        saved_run(tmp_path / name, 1)
    shutil.copytree(tmp_path / "drive0", tmp_path / "drive")
    (_, first, _), (_, second, _) = on_all(2, resume_on_own_drive, tmp_path / "drive")
    assert first == second and "rank 1 on " in first[1] and "a directory that all ranks share" in first[1]


def resume_and_go_on(directory):
    world, manager = keep(directory, resuming=True, keep=2)
    loaded = load_checkpoint("auto", directory, run=manager.run_id, world=world)
    manager.adopt(loaded)
    before = reported(manager)
    save(manager, 3)
    manager.completed(wait=True)
    said = before, reported(manager)
    manager.release()
    return said


def test_a_resumed_run_knows_its_earlier_checkpoints_on_every_rank(tmp_path):
    saved_run(tmp_path, 1, 2)
    first, second = on_all(2, resume_and_go_on, tmp_path)
    assert first == second
    assert first[0][0] == [formats.update_name(2), formats.update_name(1)] and first[0][3] == "one"
    assert first[1][0] == [formats.update_name(3), formats.update_name(2)]
