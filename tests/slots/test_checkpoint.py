"""The checkpoint slot: what is kept, what is best, what is refused, and weights that come back."""

import json
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from trainwright.base.errors import CheckpointError, SettingError
from trainwright.base.spans import Updates
from trainwright.runtime import storage
from trainwright.slots.checkpoint import (
    Checkpoint,
    encode,
    find_checkpoint,
    latest_checkpoint,
    load_tree,
    load_weights,
    save_weights,
)

NAN, INF = float("nan"), float("inf")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def tree_of(model, update=0):
    return {"model": model.state_dict(), "progress": {"updates": update, 3: (1, NAN)}, "state": {"a": torch.arange(3)}}


@pytest.fixture
def start(tmp_path):
    """A function that makes a prepared keeper; all are released at the end."""
    keepers = []

    def make(name="run", run_id="one", *, resuming=False, **settings):
        keeper = Checkpoint(tmp_path / name, **settings).bind(run_id)
        keepers.append(keeper)
        keeper.prepare(resuming=resuming)
        return keeper

    yield make
    for keeper in keepers:
        keeper.release()


def save(keeper, update, **metrics):
    """Judge and save, as a run does after a validation."""
    if keeper.settings.best in metrics:
        keeper.judge(metrics, epoch=update // 10, update=update)
    return keeper.save(tree_of(Tied(), update), update=update, epoch=update // 10, metrics=metrics)


def updates(directory):
    return sorted(int(path.name.removeprefix("update-")) for path in storage.scan(Path(directory)))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1 if path.suffix == ".safetensors" else len(data) // 2] ^= 16
    path.write_bytes(data)


# What is written and read


def test_a_saved_tree_comes_back_with_its_manifest(start, tmp_path):
    keeper, model = start(best="val_loss"), Tied()
    tree = tree_of(model, 7)
    saved = keeper.save(tree, update=7, epoch=2, metrics={"val_loss": NAN, "acc": np.float32(0.5)})
    back, manifest = load_tree(saved.path)
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
    keeper = start()
    with pytest.raises(CheckpointError, match=r"state\['queue'\]\[1\] is a set.*\n.*\n.*sorted"):
        keeper.save({"model": {}, "state": {"queue": [1, {2}]}}, update=1, epoch=0)
    with pytest.raises(CheckpointError, match="queue"):
        encode({"state": {"queue": {2}}})
    assert storage.scan(tmp_path / "run") == []


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


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "link", "pickle"])
def test_a_damaged_file_is_named_and_the_next_older_checkpoint_is_used(name, damage, start, tmp_path, monkeypatch):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    keeper = start()
    older, newer = save(keeper, 1).path, save(keeper, 2).path
    file = newer / name
    data = file.read_bytes()
    if damage == "flipped":
        flip(file)
    else:
        file.unlink()
    if damage == "link":
        file.symlink_to(older / name)
    elif damage in ("empty", "cut", "pickle"):
        file.write_bytes({"empty": b"", "cut": data[:-1], "pickle": pickle.dumps(Payload())}[damage])
    with pytest.raises(CheckpointError, match=name):
        load_tree(newer)
    with pytest.warns(UserWarning, match=name):
        assert latest_checkpoint(tmp_path / "run") == older
    with pytest.warns(UserWarning, match=name):
        assert find_checkpoint("auto", tmp_path / "run") == older
    with pytest.raises(CheckpointError, match=name):
        find_checkpoint(newer, None)
    if name in ("model.safetensors", "manifest.json"):
        with pytest.raises(CheckpointError, match=name):
            load_weights(newer)
    assert not (tmp_path / "ran").exists()


def test_a_manifest_that_leaves_a_file_out_is_refused(tmp_path):
    path = storage.commit(
        tmp_path,
        storage.update_name(1),
        {"state.json": lambda target: target.write(b"{}")},
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
        ({"best": "val_accuracy", "mode": "maximum"}, 'mode="min" or mode="max"'),
        ({"best": ""}, "want"),
        ({"best": 3}, "want"),
        ({"mode": "max"}, "without best"),
        ({"top": 2}, "without best"),
        ({"restore_best": True}, "without best"),
        ({"best": "loss", "top": 0}, "top=0"),
        ({"keep": 0}, "keep=0"),
        ({"keep": True}, "keep=True"),
        ({"keep": 2.0}, "keep=2.0"),
        ({"every": 5}, "Updates"),
        ({"every": None}, "Updates"),
        ({"best": "loss", "restore_best": 1}, "restore_best=1"),
        ({"directory": ""}, "a directory"),
        ({"directory": None}, "a directory"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_given(settings, words):
    with pytest.raises(SettingError) as caught:
        Checkpoint(settings.pop("directory", "runs"), **settings)
    assert words in str(caught.value)


def test_settings_that_work_are_taken():
    Checkpoint("runs", best="val_loss")
    Checkpoint(Path("runs"), best="acc", mode="max", top=3, keep=1, every=Updates(5), restore_best=True)


def test_the_directory_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keeper = Checkpoint("runs").bind("one")
    monkeypatch.chdir("/")
    assert keeper.directory == tmp_path / "runs" and not keeper.directory.exists()


# Judging


def test_the_best_moves_only_when_it_is_beaten():
    keeper = Checkpoint("runs", best="val_loss").bind("one")
    values = [NAN, INF, 3.0, 3.0, NAN, 4.0, 2.0, -INF, NAN]
    judged = [keeper.judge({"val_loss": value}, epoch=n, update=n * 10) for n, value in enumerate(values)]
    assert judged == [False, False, True, False, False, False, True, True, False]
    assert (keeper.best.name, keeper.best.value, keeper.best.epoch, keeper.best.update) == ("val_loss", -INF, 7, 70)
    assert keeper.best.path is None


def test_more_is_better_with_mode_max_and_the_top_are_counted():
    keeper = Checkpoint("runs", best="acc", mode="max", top=2).bind("one")
    values = [0.1, 0.1, 0.1, 0.3, 0.2, 0.2, NAN, -INF]
    assert [keeper.judge({"acc": v}, epoch=n, update=n) for n, v in enumerate(values)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert (keeper.best.value, keeper.best.update) == (0.3, 3)


def test_nothing_is_judged_without_best():
    keeper = Checkpoint("runs").bind("one")
    assert keeper.judge({"val_loss": 1.0}, epoch=0, update=1) is False and keeper.best is None


def test_a_number_that_is_not_there_is_refused_with_the_nearest():
    keeper = Checkpoint("runs", best="val_acuracy", mode="max").bind("one")
    with pytest.raises(SettingError, match="Did you mean 'val_accuracy'"):
        keeper.judge({"val_loss": 1.0, "val_accuracy": 0.5}, epoch=0, update=1)


def test_the_best_goes_on_after_a_resume(start, tmp_path):
    keeper = start(best="val_loss")
    assert [save(keeper, n, val_loss=v).best for n, v in ((1, 2.0), (2, 1.0), (3, 5.0))] == [True, True, False]
    state = json.loads(json.dumps(keeper.state_dict()))
    keeper.release()
    again = start(run_id="two", resuming=True, best="val_loss")
    path = find_checkpoint("auto", again.directory)
    again.adopt(path, load_tree(path)[1])
    again.load_state_dict(state)
    assert again.run_id == "one" and again.best == keeper.best
    assert again.best.path == tmp_path / "run" / "update-0000000002"
    assert again.saved == keeper.saved
    assert again.judge({"val_loss": 1.5}, epoch=1, update=4) is False


def test_a_best_of_another_number_starts_anew_and_says_so():
    old, new = Checkpoint("a", best="val_loss").bind("one"), Checkpoint("a", best="acc", mode="max").bind("one")
    old.judge({"val_loss": 0.1}, epoch=0, update=1)
    with pytest.warns(UserWarning, match="val_loss"):
        new.load_state_dict(old.state_dict())
    assert new.best is None


# Retention


def test_the_last_and_the_best_are_kept(start, tmp_path):
    keeper = start(best="val_loss", keep=2, top=2)
    values = {1: 5.0, 2: 1.0, 3: NAN, 4: 3.0, 5: 4.0, 6: 9.0, 7: 9.0}
    for update, value in values.items():
        saved = save(keeper, update, val_loss=value)
        assert saved.path.is_dir() and saved.best == (update in (1, 2))
    assert updates(tmp_path / "run") == [2, 4, 6, 7] == sorted(int(p.name[7:]) for p in keeper.saved)
    assert keeper.best.path == tmp_path / "run" / "update-0000000002"
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", *(storage.update_name(n) for n in (2, 4, 6, 7))]


def test_a_nan_is_never_kept_as_the_best(start, tmp_path):
    keeper = start(best="acc", mode="max", keep=1)
    for update, value in ((1, NAN), (2, -1.0), (3, NAN), (4, NAN)):
        save(keeper, update, acc=value)
    assert updates(tmp_path / "run") == [2, 4]


def test_a_best_that_was_judged_but_not_saved_does_not_cost_the_one_that_was(start, tmp_path):
    keeper = start(best="val_loss", keep=1)
    save(keeper, 1, val_loss=2.0)
    keeper.judge({"val_loss": 1.0}, epoch=0, update=2)
    save(keeper, 3)
    assert updates(tmp_path / "run") == [1, 3] and keeper.best.update == 2 and keeper.best.path is None


def test_nothing_is_removed_before_the_new_one_is_whole(start, tmp_path):
    keeper = start(keep=1)
    save(keeper, 1)
    with pytest.raises(CheckpointError):
        keeper.save({"state": {1, 2}}, update=2, epoch=0)
    assert updates(tmp_path / "run") == [1]
    save(keeper, 2)
    assert updates(tmp_path / "run") == [2]


def test_only_what_the_run_wrote_is_removed(start, tmp_path):
    other = start("other", run_id="other")
    theirs = save(other, 1).path
    keeper = start(keep=1)
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "update-1").mkdir()
    ours = save(keeper, 1).path
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    save(keeper, 2)
    save(keeper, 3)
    assert updates(tmp_path / "run") == [1, 3] and (tmp_path / "run" / "notes").is_dir()
    assert (tmp_path / "run" / "update-1").is_dir()


def test_a_victim_that_cannot_be_read_is_left_with_a_warning(start, tmp_path):
    keeper = start(keep=1)
    path = save(keeper, 1).path
    (path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="update-0000000001 is no longer needed"):
        save(keeper, 2)
    assert updates(tmp_path / "run") == [1, 2]


def test_damaged_checkpoints_do_not_count_as_kept_after_a_resume(start, tmp_path):
    keeper = start(keep=2)
    for update in (1, 2, 3):
        save(keeper, update)
    keeper.release()
    flip(tmp_path / "run" / "update-0000000003" / "model.safetensors")
    again = start(keep=2, resuming=True)
    with pytest.warns(UserWarning, match="checksum"):
        path = find_checkpoint("auto", again.directory)
    again.adopt(path, load_tree(path)[1])
    assert [path.name[-1] for path in again.saved] == ["2"]
    save(again, 4)
    assert updates(tmp_path / "run") == [2, 3, 4]
    again.release()
    (tmp_path / "run" / "update-0000000004" / "manifest.json").unlink()
    last = start(keep=2, resuming=True)
    last.adopt(path, load_tree(path)[1])
    save(last, 4)
    assert [path.name[-1] for path in last.saved] == ["4", "2"]


# Directories and runs


def test_a_directory_of_another_run_is_refused_with_both_cures(start, tmp_path):
    keeper = start()
    save(keeper, 5)
    keeper.release()
    with pytest.raises(CheckpointError) as caught:
        start(run_id="two")
    text = str(caught.value)
    assert "holds another run" in text and "update-0000000005" in text
    assert 'fit(..., resume="auto")' in text and f'Checkpoint("{tmp_path}/run-2"' in text
    start(run_id="one")  # a further stage of the same run; the refusal did not keep the lock


def test_a_directory_with_a_damaged_checkpoint_is_not_started_over(start, tmp_path):
    keeper = start()
    (save(keeper, 5).path / "manifest.json").write_text("{}")
    keeper.release()
    with pytest.raises(CheckpointError, match="another run"):
        start(run_id="two")
    with (
        pytest.warns(UserWarning, match="manifest"),
        pytest.raises(CheckpointError, match=r"no whole checkpoint\n.*update-0000000005"),
    ):
        find_checkpoint("auto", tmp_path / "run")


def test_two_runs_at_once_are_refused(start):
    start()
    with pytest.raises(CheckpointError, match="another run"):
        start()


def test_a_directory_that_cannot_be_written_is_refused_before_training(start, tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        start()


def test_an_older_checkpoint_is_not_resumed_among_later_ones(start, tmp_path):
    keeper = start()
    for update in (1, 2, 3):
        save(keeper, update)
    keeper.release()
    older = tmp_path / "run" / "update-0000000001"
    manifest = load_tree(older)[1]
    with pytest.raises(CheckpointError, match="update-0000000002, update-0000000003"):
        start(resuming=True, run_id="two").adopt(older, manifest)
    elsewhere = start("elsewhere", run_id="two", resuming=True, best="val_loss")
    elsewhere.adopt(older, manifest)
    elsewhere.load_state_dict({"best": "val_loss", "mode": "min", "top": [{"value": 1.0, "epoch": 0, "update": 1}]})
    assert elsewhere.run_id == "one" and elsewhere.best.path == older
    save(elsewhere, 2, val_loss=3.0)
    assert updates(tmp_path / "run") == [1, 2, 3]


def test_a_run_is_not_resumed_into_the_directory_of_another(start, tmp_path):
    keeper = start()
    path = save(keeper, 1).path
    other = start("other", run_id="other")
    save(other, 9)
    with pytest.raises(CheckpointError, match="holds another run"):
        other.adopt(path, load_tree(path)[1])


def test_a_directory_of_several_runs_is_told_apart_by_the_id(start, tmp_path):
    save(start(), 1)
    save(start("other", run_id="other"), 9)
    shutil.copytree(tmp_path / "other" / "update-0000000009", tmp_path / "run" / "update-0000000009")
    with pytest.raises(CheckpointError, match=r"several runs\n.*one, other"):
        latest_checkpoint(tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run", run="one").name == "update-0000000001"
    assert find_checkpoint("auto", tmp_path / "run", run="other").name == "update-0000000009"


def test_what_resume_means(start, tmp_path):
    keeper = start()
    one, two = save(keeper, 1).path, save(keeper, 2).path
    run = tmp_path / "run"
    assert find_checkpoint(None, run) is None
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


# Weights


def test_saved_weights_come_back_into_a_model_tied_ones_too(tmp_path):
    one, other = Tied(), Tied()
    save_weights(tmp_path / "deep" / "w.safetensors", one.state_dict())
    weights = load_weights(tmp_path / "deep" / "w.safetensors", other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert other.head.weight is other.embed.weight and weights.keys() == one.state_dict().keys()
    assert (tmp_path / "deep" / "w.safetensors").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "deep") == ["w.safetensors"]


def test_files_of_the_safetensors_package_are_loaded_into_tied_models(tmp_path):
    one, other = Tied(), Tied()
    safetensors.torch.save_model(one, str(tmp_path / "w"))
    load_weights(tmp_path / "w", other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    untied = one.state_dict() | {"head.weight": torch.zeros(5, 4)}
    save_weights(tmp_path / "w", untied)
    with pytest.raises(CheckpointError, match=r"tied +embed\.weight and head\.weight"):
        load_weights(tmp_path / "w", other)


def test_overlapping_tensors_and_other_layouts_keep_their_values(tmp_path):
    flat = torch.arange(12.0)
    state = {"flat": flat, "part": flat[:6].view(2, 3), "turned": flat.view(3, 4).t(), "half": flat.to(torch.bfloat16)}
    state |= {"empty": torch.empty(0), "also_empty": torch.empty(0), "none": torch.tensor(3)}
    save_weights(tmp_path / "w", state)
    back = safetensors.torch.load_file(tmp_path / "w")
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    for value in (torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.complex128), torch.empty(1, device="meta")):
        with pytest.raises(CheckpointError, match=r"model\['x'\]"):
            save_weights(tmp_path / "w", {"x": value})


def test_what_does_not_fit_a_model_is_named_and_nothing_is_loaded(tmp_path):
    state = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    state["2.weight"] = state.pop("1.weight")
    save_weights(tmp_path / "w", state)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 2))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path / "w", model)
    text = str(caught.value)
    assert "missing  1.weight" in text and "not used 2.weight" in text
    assert "0.weight (4, 3), the model's is (5, 3), 0.bias (4,), the model's is (5,)" in text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_best_or_the_last_weights_of_a_run_are_loaded(start, tmp_path):
    keeper = start(best="acc", mode="max")
    models = {update: Tied() for update in (1, 2, 3)}
    for update, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
        keeper.save(tree_of(models[update]), update=update, epoch=0, metrics={"acc": value})
    for which, update in (("best", 2), ("last", 3)):
        weights = load_weights(tmp_path / "run", which=which)
        assert torch.equal(weights["embed.weight"], models[update].embed.weight)
    model = Tied()
    load_weights(tmp_path / "run" / "update-0000000001", model)
    assert torch.equal(model.head.weight, models[1].head.weight)
    flip(tmp_path / "run" / "update-0000000002" / "model.safetensors")
    with pytest.warns(UserWarning, match="the next best is taken"):
        weights = load_weights(tmp_path / "run")
    assert torch.equal(weights["embed.weight"], models[3].embed.weight)


def test_without_a_best_the_last_is_taken_and_said(start, tmp_path):
    keeper = start()
    save(keeper, 1)
    save(keeper, 2, loss=NAN)
    with pytest.warns(UserWarning, match="update-0000000002, is taken for the best"):
        load_weights(tmp_path / "run")


def test_what_is_no_weights_file_is_refused_and_never_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"w": Payload()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt is no whole safetensors file"):
        load_weights(tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"does not exist\n.*w\.pt"):
        load_weights(tmp_path / "w")
    with pytest.raises(SettingError, match='"best" or "last"'):
        load_weights(tmp_path / "w.pt", which="newest")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_weights(tmp_path / "empty")
