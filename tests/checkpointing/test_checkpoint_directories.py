"""The checkpoint slot: whose directory it is, and which checkpoint a resume means."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
from checkpoints import Tied, find_checkpoint, save, updates

from trainwright.checkpointing import files
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.load import latest_checkpoint, load_checkpoint, load_weights
from trainwright.core.errors import CheckpointError, SettingError


def test_a_directory_of_another_run_is_refused_with_both_fixes(start, tmp_path):
    manager = start()
    save(manager, 5)
    manager.release()
    with pytest.raises(CheckpointError) as caught:
        start(run_id="two")
    text = str(caught.value)
    assert "holds another run" in text and "update-0000000005" in text
    assert 'fit(..., resume="auto")' in text and f'Checkpoint("{tmp_path}/run-2"' in text
    start(run_id="one")  # a further stage of the same run; the refusal did not keep the lock


def test_a_directory_with_a_damaged_checkpoint_is_not_started_over(start, tmp_path):
    manager = start()
    (save(manager, 5).path / "manifest.json").write_text("{}")
    manager.release()
    with pytest.raises(CheckpointError, match="another run"):
        start(run_id="two")
    with (
        pytest.warns(UserWarning, match="manifest"),
        pytest.raises(CheckpointError, match=r"no complete checkpoint\n.*update-0000000005"),
    ):
        find_checkpoint("auto", tmp_path / "run")


def test_an_older_checkpoint_is_not_resumed_among_later_ones(start, tmp_path):
    manager = start()
    for update in (1, 2, 3):
        save(manager, update)
    manager.release()
    older = tmp_path / "run" / "update-0000000001"
    loaded = load_checkpoint(older, None)
    with pytest.raises(CheckpointError, match="update-0000000002, update-0000000003"):
        start(resuming=True, run_id="two").adopt(loaded)
    elsewhere = start("elsewhere", run_id="two", resuming=True, best="val_loss")
    elsewhere.adopt(loaded)
    elsewhere.load_state_dict({"best": "val_loss", "mode": "min", "top": [{"value": 1.0, "epoch": 0, "update": 1}]})
    assert elsewhere.run_id == "one" and elsewhere.best.path == older
    save(elsewhere, 2, val_loss=3.0)
    assert updates(tmp_path / "run") == [1, 2, 3]


def test_a_run_is_not_resumed_into_the_directory_of_another(start, tmp_path):
    manager = start()
    path = save(manager, 1).path
    other = start("other", run_id="other")
    save(other, 9)
    with pytest.raises(CheckpointError, match="holds another run"):
        other.adopt(load_checkpoint(path, None))


def test_runs_in_one_directory_are_distinguished_by_their_id(start, tmp_path):
    save(start(), 1)
    save(start("other", run_id="other"), 9)
    shutil.copytree(tmp_path / "other" / "update-0000000009", tmp_path / "run" / "update-0000000009")
    with pytest.raises(CheckpointError, match=r"several runs\n.*one, other"):
        latest_checkpoint(tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run", run="one").name == "update-0000000001"
    assert find_checkpoint("auto", tmp_path / "run", run="other").name == "update-0000000009"


def test_resume_takes_auto_a_run_or_a_checkpoint(start, tmp_path):
    manager = start()
    one, two = save(manager, 1).path, save(manager, 2).path
    run = tmp_path / "run"
    assert find_checkpoint("auto", run) == find_checkpoint(run, None) == find_checkpoint(str(two), run) == two
    assert find_checkpoint(one, run) == one
    assert find_checkpoint("auto", tmp_path / "nothing") is None and latest_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="update-0000000002, update-0000000001"):
        find_checkpoint(run / "update-0000000003", run)
    with pytest.raises(CheckpointError, match=r"does not exist\n.* has run"):
        find_checkpoint(tmp_path / "rnu", run)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint at all"):
        find_checkpoint(tmp_path / "empty", run)
    with pytest.raises(SettingError, match="without a checkpoint slot"):
        find_checkpoint("auto", None)
    (tmp_path / "latest").symlink_to(one)
    assert find_checkpoint(tmp_path / "latest", None) == one


@pytest.mark.parametrize("look", [latest_checkpoint, load_weights, partial(load_weights, which="last")])
@pytest.mark.parametrize("nth", range(1, 7))
def test_a_reader_of_a_live_run_finds_a_complete_checkpoint(look, nth, start, tmp_path, monkeypatch):
    manager, opened, open_file = start(keep=1, best="loss"), [], files.open_file
    save(manager, 5, loss=2.0)

    def slow(path, **given):
        opened.append(path)
        if len(opened) == nth:
            save(manager, 6, loss=1.0)  # 5 is removed
        return open_file(path, **given)

    for module in (files, formats):
        monkeypatch.setattr(module, "open_file", slow)
    found = look(tmp_path / "run")
    assert updates(tmp_path / "run") == ([6] if len(opened) >= nth else [5])
    assert len(found) == len(Tied().state_dict()) if isinstance(found, dict) else found.is_dir()
