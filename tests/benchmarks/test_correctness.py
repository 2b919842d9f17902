"""The table of correctness is that of its raw numbers, and its rows find what they are to find."""

from __future__ import annotations

import json
from pathlib import Path

import correctness
import pytest
from programs import NAMES

ROOT = Path(__file__).parents[2]
RAW = ROOT / "docs/benchmarks/correctness.json"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks/correctness.md"])
def test_the_table_of_a_page_is_that_of_the_raw_numbers(page: str) -> None:
    text, rows = (ROOT / page).read_text(), json.loads(RAW.read_text())
    assert correctness.table(rows) in text
    assert correctness.page(text, rows) == text


def test_every_row_holds_every_library_with_its_version() -> None:
    rows = json.loads(RAW.read_text())
    assert tuple(rows) == correctness.ROWS
    for row, found in rows.items():
        assert set(found["found"]) - {"true"} == set(NAMES), row
        assert {"torch", "python", "lightning", "accelerate", "transformers"} <= set(found["versions"]), row


@pytest.mark.parametrize("row", ["window", "tokens"])
def test_accumulation_is_one_big_batch_here_and_not_in_the_loop_of_the_textbooks(row: str) -> None:
    assert correctness.differences("trainwright", row)["default"] < 1e-12
    assert correctness.differences("plain", row)["default"] > 1e-3


@pytest.mark.parametrize(("name", "stops"), [("trainwright", True), ("plain", False)])
def test_a_nan_stops_before_the_update_or_reaches_the_weights(name: str, stops: bool) -> None:
    found = correctness.program(name).nan()
    assert (found["error"] is not None, found["finite_weights"]) == (stops, stops)
    assert correctness.nan_cell(found) == ("yes" if stops else "no")
    assert (found["updates"], found["updates_with_nan_weights"]) == ((20, 0) if stops else (44, 24))


@pytest.mark.parametrize(("name", "wasted"), [("trainwright", "0"), ("plain", "44 (user's code)")])
def test_a_misspelt_monitor_is_found_before_or_after_an_epoch(name: str, wasted: str) -> None:
    assert correctness.monitor_cell(correctness.program(name).monitor()) == wasted


def test_a_second_start_is_judged_by_where_it_goes_on_and_how_it_ends() -> None:
    from tests.durability.children import Ended, Line

    def ended(*lines: str, code: int = 0, log: str = "") -> Ended:
        reported = [text.split() for text in lines]
        return Ended([Line(what, int(at), tuple(rest), 0.0) for what, at, *rest in reported], code, False, log=log)

    reference = ended("epoch 0", "epoch 1", "ended 6 abc")
    killed = ended("epoch 0", "epoch 1", code=-9)

    def judged(again: Ended) -> tuple[bool, bool, str]:
        found = correctness.judged(reference, killed, again)
        return found["resumes"], found["equal"], found["reason"]

    assert judged(ended("epoch 1", "ended 6 abc")) == (True, True, "")
    assert judged(ended("epoch 1", "ended 6 abd")) == (True, False, "")
    assert judged(ended("epoch 0", "epoch 1", "ended 6 abc")) == (False, True, "starts from nothing")
    assert judged(ended("epoch 1", code=1, log="Trace\n  line\nEOFError: no")) == (False, False, "EOFError: no")
