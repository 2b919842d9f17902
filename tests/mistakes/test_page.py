"""The pages of errors show what their code prints, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


@pytest.mark.parametrize(("page", "least"), [("errors", 3), ("error_rules", 2)])
def test_the_page_of_errors_shows_what_its_code_prints(page, least, capsys):
    text, namespace, shown = (GUIDES / f"{page}.md").read_text(encoding="utf-8"), {"__name__": "page"}, 0
    for block in BLOCK.finditer(text):
        code, output = block.groups()
        exec(compile("\n" * text[: block.start(1)].count("\n") + code, f"{page}.md", "exec"), namespace)
        assert capsys.readouterr().out == (output or "")
        shown += output is not None
    assert shown >= least
