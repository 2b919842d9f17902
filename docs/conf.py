"""Settings of the documentation site: `sphinx-build -W --keep-going -q -b html docs OUT`."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import trainwright

project = "trainwright"
author = "the trainwright authors"
copyright = "the trainwright authors, Apache-2.0"  # noqa: A001
version = release = trainwright.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "trainwright"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "code"  # single backticks in docstrings are code
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
maximum_signature_line_length = 80

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

FOLDER = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)\)")
"""A link out of the documentation: to a file, which is offered for download, or to a folder, which cannot be."""


def name_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to folders of the repository by their paths."""
    here = (Path(app.srcdir) / docname).parent

    def named(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if not target.is_dir():
            return link[0]
        path = f"`{target.relative_to(Path(app.srcdir).parent).as_posix()}`"
        return path if link[1] in path else f"{link[1]} ({path})"

    source[0] = FOLDER.sub(named, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_folders)
