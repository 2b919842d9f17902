"""The checkpoint slot if a save fails: reported once, completely, and training continues or ends as configured."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest
from checkpoints import begin, save, updates

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.manager import SaveFailure
from trainwright.core.errors import CheckpointError

ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file of this size",
    errno.EROFS: "read-only",
    errno.EACCES: "not allowed",
    errno.EIO: "input/output error",
    errno.ENOENT: "vanished",
    errno.ESTALE: "lost the directory",
    errno.ENAMETOOLONG: "name too long",
}


def updates_path(tmp_path, update):
    return re.escape(str(tmp_path / "run" / formats.update_name(update)))


def whole(manager, update, **metrics):
    """Save and wait; what `written` says."""
    begin(manager, update, **metrics)
    return manager.completed(wait=True)


# What fails


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("async_save", [True, False])
def test_a_refused_save_warns_with_the_reason_and_the_next_save_is_complete(
    number, async_save, start, refuses, tmp_path
):
    manager = start(async_save=async_save)
    save(manager, 1)
    refuses(number)
    for update in (2, 3):
        begin(manager, update)
        manager._writer.wait()
        with pytest.warns(UserWarning, match="could not be written") as caught:
            assert manager.completed() == []
        (text,) = [str(one.message) for one in caught]
        assert ERRORS[number] in text.lower() and formats.update_name(update) in text and str(tmp_path / "run") in text
        assert f"would resume from {tmp_path / 'run' / formats.update_name(1)}" in text and "next save tries" in text
        assert ("number 2 that failed in a row" in text) == (update == 3)
        assert manager.completed() == []  # reported once
    refuses(0)
    assert [saved.update for saved in whole(manager, 4)] == [4]
    assert updates(tmp_path / "run") == [1, 4]
    refuses(number)
    begin(manager, 5)
    with pytest.raises(
        CheckpointError, match=f"; the newest complete checkpoint is {updates_path(tmp_path, 4)}"
    ) as last:
        manager.completed(wait=True)
    assert "in a row" not in str(last.value)


def test_failed_last_saves_are_one_line_after_a_run(start, refuses):
    manager = start()
    assert manager.failing == ""
    whole(manager, 1)
    assert manager.failing == ""
    refuses(errno.ENOSPC)
    for update, count in ((2, "the last save failed"), (3, "2 saves failed, the last for")):
        with pytest.raises(CheckpointError, match="could not be written"):
            whole(manager, update)
        assert manager.failing == f"{count}: the disk is full; the newest complete checkpoint is update-0000000001"
    refuses(0)
    whole(manager, 4)
    assert manager.failing == ""


@pytest.mark.parametrize("replaced", [False, True])
def test_the_newest_checkpoint_of_a_message_exists_and_is_of_this_run(start, refuses, tmp_path, replaced):
    """Somebody removes the newest one, or puts that of another run in its place."""
    manager = start()
    save(manager, 1)
    save(manager, 2)
    newest = tmp_path / "run" / formats.update_name(2)
    shutil.rmtree(newest)
    if replaced:
        other = start("other", "another")
        save(other, 2)
        shutil.copytree(tmp_path / "other" / formats.update_name(2), newest)
    refuses(errno.EIO)
    begin(manager, 3)
    manager._writer.wait()
    with pytest.warns(UserWarning, match="would resume from .*/update-0000000001\n"):
        manager.completed()
    assert manager.failing.endswith("the newest complete checkpoint is update-0000000001")
    shutil.rmtree(tmp_path / "run" / formats.update_name(1))
    begin(manager, 4)
    manager._writer.wait()
    with pytest.warns(UserWarning, match="would have nothing to resume from"):
        manager.completed()
    assert manager.failing.endswith("nothing is saved")


def test_an_error_without_any_checkpoint_says_that_there_is_none(start, refuses):
    manager = start()
    refuses(errno.ENOSPC)
    begin(manager, 1)
    with pytest.raises(CheckpointError, match="; there is no complete checkpoint of this run"):
        manager.completed(wait=True)


def test_a_failure_before_a_complete_later_save_names_that_save(start, refuses):
    manager = start()
    refuses(errno.ENOSPC)
    begin(manager, 1)
    manager._writer.wait()
    refuses(0)
    begin(manager, 2)
    with pytest.warns(UserWarning, match="the disk is full; update-0000000002 is complete meanwhile"):
        assert [saved.update for saved in manager.completed(wait=True)] == [2]


@pytest.mark.parametrize("async_save", [True, False])
def test_with_raise_a_failure_of_the_system_is_an_error_once(async_save, start, refuses, tmp_path):
    manager = start(async_save=async_save, on_save_error="raise")
    refuses(errno.ENOSPC)
    begin(manager, 1)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        manager.completed(wait=True)
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    assert manager.completed(wait=True) == []
    refuses(0)
    assert [saved.update for saved in whole(manager, 2)] == [2]


def test_a_failure_that_is_not_of_the_system_is_always_an_error(start, monkeypatch):
    manager = start()

    def broken(*_, **__):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(commits, "commit", broken)
    begin(manager, 1)
    with pytest.raises(CheckpointError, match="ValueError: a mistake of ours"):
        manager.completed(wait=True)


def test_all_of_several_failures_are_reported_and_complete_saves_are_returned(start, refuses):
    manager = start(on_save_error="raise")
    begin(manager, 1)
    manager._writer.wait()
    refuses(errno.EIO)
    begin(manager, 2)
    begin(manager, 3)
    for update in (2, 3):
        with pytest.raises(CheckpointError, match=formats.update_name(update)):
            manager.completed(wait=True)
    assert [saved.update for saved in manager.completed(wait=True)] == [1]


def test_an_unreported_error_does_not_leave_the_directory_locked(start, refuses):
    manager = start()
    refuses(errno.EIO)
    begin(manager, 1)
    manager.release()
    refuses(0)
    start(resuming=True)


def test_a_vanished_directory_is_made_and_locked_again(start, tmp_path):
    manager = start()
    save(manager, 1)
    shutil.rmtree(tmp_path / "run")
    begin(manager, 2)
    with pytest.warns(UserWarning, match=r"run had vanished.*made anew"):
        (saved,) = manager.completed(wait=True)
    assert updates(tmp_path / "run") == [2] and manager.saved == [saved.path]
    with pytest.raises(CheckpointError, match="another run"):
        start(resuming=True)
    save(manager, 3)
    assert updates(tmp_path / "run") == [2, 3]


def test_a_directory_that_another_run_uses_now_is_not_written_to(start, tmp_path):
    manager = start()
    save(manager, 1)
    shutil.rmtree(tmp_path / "run")
    other = start(run_id="two")
    save(other, 9)
    for words in ("another run", "holds another run"):  # while that one runs, and when it is over
        begin(manager, 2)
        with pytest.raises(CheckpointError, match=words):
            manager.completed(wait=True)
        other.release()
    assert updates(tmp_path / "run") == [9]
    start(run_id="two")


def test_an_unknown_error_number_is_reported_with_the_text_of_the_system():
    text = SaveFailure(1, OSError("something odd"), 1).text(Path("runs"), before=None, ends=False)
    assert "something odd" in text
