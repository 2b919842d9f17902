"""Settings of the documentation site: `sphinx-build -W --keep-going -q -b html docs OUT`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

import trainwright
from trainwright.core.lazy import _table

project = "trainwright"
author = "the trainwright authors"
copyright = "the trainwright authors, Apache-2.0"
version = release = trainwright.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

smartquotes_action = "D"  # dashes alone: "bf16" stays as it is typed
html_theme = "furo"
html_title = "trainwright"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
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


def public_names() -> dict[str, str]:
    """Return every public name with the path under which the reference documents it: at the top where it is there."""
    packages = ["protocols", "testing", *_table("trainwright").packages]
    tables = {f"trainwright.{package}": _table(f"trainwright.{package}") for package in packages}
    paths = {name: f"{package}.{name}" for package, table in tables.items() for name in table.public or table.modules}
    return paths | {name: f"trainwright.{name}" for name in trainwright.__all__}


NAMES = public_names()
CODE = re.compile(r"(?P<name>\w+)(?P<method>\.\w+)?(?P<call>\(.*\))?", re.S)


def is_in_first_column(node: nodes.Node) -> bool:
    """Return whether a node is in the first column of a table."""
    while node.parent is not None:
        if isinstance(node, nodes.entry):
            return bool(node.parent.index(node) == 0)
        node = node.parent
    return False


class LinkNames(SphinxTransform):
    """Makes code that names a public class or function a link to its place in the reference."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace the code of one page."""
        everything = self.env.docname == "reference/index"
        for literal in list(self.document.findall(nodes.literal)):
            found = CODE.fullmatch(literal.astext())
            if found is None or found["name"] not in NAMES or isinstance(literal.parent, nodes.title | nodes.reference):
                continue
            if self.env.docname.startswith("coming_from/") and is_in_first_column(literal):
                continue  # names of another library
            if not (everything or found["call"] or found["name"][0].isupper() or "_" in found["name"]):
                continue  # `accuracy` alone may be the name of a number
            target = NAMES[found["name"]] + (found["method"] or "")
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname)
            literal.replace_self(link)
            link += literal


def resolve_inner_path(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """Resolve a name by the module that defines it, as annotations have it, to its public path."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in NAMES:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", NAMES[name], node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the above; Sphinx calls it."""
    app.add_transform(LinkNames)
    app.connect("source-read", name_folders)
    app.connect("missing-reference", resolve_inner_path)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
