"""An address such as "s3://bucket/run" is refused wherever a path is taken, with the line that mirrors a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refusals import entry, make, network, pieces

from trainwright import (
    Checkpoint,
    Journal,
    OneCycle,
    SettingError,
    TensorBoardLogger,
    latest_checkpoint,
    load_weights,
    save_weights,
)
from trainwright.observers import CSVLogger, Profile, WandbLogger, journal_to_csv, read_journal

WRITES = {
    "Checkpoint": Checkpoint,
    "Journal": Journal,
    "TensorBoard": TensorBoardLogger,
    "CSV": CSVLogger,
    "W&B": lambda path: WandbLogger("digits", directory=path),
    "Profile": Profile,
    "save_weights": lambda path: save_weights(path, network().state_dict()),
    "trainer.save_weights": lambda path: make().save_weights(path),
    "journal_to_csv": lambda path: journal_to_csv("journal.jsonl", path),
    "plot": lambda path: OneCycle(0.1).plot(updates=10, path=path),
}
READS = {
    "load_weights": load_weights,
    "latest_checkpoint": latest_checkpoint,
    "read_journal": read_journal,
    "resume": lambda path: make().fit(pieces(), epochs=1, resume=path),
    "resume with a slot": lambda path: make(checkpoint=Checkpoint("runs/1")).fit(pieces(), epochs=1, resume=path),
}


@pytest.mark.parametrize("name", [*WRITES, *READS])
@pytest.mark.parametrize("given", ["s3://bucket/run.png", "dbfs:/run.png", Path("gs://bucket/run.png")])
def test_an_address_is_refused_and_nothing_is_written(name, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="an address, not a path of this machine's file system") as caught:
        (WRITES | READS)[name](given)
    text = str(caught.value)
    assert str(given).partition(":")[0] + "://" in text.splitlines()[0]
    assert "runs/run.png" in entry(text, "fix") and entry(text, "where").startswith("test_addresses.py:")
    assert list(tmp_path.iterdir()) == []


def fix_of(call, given):
    with pytest.raises(SettingError) as caught:
        call(given)
    return entry(str(caught.value), "fix")


def test_the_fix_mirrors_the_directory_that_is_written():
    fix = fix_of(Checkpoint, "s3://bucket/1")
    assert fix == 'Checkpoint("runs/1"), and every few minutes beside it: aws s3 sync runs/1 s3://bucket/1'
    assert "gcloud storage rsync --recursive runs/1 gs://b/1" in fix_of(Checkpoint, "gs://b/1/")
    assert "copy runs/1 to hdfs://host/1" in fix_of(Checkpoint, "hdfs://host/1")


def test_the_fix_of_a_file_copies_a_file():
    fix = fix_of(Journal, "s3://bucket/run.jsonl")
    assert fix == 'Journal("runs/run.jsonl"), and every few minutes beside it: ' + (
        "aws s3 cp runs/run.jsonl s3://bucket/run.jsonl"
    )


def test_the_fix_of_what_is_read_copies_it_first():
    fix = fix_of(load_weights, "s3://bucket/1")
    assert fix == 'aws s3 sync s3://bucket/1 runs/1, then load_weights("runs/1", ...)'
    assert fix_of(load_weights, "https://host/w.safetensors").startswith("curl --location --output runs/w.safetensors ")


def test_a_file_of_weights_is_copied_as_a_file_and_no_download_is_an_upload():
    fix = fix_of(load_weights, "s3://bucket/w.safetensors")
    assert fix == 'aws s3 cp s3://bucket/w.safetensors runs/w.safetensors, then load_weights("runs/w.safetensors", ...)'
    assert fix_of(Checkpoint, "https://host/1").endswith("every few minutes beside it: copy runs/1 to https://host/1")


def test_a_file_address_names_the_path_in_it(tmp_path):
    assert fix_of(Checkpoint, f"file://{tmp_path}") == f'Checkpoint("{tmp_path}")'


@pytest.mark.parametrize("given", ["runs/a:b", "./s3:/run", "12:30/run", "C:/runs/1", "~/runs"])
def test_paths_with_a_colon_are_paths(given):
    assert Checkpoint(given).directory == given


def test_a_path_in_the_home_directory_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make(observers=[Journal("~/journal.jsonl")]).fit(pieces(), epochs=1)
    assert (tmp_path / "journal.jsonl").exists()
    save_weights("~/w.safetensors", {"w": torch.ones(2)})
    assert (tmp_path / "w.safetensors").exists()
