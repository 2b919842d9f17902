"""Any damage to a checkpoint is an error that names the file, and the next older complete one is resumed."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import tempfile
import zipfile
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing import files
from trainwright.checkpointing import format as formats
from trainwright.checkpointing import tree as trees
from trainwright.checkpointing.commit import commit
from trainwright.checkpointing.format import encode, load_tree, read_manifest
from trainwright.checkpointing.load import latest_checkpoint, load_checkpoint, load_weights
from trainwright.checkpointing.tensorfile import Contents, write
from trainwright.checkpointing.tree import flatten, loads
from trainwright.core.errors import CheckpointError

FILES = ["model.safetensors", "state.safetensors", "state.json", "manifest.json"]


def tree(update):
    return {
        "model": torch.nn.Linear(3, 2).state_dict() | {"scale": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)}}},
        "progress": {"updates": update, "history": [(1, float("nan"))], "x": np.arange(3)},
    }


def put(root, update, **changes):
    """A checkpoint, some of its files replaced by other bytes, the checksums of which are right."""
    manifest = {"run": "r", "update": update, "epoch": 0, "metrics": {}}
    return commit(root, encode(tree(update)) | changes, manifest=manifest)


@pytest.fixture
def run(tmp_path):
    """A run's directory, its older and its newer checkpoint."""
    root = tmp_path / "run"
    root.mkdir()
    return root, put(root, 1), put(root, 2)


def find_checkpoint(resume, directory):
    loaded = load_checkpoint(resume, directory)
    return None if loaded is None else loaded.path


def passed_over(run, words):
    """The newer one is refused in these words wherever it is asked for, and the older one resumed."""
    root, older, newer = run
    for read in (load_tree, lambda path: find_checkpoint(path, None), lambda path: load_checkpoint(path, None)):
        with pytest.raises(CheckpointError, match=words):
            read(newer)
    with pytest.warns(UserWarning, match=f"{words}(.|\n)*passed over for an older"):
        found = load_checkpoint("auto", root)
    assert found.path == older and found.manifest["update"] == found.tree["progress"]["updates"] == 1
    with pytest.warns(UserWarning, match=words):
        assert latest_checkpoint(root) == older


DAMAGES = {
    "missing": lambda path, _: None,
    "empty": lambda path, _: path.write_bytes(b""),
    "zeros": lambda path, data: path.write_bytes(bytes(len(data))),
    "another file's bytes": lambda path, data: path.write_bytes(data[::-1]),
    "longer": lambda path, data: path.write_bytes(data + b"\0"),
    "a directory": lambda path, _: path.mkdir(),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a link": lambda path, data: path.symlink_to(copy_elsewhere(path, data)),
    "a link to nothing": lambda path, _: path.symlink_to("nowhere"),
}


def copy_elsewhere(path, data):
    """A file with the same bytes, outside of the run."""
    copy = path.parent.parent.parent / "elsewhere"
    copy.write_bytes(data)
    return copy


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_resumed(name, damage, run):
    data = (run[2] / name).read_bytes()
    (run[2] / name).unlink()
    DAMAGES[damage](run[2] / name, data)
    passed_over(run, name.replace(".", r"\."))
    if name in ("model.safetensors", "manifest.json"):
        with pytest.raises(CheckpointError, match=name):
            load_weights(run[2])


@pytest.mark.parametrize("name", FILES)
def test_every_cut_every_torn_end_and_a_flipped_bit_of_every_byte_are_found(name, run):
    path = run[2] / name
    complete = path.read_bytes()
    for at in range(len(complete)):
        flipped = bytes([complete[at] ^ 1 << at % 8])
        torn = [complete[:at] + bytes(len(complete) - at)] if at % 4 == 0 else []
        for data in (complete[:at], complete[:at] + flipped + complete[at + 1 :], *torn):
            if data == complete:
                continue
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match=name):
                load_tree(run[2])
    path.write_bytes(complete)
    load_tree(run[2])


def test_a_checkpoint_of_a_later_format_is_passed_over_by_its_version(run, monkeypatch):
    root = run[0]
    monkeypatch.setattr(formats, "FORMAT_VERSION", 5)
    put(root, 2)
    monkeypatch.undo()
    passed_over(run, "format version 5, and this trainwright reads 4(.|\n)*a later trainwright: git pull")


def test_a_checkpoint_of_an_earlier_format_is_refused_with_the_line_that_loads_its_weights(run, monkeypatch):
    root, older, newer = run
    for update in (1, 2):
        monkeypatch.setattr(formats, "FORMAT_VERSION", 1)
        put(root, update)
        monkeypatch.undo()
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no complete checkpoint") as refused:
        load_checkpoint("auto", root)
    assert str(refused.value).count("format version 1, and this trainwright reads 4") == 2
    model = torch.nn.Linear(3, 2)
    model.register_buffer("scale", torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="resume with the release that wrote it") as refused:
        load_checkpoint(newer, root)
    line = str(refused.value).partition("begin a new run with ")[2].splitlines()[0]
    eval(line, {"load_weights": load_weights, "model": model})
    assert torch.equal(model.scale, torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="format version 1"):
        load_weights(older)


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_a_link_a_pipe_or_a_file_in_place_of_a_checkpoint_is_not_followed(kind, run):
    moved = run[2].rename(run[0].parent / run[2].name)
    {"link": lambda path: path.symlink_to(moved), "pipe": os.mkfifo, "file": Path.touch}[kind](run[2])
    with pytest.warns(UserWarning, match="update-0000000002 is a link|manifest.json cannot be read: Not a directory"):
        assert load_checkpoint("auto", run[0]).path == run[1]


def test_where_nothing_is_complete_every_defect_is_listed(run):
    (run[1] / "state.json").unlink()
    (run[2] / "manifest.json").write_bytes(b"{}")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no complete checkpoint") as caught:
        load_checkpoint("auto", run[0])
    assert "1/state.json cannot be read: No such file" in str(caught.value)
    assert "2/manifest.json is damaged" in str(caught.value)
    fix = f'fix   move the damaged ones away, or Checkpoint("{run[0]}-2", ...), to begin anew'
    assert fix in str(caught.value)
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="fix   give another path"):
        load_checkpoint(run[0], None)
    assert load_checkpoint("auto", run[0] / "nothing") is None


def test_a_resume_reads_every_byte_once(run, monkeypatch):
    read = {}

    class Counting(FileIO):
        def readinto(self, target):
            n = super().readinto(target)
            name = os.readlink(f"/proc/self/fd/{self.fileno()}")
            read[name] = read.get(name, 0) + n
            return n

    monkeypatch.setattr(files, "FileIO", Counting)
    load_checkpoint("auto", run[0])
    sizes = {str(path): path.stat().st_size for path in run[2].iterdir()}
    manifests = {str(path / "manifest.json"): (path / "manifest.json").stat().st_size for path in run[1:]}
    assert {name: n for name, n in read.items() if name not in manifests} == {
        name: n for name, n in sizes.items() if name not in manifests
    }
    assert sum(read.values()) <= sum(sizes.values()) + sum(manifests.values())


def test_an_input_error_of_the_drive_is_a_defect_like_any_other(run, monkeypatch):
    class Failing(FileIO):
        def readinto(self, target):
            if os.readlink(f"/proc/self/fd/{self.fileno()}") == str(run[2] / "state.safetensors"):
                raise OSError(errno.EIO, "Input/output error")
            return super().readinto(target)

    monkeypatch.setattr(files, "FileIO", Failing)
    passed_over(run, r"state\.safetensors cannot be read: Input/output error")


@contextmanager
def somebody_else():
    """Without the rights of root, where the tests have them."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_an_error_with_the_reason():
    with tempfile.TemporaryDirectory() as folder, somebody_else_owns(Path(folder)) as root:
        older, newer = put(root, 1), put(root, 2)
        newer.chmod(0)
        with pytest.warns(UserWarning, match="update-0000000002/manifest.json cannot be read: Permission denied"):
            assert load_checkpoint("auto", root).path == older
        (older / "state.json").chmod(0)
        with pytest.raises(CheckpointError, match=r"1/state\.json cannot be read: Permission denied"):
            load_tree(older)
        root.chmod(0)
        for resume in ("auto", root, newer):
            with pytest.raises(CheckpointError, match=r"cannot be (listed|read): Permission denied"):
                load_checkpoint(resume, root)
        with pytest.raises(CheckpointError, match="Permission denied"):
            load_weights(newer)
        root.chmod(0o700)
        newer.chmod(0o700)


@contextmanager
def somebody_else_owns(folder):
    os.chmod(folder, 0o777)
    with somebody_else():
        (folder / "run").mkdir()
        yield folder / "run"


# Forged content with the right checksums


class Payload:
    def __reduce__(self):
        return (os.mkdir, (os.environ["PAYLOAD"],))


def payloads():
    """A pickle that makes a directory, by every protocol and as torch writes it."""
    yield from (pickle.dumps(Payload(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1))
    for new in (True, False):
        file = io.BytesIO()
        torch.save({"model": Payload()}, file, _use_new_zipfile_serialization=new)
        yield file.getvalue()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Payload()))
    yield file.getvalue()


def check_nothing_is_executed(name, run, directory, monkeypatch):
    """Put pickles in place of a file, under a wrong sum and a right one; none may run."""
    monkeypatch.setenv("PAYLOAD", str(directory / "ran"))
    for payload in payloads():
        (run[2] / name).write_bytes(payload)
        passed_over(run, name)
        with suppress(CheckpointError):
            load_weights(run[2])
        with suppress(CheckpointError):
            load_weights(run[2] / name)
        if name != "manifest.json":
            sealed = put(run[0], 2, **{name: payload})
            with pytest.raises(CheckpointError, match=name):
                load_tree(sealed)
            put(run[0], 2)
    assert not (directory / "ran").exists()
    pickle.loads(payload if payload[:2] != b"PK" else pickle.dumps(Payload()))  # it would have
    assert (directory / "ran").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_any_file_is_never_executed(name, run, tmp_path, monkeypatch):
    check_nothing_is_executed(name, run, tmp_path, monkeypatch)


def test_the_law_sees_a_loader_that_unpickles(run, tmp_path, monkeypatch):
    class Unpickles:
        JSONDecodeError = json.JSONDecodeError
        dumps = staticmethod(json.dumps)

        @staticmethod
        def loads(text):
            with suppress(Exception):
                return pickle.loads(text if isinstance(text, bytes) else text.encode("latin-1"))
            return json.loads(text)

    monkeypatch.setattr(trees, "json", Unpickles)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_nothing_is_executed("state.json", run, tmp_path, monkeypatch)
    assert (tmp_path / "ran").exists()


FORGED = {
    "state.json": [
        b"",
        b"{",
        b"[]",
        b"3",
        b"[" * 100_000,
        b'{"a": {"$pickle": "x"}}',
        b'{"a": {"$tensor": "x"}}',
        b"\xff",
    ],
    "state.safetensors": [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}", b"\2\0\0\0\0\0\0\0[]"],
    "model.safetensors": [b"", b"\xff" * 100, (100_000_001).to_bytes(8, "little") + b"{}"],
}


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, all_ in FORGED.items() for data in all_])
def test_forged_content_under_the_right_checksum_is_named(name, data, run):
    put(run[0], 2, **{name: data})
    with pytest.raises(CheckpointError, match=name):
        load_tree(run[2])


@pytest.mark.parametrize("key", ["trainwright.tied", "trainwright.extra", "trainwright.versions"])
@pytest.mark.parametrize("text", ["", "3", "[1]", '{"a": 1}', '{"a": "b"}', '{"$pickle": 1}', "[" * 100_000])
def test_forged_metadata_is_an_error_or_harmless(key, text, run):
    put(run[0], 2, **{"model.safetensors": Contents({"w": torch.ones(1)}, {key: text})})
    try:
        load_tree(run[2])
    except CheckpointError as error:
        assert "model.safetensors" in str(error)


def test_a_manifest_too_large_to_be_one_is_not_read(run):
    os.truncate(run[2] / "manifest.json", 1 << 42)
    passed_over(run, r"manifest\.json is damaged: it has 4398046511104 bytes")


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_changed_state_is_a_value_or_an_error_of_ours(data):
    jsonable, tensors = flatten(tree(1))
    text = json.dumps(jsonable)
    at = data.draw(st.integers(0, len(text) - 1))
    put_in = data.draw(st.sampled_from(["", "0", "9" * 30, '"', "-", "$", "{", "[", "null", "1e999"]))
    with suppress(CheckpointError, ValueError):
        changed = json.loads(text[:at] + put_in + text[at + data.draw(st.integers(0, 3)) :])
        try:
            loads(json.dumps(changed), tensors)
        except ValueError as error:
            raise AssertionError from error


def test_the_writer_of_these_tests_writes_readable_files(run):
    target = io.BytesIO()
    write(target, {"w": torch.ones(1)}, {})
    put(run[0], 2, **{"model.safetensors": target.getvalue()})
    assert load_tree(run[2])["model"]["w"] == 1.0


@pytest.mark.parametrize("name", FILES)
def test_sha256_on_request_is_checked_as_crc32_is(name, run):
    manifest = {"run": "r", "update": 2, "epoch": 0, "metrics": {}, "monitor": "abc"}
    commit(run[0], encode(tree(2)), manifest=manifest, checksum="sha256")
    found = load_checkpoint("auto", run[0])
    data = (run[2] / "state.json").read_bytes()
    assert found.manifest["files"]["state.json"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert found.manifest["monitor"] == "abc" and "monitor" not in read_manifest(run[1])
    path = run[2] / name
    complete = path.read_bytes()
    for at in range(0, len(complete), 9):
        path.write_bytes(complete[:at] + bytes([complete[at] ^ 1]) + complete[at + 1 :])
        with pytest.raises(CheckpointError, match=name):
            load_tree(run[2])
