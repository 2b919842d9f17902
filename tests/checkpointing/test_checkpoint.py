"""The checkpoint slot: a saved state is restored or refused; the settings and their checks."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoints import NAN, Tied, save, tree_of
from torch import nn

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.format import encode, load_tree, read_manifest
from trainwright.checkpointing.load import load_weights
from trainwright.checkpointing.weights import save_weights
from trainwright.core.errors import CheckpointError, SettingError

# What is written and read


def test_a_saved_tree_comes_back_with_its_manifest(start, tmp_path):
    manager, model = start(best="val_loss"), Tied()
    tree = tree_of(model, 7)
    manager.save(tree, update=7, epoch=2, metrics={"val_loss": NAN, "acc": np.float32(0.5)})
    (saved,) = manager.completed(wait=True)
    back, manifest = load_tree(saved.path), read_manifest(saved.path)
    assert saved.path == tmp_path / "run" / "update-0000000007" and saved.update == 7
    assert (manifest["run"], manifest["update"], manifest["epoch"]) == ("one", 7, 2)
    assert (manifest["monitor"], manifest["mode"]) == ("val_loss", "min")
    assert str(manifest["metrics"]) == "{'val_loss': nan, 'acc': 0.5}"
    assert back.keys() == tree.keys() and str(back["progress"]) == str(tree["progress"])
    assert torch.equal(back["state"]["a"], torch.arange(3))
    assert all(torch.equal(back["model"][name], value) for name, value in model.state_dict().items())
    assert back["model"]["head.weight"] is back["model"]["embed.weight"]
    assert isinstance(back["model"], OrderedDict) and back["model"]._metadata == model.state_dict()._metadata


def test_the_weights_are_a_plain_safetensors_file(start):
    path = save(start(), 1).path
    assert sorted(entry.name for entry in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
        "state.safetensors",
    ]
    names = set(Tied().state_dict()) - {"head.weight"}
    assert safetensors.torch.load_file(path / "model.safetensors").keys() == names
    json.loads((path / "state.json").read_text())


def test_a_state_that_cannot_be_saved_is_named_and_nothing_is_left(start, tmp_path):
    manager = start()
    with pytest.raises(CheckpointError, match=r"state\['queue'\]\[1\] is a set.*\n.*\n.*sorted"):
        manager.save({"model": {}, "state": {"queue": [1, {2}]}}, update=1, epoch=0)
    with pytest.raises(CheckpointError, match="queue"):
        manager.reserve({"state": {"queue": {2}}})
    with pytest.raises(CheckpointError, match="queue"):
        encode({"state": {"queue": {2}}})
    assert formats.list_checkpoints(tmp_path / "run") == []


def test_extra_state_of_modules_comes_back(tmp_path):
    class Extra(nn.Module):
        def __init__(self, extra):
            super().__init__()
            self.extra = extra

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    save_weights(tmp_path / "w", nn.Sequential(Extra({"n": (1, NAN)}), nn.Linear(1, 1)).state_dict())
    model = nn.Sequential(Extra(None), nn.Linear(1, 1))
    load_weights(tmp_path / "w", model)
    assert str(model[0].extra) == "{'n': (1, nan)}"
    with pytest.raises(CheckpointError, match="extra state"):
        save_weights(tmp_path / "w", Extra([torch.ones(1)]).state_dict())


def test_a_manifest_that_leaves_a_file_out_is_refused(tmp_path):
    path = commits.commit(
        tmp_path,
        {"state.json": b"{}"},
        manifest={"run": "r", "update": 1, "epoch": 0, "metrics": {}},
    )
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        load_tree(path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load_weights(path)


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"best": "val_accuracy"}, 'mode="max"'),
        ({"best": "val_accuracy", "mode": "maximum"}, 'mode="min" where less is'),
        ({"mode": "maximum"}, 'mode="min" or mode="max"'),
        ({"best": ""}, "want"),
        ({"best": 3}, "want"),
        ({"mode": "max"}, "without best"),
        ({"top": 2}, "without best"),
        ({"restore_best": True}, "without best"),
        ({"best": "loss", "top": 0}, "top=0"),
        ({"keep": 0}, "keep=0"),
        ({"keep": -1}, 'fix   keep="all"'),
        ({"keep": None}, 'fix   keep="all"'),
        ({"keep": "best"}, 'want  "all", or a whole number, at least 1'),
        ({"keep": True}, "keep=True"),
        ({"keep": 2.0}, "keep=2.0"),
        ({"every": 5}, "Updates"),
        ({"every": None}, "Updates"),
        ({"best": "loss", "restore_best": 1}, "restore_best=1"),
        ({"async_save": None}, "async_save=None"),
        ({"on_save_error": "ignore"}, 'on_save_error="warn"'),
        ({"checksum": "md5"}, '"crc32" or "sha256"'),
        ({"checksum": None}, "checksum=None"),
        ({"grace": -1}, "seconds that a signal waits"),
        ({"grace": NAN}, "grace=nan"),
        ({"grace": True}, "grace=True"),
        ({"grace": "20"}, "grace='20'"),
        ({"directory": ""}, "a directory"),
        ({"directory": None}, "a directory"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_given(settings, words):
    with pytest.raises(SettingError) as caught:
        Checkpoint(settings.pop("directory", "runs"), **settings)
    assert words in str(caught.value)


def test_the_directory_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = Checkpoint("runs").bind("one")
    monkeypatch.chdir("/")
    assert manager.directory == tmp_path / "runs" and not manager.directory.exists()
