"""Every Python block of the README and of the docs runs: the blocks of a page in order, in one namespace.

A block right after a comment `<!-- not run: reason -->` is skipped, visibly and for that reason. A text block that
follows a Python block is what that block prints; `...` in it stands for any text. After a comment
`<!-- numbers vary -->` only the words are compared, and so they are in the README and the tutorial.
"""

from __future__ import annotations

import doctest
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAMS = [ROOT / "docs" / "coming_from", ROOT / "docs" / "cookbook"]
"""Their pages are programs, some beside other packages: tests/test_docs_programs.py runs them."""
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent not in PROGRAMS or page.name == "index.md"),
]
GUIDES = ROOT / "docs" / "guides"
TUTORIAL = sorted((ROOT / "docs" / "start").glob("*.md"))
CONSOLE = {ROOT / "README.md", *TUTORIAL}
"""They show what the console prints, whose numbers depend on the machine."""
SLOW_TECHNIQUES = (
    "activation_checkpointing",
    "advise",
    "custom_operators",
    "debugging_tools",
    "learning_rate_range_test",
)
SLOW = {GUIDES / "model_selection.md", *(GUIDES / "techniques" / f"{name}.md" for name in SLOW_TECHNIQUES)}
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S
)
SHOWN = re.compile(r"\n*(?P<vary><!-- numbers vary -->\n)?```text\n(?P<text>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"[▁▂▃▄▅▆▇█]+|torch \S+|\d[\d.,]*(?:e[+-]?\d+)?(?:ms|[kM%s])?")
WRITTEN_WITH = "2.13"
"""The version of torch whose words and optimizers the output of the pages shows; with earlier ones they only run."""
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
QUOTED = "quoted from "
"""Such a block must stand in the source: tests/test_docs_quotes.py looks."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of Python of a page."""

    page: Path
    line: int
    code: str
    reason: str | None
    shown: str | None = None
    """The text block that follows."""
    vary: bool = False

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """The Python blocks of a page, with the number of the line before their first."""
    text = page.read_text() if text is None else text
    for match in FENCE.finditer(text):
        if match["language"] == "python":
            shown = SHOWN.match(text, match.end())
            line = text[: match.start("code")].count("\n")
            output, vary = (shown["text"], shown["vary"] is not None) if shown else (None, False)
            yield Block(page, line, match["code"], match["reason"], output, vary or page in CONSOLE)


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block; what goes wrong in it names the line of the page."""
    exec(compile("\n" * block.line + block.code, block.page.name, "exec"), namespace)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else (), id=page.relative_to(ROOT).as_posix())
        for page in PAGES
    ],
)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.reason is None:
            run(block, namespace)
            printed = capsys.readouterr().out
            # A block of the tutorial without output prints nothing; elsewhere it may print what the page leaves out.
            if (block.shown is not None or page in TUTORIAL) and torch.__version__ >= WRITTEN_WITH:
                assert prints(block, printed), f"{block.name} prints\n{printed}\nand the page shows\n{block.shown}"


def prints(block: Block, printed: str) -> bool:
    """Whether a block printed what its page shows."""
    shown = block.shown or ""
    if block.vary:
        shown, printed = NUMBER.sub("#", shown), NUMBER.sub("#", printed)
    return doctest.OutputChecker().check_output(shown.strip(), printed.strip(), OUTPUT_FLAGS)


def test_a_page_that_shows_another_number_than_its_block_prints_is_noticed() -> None:
    text = "```python\nprint('loss', 0.5)\n```\n\n```text\nloss 0.5\n```\n"
    [block] = blocks(ROOT / "page.md", text)
    assert prints(block, "loss 0.5\n")
    assert not prints(block, "loss 0.25\n")
    [block] = blocks(ROOT / "page.md", text.replace("```text", "<!-- numbers vary -->\n```text"))
    assert prints(block, "loss 0.25\n")
    assert not prints(block, "rate 0.25\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each block that is not run, so that each is counted."""
    if "unrun" in metafunc.fixturenames:
        found = [block for page in PAGES for block in blocks(page) if block.reason is not None]
        metafunc.parametrize("unrun", found or [None], ids=lambda block: block.name if block else "none")


def test_a_block_that_is_not_run_is_python_and_counted_as_skipped(unrun: Block | None) -> None:
    if unrun is None:
        return
    assert unrun.reason is not None
    compile(f"def body():\n{indent(unrun.code, ' ')}", unrun.name, "exec")
    if not unrun.reason.startswith(QUOTED):
        pytest.skip(f"not run: {unrun.reason}")


def test_blocks_run_in_order_and_errors_name_the_line_of_the_page() -> None:
    text = "# A page\n\n```python\nx = 1\n```\n\n```console\n$ no\n```\n\n```python\nx += 1\nassert x == 3\n```\n"
    found = list(blocks(ROOT / "page.md", text))
    assert [block.line for block in found] == [3, 11]
    namespace: dict[str, Any] = {}
    run(found[0], namespace)
    with pytest.raises(AssertionError) as failed:
        run(found[1], namespace)
    last = traceback.extract_tb(failed.value.__traceback__)[-1]
    assert (last.filename, last.lineno, namespace["x"]) == ("page.md", 13, 2)


def test_a_block_marked_as_not_run_is_found_with_its_reason() -> None:
    text = "<!-- not run: needs a GPU -->\n```python\nmodel.cuda()\n```\n"
    assert [block.reason for block in blocks(ROOT / "page.md", text)] == ["needs a GPU"]
