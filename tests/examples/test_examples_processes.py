"""Every example runs under torchrun with two processes; those that are made for several give what one process gives."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from loading import EXAMPLES

from distributed.launched.programs_run import Ended, ended, torchrun

pytestmark = pytest.mark.slow

PATHS = sorted(EXAMPLES.glob("*.py"))
SECONDS = 240
OF_ONE = {"advise.py", "tune_digits.py"}
"""Examples of tools that are of one process, and refuse several with what to write."""
APART = {"resume.py", "transformers_lm.py"}
"""Examples that start processes of their own, or need a package that is not installed here."""


SHRUNK = str(Path(__file__).with_name("shrunk.py"))


def shrunk(name: str) -> list[str]:
    """The command line of an example that is cut short."""
    return [SHRUNK, str(EXAMPLES / name)]


def out_of(done: list[Ended]) -> str:
    """What one command has printed; it must have ended well, and without a warning."""
    [process] = done
    assert process.code == 0, process.out + process.err
    assert "Warning" not in process.err, process.err
    return process.out


def alone(*args: str) -> str:
    return out_of(ended([[sys.executable, "-W", "error", *args]], seconds=SECONDS))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", sorted(OF_ONE))
def test_a_tool_of_one_process_refuses_several(name: str) -> None:
    [process] = torchrun(*shrunk(name), seconds=SECONDS)
    assert process.code != 0
    assert "one process" in process.err


@pytest.mark.parametrize("path", [one for one in PATHS if one.name not in OF_ONE | APART], ids=lambda path: path.name)
def test_an_example_runs_under_torchrun(path: Path) -> None:
    assert out_of(torchrun(*shrunk(path.name), seconds=SECONDS)), "an example shows what it did"


def test_as_many_digits_are_right_alone_under_torchrun_and_by_launch() -> None:
    file = str(EXAMPLES / "ddp_digits.py")
    commands = [[file, "--directory", name] for name in ("alone", "torchrun", "launch")]
    outs = [
        alone(*commands[0]),
        out_of(torchrun(*commands[1], seconds=SECONDS)),
        alone(*commands[2], "--launch", "2"),
    ]
    ends = [re.findall(r"^.*% of the held-out digits are right, loss \d\.\d{12}$", out, re.M) for out in outs]
    assert [len(lines) for lines in ends] == [1, 1, 1], "the first process alone prints"
    assert ends[0] == ends[1] == ends[2]
    assert ["2 processes by DDP" in out for out in outs] == [False, True, True]


def test_a_finished_run_of_two_processes_is_found_finished_by_one() -> None:
    command = [*shrunk("ddp_digits.py"), "--directory", "run"]
    first = out_of(torchrun(*command, seconds=SECONDS))
    again = alone(*command)
    found = [
        re.search(r"\d\d\.\d{4}% of the held-out digits are right, loss \d\.\d{12}", out) for out in (first, again)
    ]
    assert found[0] is not None and found[1] is not None
    assert found[0][0] == found[1][0]
    assert "processes: 1" in again
    assert " update " in first
    assert " update " not in again, "nothing is trained again"


def test_a_model_in_shards_writes_the_same_text_and_is_as_good_as_in_one_process() -> None:
    file = shrunk("fsdp_char_lm.py")
    whole = alone(*file)
    shutil.rmtree("runs")
    shards = out_of(torchrun(*file, seconds=SECONDS))
    pattern = r"It writes:\n(.*?)\n\n(\d\.\d{3}) bits per character of the held-out text, on (\d)"
    ends = [re.findall(pattern, out, re.S) for out in (whole, shards)]
    assert [len(found) for found in ends] == [1, 1], "the first process alone prints"
    (text, bits, one), (other_text, other_bits, two) = ends[0][0], ends[1][0]
    assert (one, two) == ("1", "2")
    assert abs(float(bits) - float(other_bits)) <= 0.002
    assert text[:100] == other_text[:100]
