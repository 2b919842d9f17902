"""The pages of errors show what their code prints, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


OTHER_WORDS = pytest.mark.skipif(torch.__version__ < "2.13", reason="the page shows the words of torch 2.13")


@pytest.mark.parametrize(("page", "least"), [("errors", 3), pytest.param("error_rules", 2, marks=OTHER_WORDS)])
def test_the_page_of_errors_shows_what_its_code_prints(page, least, capsys):
    text, namespace, shown = (GUIDES / f"{page}.md").read_text(encoding="utf-8"), {"__name__": "page"}, 0
    for block in BLOCK.finditer(text):
        code, output = block.groups()
        exec(compile("\n" * text[: block.start(1)].count("\n") + code, f"{page}.md", "exec"), namespace)
        assert capsys.readouterr().out == (output or "")
        shown += output is not None
    assert shown >= least
