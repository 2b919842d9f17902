"""The checkpoint slot in the background: a copy of the boundary, nothing lost, training waits as little as possible."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from checkpoints import Tied, begin, save, tree_of, updates
from torch import nn

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.format import load_tree, read_manifest
from trainwright.checkpointing.load import latest_checkpoint
from trainwright.core.errors import CheckpointError

# The copy


def test_a_checkpoint_holds_the_weights_of_its_boundary_while_training_continues(start, slow):
    manager, model = start(), nn.Linear(50, 50)
    before = model.weight.detach().clone()
    manager.reserve({"model": model.state_dict()})
    manager.save({"model": model.state_dict(), "progress": {"updates": 3}}, update=3, epoch=0)
    assert slow.begun.wait(10) and manager.completed() == [] and manager.saved == []
    with torch.no_grad():
        model.weight.zero_()
    slow.through.set()
    (saved,) = manager.completed(wait=True)
    tree = load_tree(saved.path)
    assert torch.equal(tree["model"]["weight"], before) and manager.saved == [saved.path]
    assert slow.threads[0] is not threading.current_thread()


def test_without_async_save_it_is_written_before_save_returns(start, slow):
    manager = start(async_save=False)
    slow.through.set()
    begin(manager, 1)
    assert slow.threads == [threading.current_thread()]
    (saved,) = manager.completed()
    assert manager.saved == [saved.path] and 0 < saved.seconds <= saved.blocked <= manager.blocked


def test_the_next_save_waits_until_the_last_is_complete(start, slow):
    manager = start()
    begin(manager, 1)
    assert slow.begun.wait(10)
    threading.Timer(0.1, slow.through.set).start()
    begin(manager, 2)
    assert manager.saved[-1].name == formats.update_name(1)  # whole before the second was copied
    one, two = manager.completed(wait=True)
    assert (one.update, two.update) == (1, 2) and manager.completed() == []
    assert one.blocked < 0.05 < two.blocked and two.seconds < 10
    assert manager.blocked >= one.blocked + two.blocked


def test_the_memory_of_the_copies_is_touched_ahead_and_used_again(start, tmp_path):
    manager, model = start(), nn.Linear(300, 300)
    tree = {"model": model.state_dict()}
    manager.reserve(tree)
    pointers = set()
    for update in (1, 2, 3):
        manager.save(tree, update=update, epoch=0)
        manager.completed(wait=True)
        pointers.add(manager._writer.memory._block.data_ptr())
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert len(pointers) == 1 and state_bytes <= manager._writer.memory.size <= state_bytes + 1024


def test_a_grown_state_is_saved_and_its_memory_reserved(start):
    manager = start()
    manager.reserve({"model": {}, "state": {"queue": torch.zeros(10)}})
    queue = torch.arange(100_000.0)
    for update in (1, 2):
        manager.save({"model": {}, "state": {"queue": queue + update}}, update=update, epoch=0)
        (saved,) = manager.completed(wait=True)
        assert torch.equal(load_tree(saved.path)["state"]["queue"], queue + update)
        assert manager._writer.memory.size >= queue.nbytes


def test_without_memory_for_a_copy_training_waits_with_a_warning(start, monkeypatch):
    manager = start()

    def refuse(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(manager._writer.memory, "copy", refuse)
    with pytest.warns(UserWarning, match=r"no memory for a copy of the state .*training waits"):
        begin(manager, 1)
    assert [saved.update for saved in manager.completed()] == [1]


# What is reported


def test_results_are_announced_when_a_checkpoint_is_complete_and_when_it_has_failed(start, refuses):
    manager, reported = start(), threading.Event()
    manager.on_result = reported.set
    begin(manager, 1)
    assert reported.wait(10) and [saved.update for saved in manager.completed()] == [1]
    reported.clear()
    refuses(errno.EIO)
    begin(manager, 2)
    assert reported.wait(10)
    with pytest.warns(UserWarning, match="update-0000000002"):
        assert manager.completed() == []


def test_the_best_has_no_path_until_it_is_complete(start, slow):
    manager = start(best="val_loss")
    begin(manager, 5, val_loss=1.0)
    assert manager.best.update == 5 and manager.best.path is None
    slow.through.set()
    (saved,) = manager.completed(wait=True)
    assert saved.best and manager.best.path == saved.path


def test_a_record_has_size_and_time(start):
    model = nn.Linear(100, 100)
    manager = start()
    manager.save({"model": model.state_dict()}, update=1, epoch=0)
    (saved,) = manager.completed(wait=True)
    on_disk = sum(file.stat().st_size for file in saved.path.iterdir())
    assert 4 * 100 * 101 <= saved.size <= on_disk and saved.seconds > 0 and saved.blocked > 0


def test_the_checksum_that_is_asked_for_is_written(start):
    for name, length in (("crc32", 8), ("sha256", 64)):
        manifest = read_manifest(save(start(name, checksum=name), 1).path)
        assert all(len(entry[name]) == length for entry in manifest["files"].values())


# Retention


def test_judging_during_a_save_in_flight_does_not_change_it(start, slow, tmp_path):
    manager = start(best="val_loss", keep=1)
    slow.through.set()
    save(manager, 1, val_loss=2.0)
    slow.through.clear()
    begin(manager, 2)
    manager.judge({"val_loss": 1.0}, epoch=0, update=3)  # it is not saved yet: the best that is whole must stay
    slow.through.set()
    (saved,) = manager.completed(wait=True)
    assert updates(tmp_path / "run") == [1, 2] and not saved.best


def test_the_best_stays_though_it_was_saved_without_its_number(start, tmp_path):
    manager = start(best="val_loss", keep=1)
    manager.judge({"val_loss": 1.0}, epoch=0, update=1)
    for update in (1, 2, 3):
        begin(manager, update)
    manager.completed(wait=True)
    assert updates(tmp_path / "run") == [1, 3]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning_and_the_save_is_complete(start, monkeypatch, tmp_path):
    manager = start(keep=1)
    save(manager, 1)

    def refuse(_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(commits, "remove", refuse)
    begin(manager, 2)
    with pytest.warns(UserWarning, match="update-0000000001 is no longer needed and could not be removed"):
        assert [saved.update for saved in manager.completed(wait=True)] == [2]


# Ends


def test_release_waits_for_the_save_in_flight_and_then_unlocks(start, slow, tmp_path):
    manager = start()
    begin(manager, 1)
    assert slow.begun.wait(10)
    with pytest.raises(CheckpointError, match="another run"):
        start(resuming=True)
    threading.Timer(0.05, slow.through.set).start()
    memory = manager._writer.memory
    manager.release()
    assert updates(tmp_path / "run") == [1] and [saved.update for saved in manager.completed()] == [1]
    assert memory.size == 0
    start(resuming=True)


@pytest.mark.parametrize("async_save", [True, False])
def test_release_unlocks_where_nothing_was_saved_and_may_come_twice(async_save, start):
    manager = start(async_save=async_save)
    manager.release()
    manager.release()
    start().reserve({"model": {}})


def test_a_second_ctrl_c_gets_through_and_the_thread_unlocks_when_it_is_done(start, slow, tmp_path):
    manager = start()
    begin(manager, 1)
    assert slow.begun.wait(10)
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        manager.release()
    with pytest.raises(CheckpointError, match="another run"):
        start(resuming=True)
    slow.through.set()
    slow.threads[0].join(10)
    start(resuming=True)
    assert updates(tmp_path / "run") == [1]


@pytest.mark.slow
def test_a_process_killed_while_its_thread_writes_loses_no_complete_checkpoint(tmp_path):
    code = f"""
import os, signal, sys, threading
import torch
from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.checkpoint import Checkpoint
manager = Checkpoint({str(tmp_path)!r}).bind("one")
manager.prepare(resuming=False)
for update in (1, 2):
    manager.save({{"model": {{"w": torch.ones(1000)}}}}, update=update, epoch=0)
    manager.completed(wait=True)
inside = threading.Event()
def hang(*_, **__):
    inside.set()
    threading.Event().wait()
commits.sync_directory = hang
manager.save({{"model": {{"w": torch.ones(1000)}}}}, update=3, epoch=0)
inside.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert latest_checkpoint(tmp_path).name == formats.update_name(2)
    assert any(name.startswith(".tmp") for name in os.listdir(tmp_path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_worker_that_is_forked_while_the_thread_writes_can_end_without_a_trace(start, slow, tmp_path):
    manager = start()
    begin(manager, 1)
    assert slow.begun.wait(10)
    pid = os.fork()
    if pid == 0:
        del manager
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slow.through.set()
    (saved,) = manager.completed(wait=True)
    assert read_manifest(saved.path)["update"] == 1
    assert save(manager, 2).update == 2


def test_a_tied_model_and_its_tree_are_as_they_were_after_a_save(start):
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    manager = start()
    manager.save(tree_of(model), update=1, epoch=0)
    manager.completed(wait=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.head.weight is model.embed.weight
