"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from layers import PACKAGE, ROOT, files

LONGEST_FILE, LONGEST_FUNCTION, MOST_POSITIONAL, LONGEST_UPDATE = 400, 30, 3, 80
UPDATE = ("fit", "update", "compute_gradients", "apply_gradients")
Function = ast.FunctionDef | ast.AsyncFunctionDef
IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def functions(source: str) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def code_lines(function: Function, source: str, *, signature: bool = False) -> int:
    """Lines of a function that hold code: no docstring, blank lines or comments; its signature where asked for."""
    body = function.body if ast.get_docstring(function) is None else function.body[1:]
    spans = [(body[0].lineno, body[-1].end_lineno or 0)] if body else []
    if signature:
        spans.append((function.lineno, function.body[0].lineno - 1))
    held = lines_with_code(source)
    return sum(line in held for first, last in spans for line in range(first, last + 1))


@cache
def lines_with_code(source: str) -> frozenset[int]:
    """The numbers of the lines that hold anything but comments."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in IGNORED]
    return frozenset(line for span in spans for line in span)


def lines_of(path: Path) -> int:
    """How long a file is, with everything that stands in it."""
    return len(path.read_text(encoding="utf-8").splitlines())


def positional(function: Function) -> list[str]:
    """The parameters that can be given by position, without self and cls."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls", "mcs")]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_file_says_what_it_is_for_and_its_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), "a file opens with the sentence that says what it is for"
    sizes = [(f.name, code_lines(f, source)) for f in functions(source)]
    assert [size for size in sizes if size[1] > LONGEST_FUNCTION] == []
    of_torch = ("__torch_function__", "__torch_dispatch__")  # torch says what those take
    ours = [f for f in functions(source) if f.name not in of_torch]
    wide = {f.name: positional(f) for f in ours if len(positional(f)) > MOST_POSITIONAL}
    assert wide == {}


@pytest.mark.parametrize("folder", ["src", "tests", "examples"])
def test_no_file_is_longer_than_400_lines(folder: str) -> None:
    """The tests and the examples are read as well, so they are held to the length of the source."""
    sizes = {path.relative_to(ROOT).as_posix(): lines_of(path) for path in (ROOT / folder).rglob("*.py")}
    assert sizes
    assert {path: size for path, size in sizes.items() if size > LONGEST_FILE} == {}


def test_code_lines_leave_out_docstring_comments_and_blank_lines() -> None:
    source = (
        'def f(\n    x,\n):\n    """What\n    it does."""\n    # why\n\n'
        "    y = (\n        x\n    )\n    return y  # so\n"
    )
    (function,) = functions(source)
    assert code_lines(function, source) == 4
    assert code_lines(function, source, signature=True) == 7


def test_one_update_is_read_in_one_file() -> None:
    source = (PACKAGE / "trainer.py").read_text()
    sizes = {f.name: code_lines(f, source, signature=True) for f in functions(source) if f.name in UPDATE}
    assert set(sizes) == set(UPDATE)
    assert sum(sizes.values()) <= LONGEST_UPDATE, sizes
