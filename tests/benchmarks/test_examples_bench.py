"""The command that runs every example knows them all, judges what they print, and says which failed."""

from __future__ import annotations

import json
from pathlib import Path

import examples
import pytest


def test_every_example_has_a_stated_result() -> None:
    assert set(examples.STATED) == {path.stem for path in examples.EXAMPLES.glob("*.py")}


@pytest.mark.parametrize(
    ("text", "holds"),
    [("x\n97.0% of the held-out digits are right\n", True), ("96.9% of the held-out digits", False), ("", False),
     ("99.0% of the held-out digits, then 12.0% of the held-out digits", False)],
)  # fmt: skip
def test_a_result_is_as_stated_where_the_last_number_is(text: str, holds: bool) -> None:
    (stated,) = examples.STATED["quickstart_digits"]
    assert stated.holds(text) is holds
    assert str(stated) == ">= 97"


def test_a_limit_from_above_is_one() -> None:
    (stated,) = examples.STATED["fsdp_char_lm"]
    assert stated.holds("2.190 bits per character") and not stated.holds("2.300 bits per character")


def test_an_example_is_run_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "found.json"
    command = ["--device", "cpu", "--smoke", "--only", "bare_digits", "--json", str(written)]
    assert examples.main(command) == 0
    assert "| bare_digits.py | >= 0.98 |" in capsys.readouterr().out
    (one,) = json.loads(written.read_text())["examples"]["bare_digits"]
    assert one["returned"] == 0 and one["seconds"] > 0 and "val_accuracy" in one["tail"]


def test_one_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quickstart_digits.py").write_text("print('97.0% of the held-out digits'); raise SystemExit(3)")
    monkeypatch.setattr(examples, "EXAMPLES", tmp_path)
    assert examples.main(["--device", "cpu", "--only", "quickstart_digits"]) == 1
    told = capsys.readouterr()
    assert "| failed |" in told.out and "quickstart_digits ended with 3" in told.err
    (tmp_path / "quickstart_digits.py").write_text("print('90.0% of the held-out digits')")
    assert examples.main(["--device", "cpu", "--only", "quickstart_digits"]) == 1
    assert "| 90 | **no** |" in capsys.readouterr().out
