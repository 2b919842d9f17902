"""A checkpoint that cannot be decoded or loaded does not count, even where every checksum in it is right."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

from trainwright import (
    Checkpoint,
    CheckpointError,
    Trainer,
    Updates,
    batches,
    latest_checkpoint,
    load_weights,
)
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.files import write_file

generator = torch.Generator().manual_seed(1)
x, y = torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)


def trained(directory, *, epochs, resume="auto", keep=3, kind=Trainer, **slots):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    checkpoint = Checkpoint(directory, every=Updates(2), keep=keep)
    trainer = kind(
        model, torch.optim.Adam(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), checkpoint=checkpoint, **slots
    )
    with redirect_stdout(io.StringIO()):
        trainer.fit(batches((x, y), 4, shuffle=True, seed=2), epochs=epochs, resume=resume)
    return trainer


def rewrite(path, change):
    """Change the files of a checkpoint, a dict of name to bytes, and make every size and checksum right again."""
    manifest = json.loads((path / formats.MANIFEST).read_bytes())
    del manifest["crc32"]
    files = {name: (path / name).read_bytes() for name in manifest["files"]}
    change(files, manifest)
    shutil.rmtree(path)
    path.mkdir()
    entries = {name: write_file(path / name, data) for name, data in files.items()}
    if isinstance(listed := manifest.get("files"), dict):  # a change may have put anything in its place
        manifest["files"] = {name: entries.get(name, entry) for name, entry in listed.items()}
    body = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    (path / formats.MANIFEST).write_bytes(body + formats.seal(body, "crc32"))


def edit(change):
    """A change of the plain data in state.json."""

    def apply(files, manifest):
        state = json.loads(files["state.json"])
        change(state)
        files["state.json"] = json.dumps(state).encode()

    return apply


def put(name, data):
    return lambda files, manifest: files.__setitem__(name, data)


UNREADABLE = {
    "an unknown node": edit(lambda state: state.update(state={"$later": 1})),
    "no JSON": put("state.json", b"{"),
    "a tensor that is not there": edit(lambda state: state.update(state={"x": {"$tensor": "nowhere"}})),
    "no safetensors": put("model.safetensors", b"\2\0\0\0\0\0\0\0[]"),
    "metadata": put("model.safetensors", b"\x22\0\0\0\0\0\0\0" + b'{"__metadata__": {"trainwright.tied": ""}}'[:34]),
}


@pytest.fixture
def run(tmp_path):
    """A run of two epochs, with checkpoints at updates 4, 6 and 8, and the weights that three epochs end with."""
    whole = trained(tmp_path / "whole", epochs=3).model.state_dict()
    trained(tmp_path / "run", epochs=2)
    return tmp_path / "run", whole


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_newest_checkpoint_that_cannot_be_decoded_is_passed_over_and_the_run_goes_on_from_the_older_one(kind, run):
    directory, whole = run
    rewrite(directory / formats.update_name(8), UNREADABLE[kind])
    formats.verify(directory / formats.update_name(8))  # every sum is right
    with pytest.warns(UserWarning, match="passed over"):
        assert latest_checkpoint(directory) == directory / formats.update_name(6)
    with pytest.warns(UserWarning, match="passed over"):
        load_weights(directory, which="last")
    with pytest.warns(UserWarning, match="passed over for an older checkpoint"):
        resumed = trained(directory, epochs=3)
    assert resumed.progress.updates == 12
    for name, value in whole.items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert [path.name for path in formats.list_checkpoints(directory)] == [formats.update_name(n) for n in (12, 10, 8)]


def test_one_that_cannot_be_decoded_does_not_count_among_those_that_are_kept(run):
    directory, _ = run
    rewrite(directory / formats.update_name(6), UNREADABLE["an unknown node"])
    rewrite(directory / formats.update_name(8), UNREADABLE["an unknown node"])
    with pytest.warns(UserWarning, match="passed over"):
        trained(directory, epochs=2, keep=2, resume="auto")
    # 4 was resumed, 6 and 8 are written anew; 2 and 4 would be kept as well if what cannot be read counted as kept
    assert [path.name for path in formats.list_checkpoints(directory)] == [formats.update_name(n) for n in (8, 6)]


def test_an_older_checkpoint_is_resumed_by_its_path_where_the_newer_one_cannot_be_read(run):
    directory, whole = run
    rewrite(directory / formats.update_name(8), UNREADABLE["an unknown node"])
    resumed = trained(directory, epochs=3, resume=directory / formats.update_name(6))
    for name, value in whole.items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_where_none_can_be_decoded_the_run_is_refused_with_every_reason(run):
    directory, _ = run
    for path in formats.list_checkpoints(directory):
        rewrite(path, UNREADABLE["an unknown node"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="no complete checkpoint") as refused:
            trained(directory, epochs=3)
    assert str(refused.value).count("'$later'") == 3


# Edited by hand, with every checksum made right again


def at(*way, value):
    """Put a value in one place of state.json."""

    def change(state):
        *rest, last = way
        for step in rest:
            state = state[step]
        state[last] = value

    return edit(change)


def in_manifest(**fields):
    return lambda files, manifest: manifest.update(fields)


def renamed_file(name):
    def change(files, manifest):
        manifest["files"][name] = manifest["files"].pop("state.safetensors")

    return change


EDITED = {
    "a negative counter": (at("progress", "counters", "updates", value=-4), "'updates' is -4"),
    "an absurd epoch": (at("progress", "counters", "epoch", value=10**12), "epochs and .* cannot be of"),
    "an absurd batch": (at("progress", "counters", "batch", value=10**12), "cannot be of"),
    "a counter that is a text": (at("progress", "counters", "rows", value="8"), "'rows' is a str"),
    "counters of another update": (
        at("progress", "counters", "updates", value=7),
        "counters are at update 7 .* manifest",
    ),
    "a history of texts": (at("progress", "history", value=["x"]), "'history' is a list"),
    "no counters": (edit(lambda state: state["progress"].pop("counters")), "'counters' is missing"),
    "no progress": (edit(lambda state: state.pop("progress")), "part 'progress' it is a NoneType"),
    "random numbers that are none": (at("random", "now", value={}), "'now' is a dict"),
    "sums that are texts": (at("totals", "sums", value={"loss": "x"}), "'sums' is a dict"),
    "a moment that is a text": (at("optimizer", "state", "$dict", 0, 1, "exp_avg", value="x"), "'exp_avg' of a param"),
    "fingerprint of the data that are a text": (
        at("data", "fingerprint", value="x"),
        "part 'data'.* 'fingerprint' is a str",
    ),
    "fingerprint of the data that are a list": (
        at("data", "fingerprint", value=[]),
        "part 'data'.* 'fingerprint' is a list",
    ),
    "more finished epochs than memory holds": (
        at("progress", "epochs", 0, 0, value=10**15),
        "part 'progress' .* 'epochs' lists more epochs than were counted",
    ),
    "a negative rate": (at("optimizer", "param_groups", 0, "lr", value=-1.0), "'lr' is -1.0"),
    "a manifest of another update": (in_manifest(update=-1), "'update' is -1"),
    "a number no float can hold": (in_manifest(metrics={"loss": 10**400}), "metrics"),
    "a run of control characters": (in_manifest(run="\x1b[2J"), "'run' is a str"),
    "a name that no file system takes": (renamed_file("\ud800"), "no plain name"),
    "a name that leaves the directory": (renamed_file("../../x"), "no plain name"),
    "a manifest over 1 MiB": (in_manifest(versions={"x": "y" * (1 << 20)}), "1048576 at most"),
    "a header larger than its tensors": (
        put("model.safetensors", (2 << 20).to_bytes(8, "little") + b"{" + b" " * ((2 << 20) - 2) + b"}"),
        "header has 2097152 bytes, for 0 bytes of tensors",
    ),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", EDITED)
def test_an_edited_checkpoint_with_right_sums_is_named_and_the_older_one_is_taken(kind, run):
    directory, whole = run
    change, says = EDITED[kind]
    rewrite(directory / formats.update_name(8), change)
    with pytest.raises(CheckpointError, match=says):
        trained(directory, epochs=3, resume=directory / formats.update_name(8))
    with pytest.warns(UserWarning, match=f"{says}(.|\n)*passed over for an older checkpoint"):
        resumed = trained(directory, epochs=3)
    assert resumed.progress.updates == 12
    for name, value in whole.items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_state_that_no_part_takes_is_an_error_where_begin_epoch_would_run_twice(run):
    class Hooked(Trainer):
        def begin_epoch(self, epoch):
            pass

    directory, _ = run
    rewrite(directory / formats.update_name(8), EDITED["sums that are texts"][0])
    with pytest.raises(CheckpointError, match="part 'totals' cannot be loaded"):
        trained(directory, epochs=3, kind=Hooked)
    rewrite(directory / formats.update_name(8), EDITED["a negative counter"][0])
    with pytest.warns(UserWarning, match="passed over"):
        assert trained(directory, epochs=3, kind=Hooked).progress.updates == 12


def test_weights_of_other_shapes_are_refused_before_the_tensors_are_read(tmp_path):
    size = 1 << 40
    header = json.dumps({"weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "large.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)  # a terabyte of holes
    with pytest.raises(CheckpointError, match=r"weight \(274877906944,\), the model's is \(3, 4\)"):
        load_weights(path, nn.Linear(4, 3))
