"""Messages about what is saved and what was given say what is there, not what was there once."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainwright import (
    Checkpoint,
    CheckpointError,
    DataError,
    Trainer,
    Updates,
    batches,
    latest_checkpoint,
    load_weights,
)
from trainwright.checkpointing import format as formats
from trainwright.data import together

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
READY = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 16, 4)]


class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return X[index], Y[index]


class Own(Trainer):
    """Reads batches of two loaders too; fails at an update."""

    fails_at = 0

    def training_step(self, batch):
        if self.progress.updates + 1 == self.fails_at:
            raise ValueError("of the user's own")
        x, y = batch["a"] if isinstance(batch, dict) else batch
        return nn.functional.mse_loss(self.model(x), y)


def made(directory, cls=Own):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    slot = Checkpoint(directory, every=Updates(2))
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=slot, console=False)


# Data of another kind.

DATA = {
    "batches(...)": lambda: batches((X, Y), 4, shuffle=True, seed=1),
    "a DataLoader": lambda: DataLoader(Rows(), 4, shuffle=True),
    "a function of the epoch": lambda: lambda epoch: READY,
    "together(...)": lambda: together(a=DataLoader(Rows(), 4), b=DataLoader(Rows(), 4)),
    "ready batches": lambda: READY,
    "data cut into epochs by a number of updates": lambda: itertools.cycle(READY),
}
ALIKE = {
    "a DataLoader": lambda: DataLoader(TensorDataset(X, Y), 4, shuffle=True),
    "ready batches": lambda: deque(READY),
}


def fit(directory, kind, data, updates):
    cut = {"epoch_updates": 4} if kind.startswith("data cut") else {}
    return made(directory).fit(data, max_updates=updates, resume="auto", **cut)


@pytest.mark.parametrize("saved", DATA)
def test_data_of_another_kind_are_refused_by_their_kinds(tmp_path, saved):
    fit(tmp_path / "run", saved, DATA[saved](), 6)
    for kind, make in DATA.items():
        shutil.copytree(tmp_path / "run", tmp_path / "again", dirs_exist_ok=True)
        if kind == saved:
            continue
        with pytest.raises(DataError) as caught:
            fit(tmp_path / "again", kind, make(), 8)
        lines = str(caught.value).splitlines()
        assert lines[0] == "the data are of another kind than when the state was saved"
        assert lines[1] == f"  have  {kind}" and lines[2].startswith(f"  want  {saved}")
        assert lines[3].endswith("or fit(..., resume_data=False)")
    alike = [DATA[saved], *([ALIKE[saved]] if saved in ALIKE else [])]
    for number, make in enumerate(alike):
        shutil.copytree(tmp_path / "run", tmp_path / f"good{number}")
        assert fit(tmp_path / f"good{number}", saved, make(), 8).updates == 8


def test_a_kind_that_changes_from_epoch_to_epoch_of_a_function_is_named(tmp_path):
    fit(tmp_path, "", lambda epoch: DataLoader(Rows(), 4), 6)
    with pytest.raises(DataError, match=r"have  batches.*\n  want  a DataLoader: rows=16"):
        fit(tmp_path, "", lambda epoch: batches((X, Y), 4), 8)


class Counted:
    """A part of the user's own, whose state has gained a name since it was saved."""

    def __init__(self, *names):
        self.names = names

    def state_dict(self):
        return dict.fromkeys(self.names, 1)

    def load_state_dict(self, tree):
        assert all(tree[name] == 1 for name in self.names)


def test_a_part_whose_saved_state_lacks_an_entry_is_named_with_it(tmp_path):
    class Parted(Own):
        part = Counted("old")

        def parts(self):
            return super().parts() | {"counted": self.part}

    made(tmp_path, cls=Parted).fit(READY, max_updates=4)
    Parted.part = Counted("old", "new")
    with (
        pytest.warns(UserWarning, match="passed over for an older checkpoint"),
        pytest.raises(CheckpointError, match="part 'counted' cannot be loaded: its saved state has no 'new'"),
    ):
        made(tmp_path, cls=Parted).fit(READY, max_updates=8, resume="auto")


# What a resume finds.


@pytest.mark.parametrize("left", ["all", "the older", "none", "of another run"])
def test_the_note_of_a_failed_run_names_a_checkpoint_that_is_there(tmp_path, left):
    if left == "of another run":
        made(tmp_path / "other").fit(READY, max_updates=4)

    class Removed(Own):
        fails_at = 6

        def after_update(self):
            if self.progress.updates != 5:
                return
            self._boundary.checkpoints.report(wait=True)
            newest, older = formats.list_checkpoints(tmp_path / "run")
            for path in {"all": [], "the older": [newest], "none": [newest, older]}.get(left, [newest]):
                shutil.rmtree(path)
            if left == "of another run":
                shutil.copytree(latest_checkpoint(tmp_path / "other"), newest)

    trainer = made(tmp_path / "run", cls=Removed)
    with pytest.raises(ValueError, match="own"):
        trainer.fit(READY, max_updates=8)
    (note,) = trainer.result.notes
    update = {"all": 4, "the older": 2, "of another run": 2}.get(left)
    said = "nothing is saved" if update is None else f'resume="auto") continues from update {update}'
    assert said in note


# Control characters.

EVIL = "\x1b[31m\r\x9b\x7f"


def forge(path, change):
    """Change a manifest and seal it again, as somebody with an editor would."""
    text = (path / formats.MANIFEST).read_bytes()
    manifest = json.loads(text)
    change(manifest)
    seal = [name for name in manifest if name in ("crc32", "sha256")][-1]
    del manifest[seal]
    body = json.dumps(manifest).encode()[:-1]
    (path / formats.MANIFEST).write_bytes(body + formats.seal(body, seal))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(run=f"{EVIL}\n  fix   rm -rf ."),
        lambda manifest: manifest["files"].update({f"a{EVIL}": manifest["files"]["state.json"]}),
        lambda manifest: manifest["files"].update({f"a{EVIL}": 1}),
        lambda manifest: manifest["metrics"].update({EVIL: "x"}),
        lambda manifest: manifest.update(version=EVIL),
        lambda manifest: manifest.update(monitor=EVIL, mode="min"),
    ],
    ids=["run", "file", "entry", "metric", "version", "monitor"],
)
def test_control_characters_of_a_manifest_are_never_printed(tmp_path, change, capfd):
    made(tmp_path).fit(READY, max_updates=4)
    for path in formats.list_checkpoints(tmp_path):
        forge(path, change)
    said = []
    for use in (
        lambda: latest_checkpoint(tmp_path),
        lambda: load_weights(tmp_path),
        lambda: made(tmp_path).fit(READY, max_updates=8),
        lambda: made(tmp_path).fit(READY, max_updates=8, resume="auto"),
        lambda: made(tmp_path).fit(READY, max_updates=8, resume=path),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                use()
            except CheckpointError as error:
                said.append(str(error))
        said += [str(one.message) for one in caught]
    said += capfd.readouterr()
    assert len(said) > 2
    for text in said:
        assert not any(one in text for one in EVIL.replace("[31m", "")), repr(text)
        assert "\n  fix   rm" not in text


def test_control_characters_of_names_in_a_weights_file_are_never_printed(tmp_path):
    from trainwright import save_weights

    save_weights(tmp_path / "w", {f"a{EVIL}": torch.ones(2)})
    with pytest.raises(CheckpointError, match="not used") as caught:
        load_weights(tmp_path / "w", nn.Linear(1, 1))
    assert not any(one in str(caught.value) for one in EVIL.replace("[31m", ""))
