"""The page of errors shows what its code prints, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "errors.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


def test_the_page_of_errors_shows_what_its_code_prints(capsys):
    text, namespace, shown = PAGE.read_text(encoding="utf-8"), {"__name__": "page"}, 0
    for block in BLOCK.finditer(text):
        code, output = block.groups()
        exec(compile("\n" * text[: block.start(1)].count("\n") + code, "errors.md", "exec"), namespace)
        assert capsys.readouterr().out == (output or "")
        shown += output is not None
    assert shown >= 5
