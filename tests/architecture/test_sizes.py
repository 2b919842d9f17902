"""Files and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from layers import PACKAGE, ROOT, files

LONGEST_FILE, LONGEST_FUNCTION, MOST_POSITIONAL, LONGEST_UPDATE = 600, 40, 3, 80
LONGEST_LOGGER = 80
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


def positional(function: Function) -> list[str]:
    """The parameters that can be given by position, without self and cls."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls", "mcs")]


def wrong_in(path: Path) -> list[str]:
    """What a file of the package breaks of the rules of size."""
    source = path.read_text()
    wrong = (
        [] if ast.get_docstring(ast.parse(source)) else ["it does not open with a sentence that says what it is for"]
    )
    for function in functions(source):
        size = code_lines(function, source)
        if size > LONGEST_FUNCTION:
            wrong.append(f"{function.name} has {size} code lines, at most {LONGEST_FUNCTION}")
        of_torch = function.name in ("__torch_function__", "__torch_dispatch__")  # torch decides what those take
        if len(positional(function)) > MOST_POSITIONAL and not of_torch:
            wrong.append(f"{function.name} takes {positional(function)} by position, at most {MOST_POSITIONAL}")
    return [f"{path.relative_to(ROOT)}: {one}" for one in wrong]


def test_a_file_says_what_it_is_for_and_its_functions_stay_small() -> None:
    assert [one for path in files() for one in wrong_in(path)] == []


def test_no_file_has_more_than_600_code_lines() -> None:
    """Tests and examples are read as well, so they are held to the length of the source."""
    paths = [path for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    sizes = {path.relative_to(ROOT).as_posix(): len(lines_with_code(path.read_text())) for path in paths}
    assert len(sizes) > 100
    assert {path: size for path, size in sizes.items() if size > LONGEST_FILE} == {}


def test_a_logger_has_at_most_80_lines() -> None:
    """Docstrings and blank lines are counted: a logger is one tracker's calls, all else is in `base.py`."""
    paths = [path for path in (PACKAGE / "observers/loggers").glob("*.py") if path.name != "base.py"]
    sizes = {path.name: len(path.read_text().splitlines()) for path in paths}
    assert len(sizes) > 4
    assert {name: size for name, size in sizes.items() if size > LONGEST_LOGGER} == {}


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
