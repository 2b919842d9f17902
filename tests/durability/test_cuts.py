"""After a power cut at any moment the last acknowledged checkpoint is there, whole; without fsync it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .commands import all_ok, tried
from .disk import Op, after_cut

SMALL = ("--updates", "16", "--width", "16")


def test_power_cuts_take_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    assert all_ok(tried("cuts", *SMALL, "--cuts", "80", base=tmp_path))


@pytest.mark.parametrize("missing", ["file", "directory"])
def test_the_harness_finds_that_an_fsync_is_missing(missing: str, tmp_path: Path) -> None:
    (counts,) = tried("cuts", *SMALL, "--cuts", "25", "--without-fsync", missing, base=tmp_path).values()
    assert sum(counts.values()) - counts["ok"] >= 2


def test_a_file_is_there_only_with_its_data_and_its_name_synced() -> None:
    made, data = Op("make", name="a", made=1), Op("write", 1, data=b"12")
    file, names = Op("sync", 1), Op("sync", is_directory=True)
    assert after_cut([made, data], 2, "least") == {}
    assert after_cut([made, data, file], 3, "least") == {}  # its name may be lost all the same
    assert after_cut([made, data, names], 3, "least") == {"a": b""}
    assert after_cut([made, data, names], 3, "zeros") == {"a": b"\0\0"}
    assert after_cut([made, data, file, names], 4, "least") == {"a": b"12"}
    assert after_cut([made, file, data, names], 4, "least") == {"a": b""}  # written after its fsync
    assert after_cut([made, data, file, names], 3, "names") == {"a": b"12"}


def test_a_rename_may_reach_the_disk_before_the_data_does() -> None:
    made = [Op("make", name="new", made=1, is_directory=True), Op("make", 1, "f", 2), Op("write", 2, data=b"1")]
    ops = [*made, Op("rename", name="new", made=1, to=(0, "old"))]
    assert after_cut(ops, 4, "names") == {"old": None, "old/f": b""}
    assert after_cut(ops, 4, "data") == {}
    assert after_cut([*ops, Op("sync", is_directory=True)], 5, "least") == {"old": None}
    assert after_cut([*ops[:3], Op("sync", is_directory=True), ops[3]], 5, "data") == {"new": None}


def test_what_was_removed_may_still_be_there_until_its_directory_is_synced() -> None:
    ops = [Op("make", name="a", made=1), Op("sync", is_directory=True), Op("remove", name="a")]
    assert after_cut(ops, 3, "least") == {"a": b""}
    assert after_cut([*ops, ops[1]], 4, "least") == {}
