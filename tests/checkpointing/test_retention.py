"""The checkpoint slot: the best checkpoint, and retention."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from checkpoints import INF, NAN, find_checkpoint, flip, save, updates

from trainwright.checkpointing import format as formats
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.load import load_checkpoint
from trainwright.core.errors import CheckpointError, SettingError

# Judging


def test_the_best_moves_only_when_it_is_beaten():
    manager = Checkpoint("runs", best="val_loss").bind("one")
    values = [NAN, INF, 3.0, 3.0, NAN, 4.0, 2.0, -INF, NAN]
    judged = [manager.judge({"val_loss": value}, epoch=n, update=n * 10) for n, value in enumerate(values)]
    assert judged == [False, False, True, False, False, False, True, True, False]
    assert (manager.best.name, manager.best.value, manager.best.epoch, manager.best.update) == ("val_loss", -INF, 7, 70)
    assert manager.best.path is None


def test_more_is_better_with_mode_max_and_the_top_are_counted():
    manager = Checkpoint("runs", best="acc", mode="max", top=2).bind("one")
    values = [0.1, 0.1, 0.1, 0.3, 0.2, 0.2, NAN, -INF]
    assert [manager.judge({"acc": v}, epoch=n, update=n) for n, v in enumerate(values)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert (manager.best.value, manager.best.update) == (0.3, 3)


def test_nothing_is_judged_without_best():
    manager = Checkpoint("runs").bind("one")
    assert manager.judge({"val_loss": 1.0}, epoch=0, update=1) is False and manager.best is None


def test_a_number_that_is_not_there_is_refused_with_the_nearest():
    manager = Checkpoint("runs", best="val_acuracy", mode="max").bind("one")
    with pytest.raises(SettingError, match="Did you mean 'val_accuracy'"):
        manager.judge({"val_loss": 1.0, "val_accuracy": 0.5}, epoch=0, update=1)


def test_the_best_is_restored_by_a_resume(start, tmp_path):
    manager = start(best="val_loss")
    assert [save(manager, n, val_loss=v).best for n, v in ((1, 2.0), (2, 1.0), (3, 5.0))] == [True, True, False]
    state = json.loads(json.dumps(manager.state_dict()))
    manager.release()
    again = start(run_id="two", resuming=True, best="val_loss")
    path = find_checkpoint("auto", again.directory)
    again.adopt(load_checkpoint(path, None))
    again.load_state_dict(state)
    assert again.run_id == "one" and again.best == manager.best
    assert again.best.path == tmp_path / "run" / "update-0000000002"
    assert again.saved == manager.saved
    assert again.judge({"val_loss": 1.5}, epoch=1, update=4) is False


def test_a_best_of_another_number_is_dropped_with_a_warning():
    old, new = Checkpoint("a", best="val_loss").bind("one"), Checkpoint("a", best="acc", mode="max").bind("one")
    old.judge({"val_loss": 0.1}, epoch=0, update=1)
    with pytest.warns(UserWarning, match="val_loss"):
        new.load_state_dict(old.state_dict())
    assert new.best is None


# Retention


def test_the_last_and_the_best_checkpoints_are_retained(start, tmp_path):
    manager = start(best="val_loss", keep=2, top=2)
    values = {1: 5.0, 2: 1.0, 3: NAN, 4: 3.0, 5: 4.0, 6: 9.0, 7: 9.0}
    for update, value in values.items():
        saved = save(manager, update, val_loss=value)
        assert saved.path.is_dir() and saved.best == (update in (1, 2))
    assert updates(tmp_path / "run") == [2, 4, 6, 7] == sorted(int(p.name[7:]) for p in manager.saved)
    assert manager.best.path == tmp_path / "run" / "update-0000000002"
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", *(formats.update_name(n) for n in (2, 4, 6, 7))]


def test_keep_all_removes_none_also_after_a_resume(start, tmp_path):
    manager = start(best="val_loss", keep="all")
    for update in range(1, 7):
        save(manager, update, val_loss=float(update))
    assert updates(tmp_path / "run") == [1, 2, 3, 4, 5, 6] and manager.best.update == 1
    manager.release()
    again = start(keep="all")
    again.adopt(load_checkpoint("auto", tmp_path / "run"))
    save(again, 7)
    assert updates(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7]


def test_a_nan_is_never_retained_as_the_best(start, tmp_path):
    manager = start(best="acc", mode="max", keep=1)
    for update, value in ((1, NAN), (2, -1.0), (3, NAN), (4, NAN)):
        save(manager, update, acc=value)
    assert updates(tmp_path / "run") == [2, 4]


def test_a_best_that_was_judged_but_not_saved_does_not_cost_the_one_that_was(start, tmp_path):
    manager = start(best="val_loss", keep=1)
    save(manager, 1, val_loss=2.0)
    manager.judge({"val_loss": 1.0}, epoch=0, update=2)
    save(manager, 3)
    assert updates(tmp_path / "run") == [1, 3] and manager.best.update == 2 and manager.best.path is None


def test_nothing_is_removed_before_the_new_one_is_complete(start, tmp_path):
    manager = start(keep=1)
    save(manager, 1)
    with pytest.raises(CheckpointError):
        manager.save({"state": {1, 2}}, update=2, epoch=0)
    assert updates(tmp_path / "run") == [1]
    save(manager, 2)
    assert updates(tmp_path / "run") == [2]


def test_only_what_the_run_wrote_is_removed(start, tmp_path):
    other = start("other", run_id="other")
    theirs = save(other, 1).path
    manager = start(keep=1)
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "update-1").mkdir()
    ours = save(manager, 1).path
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    save(manager, 2)
    save(manager, 3)
    assert updates(tmp_path / "run") == [1, 3] and (tmp_path / "run" / "notes").is_dir()
    assert (tmp_path / "run" / "update-1").is_dir()


def test_an_unreadable_checkpoint_is_not_removed_and_warned_of(start, tmp_path):
    manager = start(keep=1)
    path = save(manager, 1).path
    (path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="update-0000000001 is no longer needed"):
        save(manager, 2)
    assert updates(tmp_path / "run") == [1, 2]


def test_damaged_checkpoints_do_not_count_for_retention_after_a_resume(start, tmp_path):
    manager = start(keep=2)
    for update in (1, 2, 3):
        save(manager, update)
    manager.release()
    flip(tmp_path / "run" / "update-0000000003" / "model.safetensors")
    again = start(keep=2, resuming=True)
    with pytest.warns(UserWarning, match="checksum"):
        path = find_checkpoint("auto", again.directory)
    again.adopt(load_checkpoint(path, None))
    assert [path.name[-1] for path in again.saved] == ["2"]
    save(again, 4)
    assert updates(tmp_path / "run") == [2, 3, 4]
    again.release()
    (tmp_path / "run" / "update-0000000004" / "manifest.json").unlink()
    last = start(keep=2, resuming=True)
    last.adopt(load_checkpoint(path, None))
    save(last, 4)
    assert [path.name[-1] for path in last.saved] == ["4", "2"]
