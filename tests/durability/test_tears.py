"""Whatever one file of the newest checkpoint has become, the run goes on from the one before, and says so."""

from __future__ import annotations

from pathlib import Path

from .commands import all_ok, tried


def test_every_damage_to_any_file_is_noticed_named_and_passed_over(tmp_path: Path) -> None:
    counts = tried("tears", "--width", "64", base=tmp_path)
    assert all_ok(counts)
    assert sum(counts["trainwright"].values()) > 90


def test_the_harness_finds_the_flipped_bits_that_torch_load_takes_in(tmp_path: Path) -> None:
    words = ("--adapter", "torch_save", "--variant", "numbered", "--only", "flipped")
    (counts,) = tried("tears", *words, base=tmp_path).values()
    assert counts["mixed"] >= 2
