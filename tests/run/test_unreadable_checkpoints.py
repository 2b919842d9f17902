"""A checkpoint that cannot be decoded or loaded does not count, even where every checksum in it is right."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, CheckpointError, Trainer, Updates, batches, latest_checkpoint, load_weights
from trainwright.runtime import storage
from trainwright.runtime.files import write_file

generator = torch.Generator().manual_seed(1)
x, y = torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)


def trained(directory, *, epochs, resume="auto", keep=3, **slots):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    checkpoint = Checkpoint(directory, every=Updates(2), keep=keep)
    trainer = Trainer(
        model, torch.optim.Adam(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), checkpoint=checkpoint, **slots
    )
    with redirect_stdout(io.StringIO()):
        trainer.fit(batches((x, y), 4, shuffle=True, seed=2), epochs=epochs, resume=resume)
    return trainer


def rewrite(path, change):
    """Change the files of a checkpoint, a dict of name to bytes, and make every size and checksum right again."""
    manifest = json.loads((path / storage.MANIFEST).read_bytes())
    del manifest["crc32"]
    files = {name: (path / name).read_bytes() for name in manifest["files"]}
    change(files, manifest)
    shutil.rmtree(path)
    path.mkdir()
    entries = {name: write_file(path / name, data) for name, data in files.items()}
    manifest["files"] = {name: entries.get(name, entry) for name, entry in manifest["files"].items()}
    body = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    (path / storage.MANIFEST).write_bytes(body + storage._seal(body, "crc32"))


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
    rewrite(directory / storage.update_name(8), UNREADABLE[kind])
    storage.verify(directory / storage.update_name(8))  # every sum is right
    with pytest.warns(UserWarning, match="passed over"):
        assert latest_checkpoint(directory) == directory / storage.update_name(6)
    with pytest.warns(UserWarning, match="passed over"):
        load_weights(directory, which="last")
    with pytest.warns(UserWarning, match="passed over for an older checkpoint"):
        resumed = trained(directory, epochs=3)
    assert resumed.progress.updates == 12
    for name, value in whole.items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert [path.name for path in storage.scan(directory)] == [storage.update_name(n) for n in (12, 10, 8)]


def test_one_that_cannot_be_decoded_does_not_count_among_those_that_are_kept(run):
    directory, _ = run
    rewrite(directory / storage.update_name(6), UNREADABLE["an unknown node"])
    rewrite(directory / storage.update_name(8), UNREADABLE["an unknown node"])
    with pytest.warns(UserWarning, match="passed over"):
        trained(directory, epochs=2, keep=2, resume="auto")
    # 4 was resumed, 6 and 8 are written anew; 2 and 4 would be kept as well if what cannot be read counted as kept
    assert [path.name for path in storage.scan(directory)] == [storage.update_name(n) for n in (8, 6)]


def test_an_older_checkpoint_is_resumed_by_its_path_where_the_newer_one_cannot_be_read(run):
    directory, whole = run
    rewrite(directory / storage.update_name(8), UNREADABLE["an unknown node"])
    resumed = trained(directory, epochs=3, resume=directory / storage.update_name(6))
    for name, value in whole.items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_where_none_can_be_decoded_the_run_is_refused_with_every_reason(run):
    directory, _ = run
    for path in storage.scan(directory):
        rewrite(path, UNREADABLE["an unknown node"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="no whole checkpoint") as refused:
            trained(directory, epochs=3)
    assert str(refused.value).count("'$later'") == 3
