"""What the pages say of the code is still so: the quoted loop, every link; pages and lines are short."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTE = re.compile(r"<!-- not run: quoted from \S+ -->\n```python\n(.*?)```", re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def test_the_page_of_the_loop_quotes_all_four_methods_whole():
    quoted = "\n".join(QUOTE.findall((ROOT / "docs/guides/loop.md").read_text(encoding="utf-8")))
    source = (ROOT / "src/trainwright/trainer.py").read_text(encoding="utf-8")
    for name in ("fit", "update", "compute_gradients", "apply_gradients"):
        body = re.search(rf"\n    def {name}\(.*?\"\"\"\n(.*?)\n\n    def ", source, re.S)[1]
        loop = body.find("        with FitContext")  # what comes before it in fit makes the arguments ready
        assert dedent(body[max(loop, 0) :]) in quoted, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = {link.split("#")[0] for link in LINK.findall(text) if "://" not in link}
    assert [link for link in sorted(links) if link and not (page.parent / link).exists()] == []


GUIDES = [page for page in PAGES if "guides" in page.parts]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_guide_has_at_most_200_lines(page):
    assert len(page.read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_of_prose_have_at_most_120_characters(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
