"""The checkpoint slot in the background: a copy of the boundary, nothing lost, training held up as little as can be."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import suppress

import pytest
import torch
from checkpoints import NAN, Tied, begin, save, tree_of, updates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.checkpointing import commits
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.load import latest_checkpoint, load_tree
from trainwright.core.errors import CheckpointError

# The copy


def test_a_checkpoint_holds_the_weights_of_its_boundary_whatever_is_trained_meanwhile(start, slow):
    keeper, model = start(), nn.Linear(50, 50)
    before = model.weight.detach().clone()
    keeper.expect({"model": model.state_dict()})
    keeper.save({"model": model.state_dict(), "progress": {"updates": 3}}, update=3, epoch=0)
    assert slow.begun.wait(10) and keeper.written() == [] and keeper.saved == []
    with torch.no_grad():
        model.weight.zero_()
    slow.through.set()
    (saved,) = keeper.written(wait=True)
    tree, _ = load_tree(saved.path)
    assert torch.equal(tree["model"]["weight"], before) and keeper.saved == [saved.path]
    assert slow.threads[0] is not threading.current_thread()


def test_without_async_save_it_is_written_before_save_returns(start, slow):
    keeper = start(async_save=False)
    slow.through.set()
    begin(keeper, 1)
    assert slow.threads == [threading.current_thread()]
    (saved,) = keeper.written()
    assert keeper.saved == [saved.path] and 0 < saved.seconds <= saved.blocked <= keeper.blocked


def test_the_next_save_waits_until_the_last_is_whole(start, slow):
    keeper = start()
    begin(keeper, 1)
    assert slow.begun.wait(10)
    threading.Timer(0.1, slow.through.set).start()
    begin(keeper, 2)
    assert keeper.saved[-1].name == commits.update_name(1)  # whole before the second was copied
    one, two = keeper.written(wait=True)
    assert (one.update, two.update) == (1, 2) and keeper.written() == []
    assert one.blocked < 0.1 <= two.blocked and two.seconds < 10
    assert keeper.blocked >= one.blocked + two.blocked


def test_the_memory_of_the_copies_is_touched_ahead_and_used_again(start, tmp_path):
    keeper, model = start(), nn.Linear(300, 300)
    tree = {"model": model.state_dict()}
    keeper.expect(tree)
    pointers = set()
    for update in (1, 2, 3):
        keeper.save(tree, update=update, epoch=0)
        keeper.written(wait=True)
        pointers.add(keeper._arena._block.data_ptr())
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert len(pointers) == 1 and state_bytes <= keeper._arena.size <= state_bytes + 1024


def test_a_state_that_has_grown_is_saved_and_has_room_from_then_on(start):
    keeper = start()
    keeper.expect({"model": {}, "state": {"queue": torch.zeros(10)}})
    queue = torch.arange(100_000.0)
    for update in (1, 2):
        keeper.save({"model": {}, "state": {"queue": queue + update}}, update=update, epoch=0)
        (saved,) = keeper.written(wait=True)
        assert torch.equal(load_tree(saved.path)[0]["state"]["queue"], queue + update)
        assert keeper._arena.size >= queue.nbytes


@pytest.mark.slow
def test_nothing_of_the_trees_is_held_when_a_save_is_done(start, refuses):
    keeper = start()
    for number in (0, errno.ENOSPC):
        refuses(number)
        tensor = torch.ones(10)
        seen = weakref.ref(tensor)
        keeper.save({"model": {}, "state": {"a": tensor}}, update=1 + number, epoch=0)
        keeper._background.wait()
        del tensor
        gc.collect()
        assert seen() is None
    with pytest.raises(CheckpointError, match="disk is full"):
        keeper.written(wait=True)


def test_where_there_is_no_memory_for_a_copy_training_waits_and_is_told(start, monkeypatch):
    keeper = start()

    def refuse(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(keeper._arena, "copy", refuse)
    with pytest.warns(UserWarning, match=r"no memory for a copy of the state .*training waits"):
        begin(keeper, 1)
    assert [saved.update for saved in keeper.written()] == [1]


def test_what_cannot_be_saved_is_refused_in_training_and_when_it_is_expected(start, tmp_path):
    keeper = start()
    with pytest.raises(CheckpointError, match="queue"):
        keeper.expect({"state": {"queue": {2}}})
    with pytest.raises(CheckpointError, match="queue"):
        keeper.save({"state": {"queue": {2}}}, update=1, epoch=0)
    assert keeper.written(wait=True) == [] and updates(tmp_path / "run") == []


# What is told


def test_news_come_when_a_checkpoint_is_whole_and_when_it_has_failed(start, refuses):
    keeper, told = start(), threading.Event()
    keeper.news = told.set
    begin(keeper, 1)
    assert told.wait(10) and [saved.update for saved in keeper.written()] == [1]
    told.clear()
    refuses(errno.EIO)
    begin(keeper, 2)
    assert told.wait(10)
    with pytest.warns(UserWarning, match="update-0000000002"):
        assert keeper.written() == []


def test_the_best_has_no_path_until_it_is_whole(start, slow):
    keeper = start(best="val_loss")
    begin(keeper, 5, val_loss=1.0)
    assert keeper.best.update == 5 and keeper.best.path is None
    slow.through.set()
    (saved,) = keeper.written(wait=True)
    assert saved.best and keeper.best.path == saved.path


def test_a_record_tells_size_and_time(start):
    model = nn.Linear(100, 100)
    keeper = start()
    keeper.save({"model": model.state_dict()}, update=1, epoch=0)
    (saved,) = keeper.written(wait=True)
    on_disk = sum(file.stat().st_size for file in saved.path.iterdir())
    assert 4 * 100 * 101 <= saved.size <= on_disk and saved.seconds > 0 and saved.blocked > 0


def test_the_checksum_that_is_asked_for_is_written(start):
    for name, length in (("crc32", 8), ("sha256", 64)):
        manifest = load_tree(save(start(name, checksum=name), 1).path)[1]
        assert all(len(entry[name]) == length for entry in manifest["files"].values())


# Retention


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min", "max"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    saves=st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0, NAN, None]), st.booleans(), st.booleans()), max_size=12
    ),
    top=st.integers(1, 3),
    keep=st.integers(1, 3),
)
def test_the_same_are_kept_in_the_background_as_without(mode, saves, top, keep, tmp_path_factory):
    """Each save: its number, whether the system refuses it, whether `written` is asked after it."""
    kept = []
    commit = commits.commit
    for async_save in (True, False):
        directory, refused = tmp_path_factory.mktemp("run"), set()

        def refusing(root, name, files, *, refused=refused, **fields):
            if name in refused:
                raise CheckpointError(name) from OSError(errno.ENOSPC, "full")
            return commit(root, name, files, **fields)

        keeper = Checkpoint(directory, best="n", mode=mode, top=top, keep=keep, async_save=async_save).bind("one")
        keeper.prepare(resuming=False)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(commits, "commit", refusing)
            for update, (value, refuses, asked) in enumerate(saves, start=1):
                refused |= {commits.update_name(update)} if refuses else set()
                metrics = {} if value is None else {"n": value}
                if metrics:
                    keeper.judge(metrics, epoch=0, update=update)
                keeper.save({"model": {}, "n": update}, update=update, epoch=0, metrics=metrics)
                if asked:
                    keeper.written()
            with suppress(CheckpointError):  # the last save may be one that is refused
                keeper.written(wait=True)
        names = [path.name for path in keeper.saved]
        best = keeper.best and (keeper.best.update, keeper.best.path and keeper.best.path.name)
        assert names == [commits.update_name(update) for update in reversed(updates(directory))]
        kept.append((names, best))
        keeper.release()
        shutil.rmtree(directory)
    assert kept[0] == kept[1]


def test_what_is_judged_while_a_save_is_in_flight_changes_nothing_of_it(start, slow, tmp_path):
    keeper = start(best="val_loss", keep=1)
    slow.through.set()
    save(keeper, 1, val_loss=2.0)
    slow.through.clear()
    begin(keeper, 2)
    keeper.judge({"val_loss": 1.0}, epoch=0, update=3)  # it is not saved yet: the best that is whole must stay
    slow.through.set()
    (saved,) = keeper.written(wait=True)
    assert updates(tmp_path / "run") == [1, 2] and not saved.best


def test_the_best_stays_though_it_was_saved_without_its_number(start, tmp_path):
    keeper = start(best="val_loss", keep=1)
    keeper.judge({"val_loss": 1.0}, epoch=0, update=1)
    for update in (1, 2, 3):
        begin(keeper, update)
    keeper.written(wait=True)
    assert updates(tmp_path / "run") == [1, 3]


def test_a_victim_that_cannot_be_removed_is_told_in_training_and_the_save_is_whole(start, monkeypatch, tmp_path):
    keeper = start(keep=1)
    save(keeper, 1)

    def refuse(_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(commits, "remove", refuse)
    begin(keeper, 2)
    with pytest.warns(UserWarning, match="update-0000000001 is no longer needed and could not be removed"):
        assert [saved.update for saved in keeper.written(wait=True)] == [2]


# Ends


def test_release_waits_for_the_save_in_flight_and_then_unlocks(start, slow, tmp_path):
    keeper = start()
    begin(keeper, 1)
    assert slow.begun.wait(10)
    with pytest.raises(CheckpointError, match="another run"):
        start(resuming=True)
    threading.Timer(0.05, slow.through.set).start()
    keeper.release()
    assert updates(tmp_path / "run") == [1] and [saved.update for saved in keeper.written()] == [1]
    assert keeper._arena.size == 0
    start(resuming=True)


@pytest.mark.parametrize("async_save", [True, False])
def test_release_unlocks_where_nothing_was_saved_and_may_come_twice(async_save, start):
    keeper = start(async_save=async_save)
    keeper.release()
    keeper.release()
    start().expect({"model": {}})


def test_a_second_ctrl_c_gets_through_and_the_thread_unlocks_when_it_is_done(start, slow, tmp_path):
    keeper = start()
    begin(keeper, 1)
    assert slow.begun.wait(10)
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        keeper.release()
    with pytest.raises(CheckpointError, match="another run"):
        start(resuming=True)
    slow.through.set()
    slow.threads[0].join(10)
    start(resuming=True)
    assert updates(tmp_path / "run") == [1]


@pytest.mark.slow
def test_a_process_that_is_killed_while_its_thread_writes_has_lost_nothing_that_was_whole(tmp_path):
    code = f"""
import os, signal, sys, threading
import torch
from trainwright.checkpointing import commits
from trainwright.checkpointing.checkpoint import Checkpoint
keeper = Checkpoint({str(tmp_path)!r}).bind("one")
keeper.prepare(resuming=False)
for update in (1, 2):
    keeper.save({{"model": {{"w": torch.ones(1000)}}}}, update=update, epoch=0)
    keeper.written(wait=True)
inside = threading.Event()
def hang(*_, **__):
    inside.set()
    threading.Event().wait()
commits.sync_directory = hang
keeper.save({{"model": {{"w": torch.ones(1000)}}}}, update=3, epoch=0)
inside.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert latest_checkpoint(tmp_path).name == commits.update_name(2)
    assert any(name.startswith(".tmp") for name in os.listdir(tmp_path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_worker_that_is_forked_while_the_thread_writes_can_end_without_a_trace(start, slow, tmp_path):
    keeper = start()
    begin(keeper, 1)
    assert slow.begun.wait(10)
    pid = os.fork()
    if pid == 0:
        del keeper
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slow.through.set()
    (saved,) = keeper.written(wait=True)
    assert load_tree(saved.path)[1]["update"] == 1
    assert save(keeper, 2).update == 2


def test_a_tied_model_and_its_tree_are_as_they_were_after_a_save(start):
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keeper = start()
    keeper.save(tree_of(model), update=1, epoch=0)
    keeper.written(wait=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.head.weight is model.embed.weight
