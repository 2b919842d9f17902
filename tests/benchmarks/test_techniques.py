"""The benchmark of claims runs tiny, tells each in a row, and judges by its quartiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import techniques
from technique_measuring import Bench, by_turns, compare, verdict


@pytest.mark.parametrize("name", techniques.NAMES)
def test_a_claim_is_measured_tiny_and_reported_in_a_row(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "found.json"
    assert techniques.main(["--only", name, "--tiny", "--rounds", "1", "--json", str(written)]) == 0
    (found,) = json.loads(written.read_text())["rows"]
    assert found["name"] == name and found["where"] and found["claimed"] and found["source"]
    assert found["holds"] == "not here" or found["ratio"] > 0
    *_, head, _, row = (line.strip("|").split(" | ") for line in capsys.readouterr().out.strip().splitlines())
    reported = dict(zip((cell.strip() for cell in head), (cell.strip() for cell in row), strict=True))
    assert reported["technique"] == name and reported["where"] and reported["measured here"] == found["measured"]


def test_an_unknown_claim_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        techniques.main(["--only", "magic"])
    assert "no 'magic'" in capsys.readouterr().err


def test_ratios_are_taken_within_a_round_and_the_first_round_is_not_timed() -> None:
    order: list[str] = []
    ticks = iter(range(1000))
    ways = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    times = by_turns(ways, Bench(3), clock=lambda: float(next(ticks)))
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"] and times == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert compare({"a": [2.0, 4.0, 8.0], "b": [1.0, 1.0, 1.0]}, "a", "b") == (4.0, (3.0, 6.0))


@pytest.mark.parametrize(
    ("spread", "holds"), [((1.6, 2.1), "yes"), ((1.2, 2.1), "partly"), ((0.9, 2.1), "no"), ((1.0, 1.0), "no")]
)
def test_a_claim_is_judged_by_the_lower_quartile(spread: tuple[float, float], holds: str) -> None:
    assert verdict(spread, claimed=2.0) == holds
