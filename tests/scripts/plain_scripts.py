"""What the scripts share with their plain loops: code lines, digits, and what must agree."""

from __future__ import annotations

import ast
import inspect
import textwrap

import torch
from sklearn.datasets import load_digits


def code_lines(*objects):
    """Lines of classes and functions that carry code: no blank lines, comments or docstrings."""
    return sum(len(_lines(textwrap.dedent(inspect.getsource(one)))) for one in objects)


def assert_no_longer(ours, theirs):
    """The script by the Trainer (a function, its classes) has no more lines of code than the plain one."""
    counted, plain = code_lines(*ours), code_lines(*theirs)
    assert counted <= plain, f"{counted} lines by the Trainer, {plain} by hand"


def assert_same_weights(ours, theirs):
    """Parameters and buffers of two models agree bit for bit, and both have moved from the same start."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differing, differing


def assert_near_weights(ours, theirs, within=1e-12):
    """Parameters of two models agree to `within` of the largest of them."""
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    most = max(float(b.detach().abs().max()) for _, b in pairs)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) <= within * most


def assert_same_history(history, plain):
    """Every number of the plain loop's rows is in the history, equal bit for bit."""
    assert len(history) == len(plain) > 0
    assert [{name: row[name] for name in mine} for row, mine in zip(history, plain, strict=True)] == plain


def assert_near_history(history, plain, within=1e-12):
    """The same to a relative difference of `within`."""
    assert len(history) == len(plain) > 0
    for row, mine in zip(history, plain, strict=True):
        for name, value in mine.items():
            assert abs(row[name] - value) <= within * abs(value), (name, row[name], value)


def digits(rows=600, dtype=torch.float32):
    """Pictures (rows, 64) of 0 to 1 and their classes, shuffled once."""
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:rows]
    return torch.tensor(pixels, dtype=dtype)[order] / 16, torch.tensor(classes)[order]


def made(build, seed=0, dtype=torch.float32):
    """The same new model at each call, and torch's generator in the same state after it."""
    torch.manual_seed(seed)
    return build().to(dtype)


def _lines(source):
    tree = ast.parse(source)
    blocks = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = (node.body[0] for node in ast.walk(tree) if isinstance(node, blocks) and ast.get_docstring(node))
    docstrings = {line for node in documented for line in range(node.lineno, node.end_lineno + 1)}
    code = {n for n, line in enumerate(source.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    return code - docstrings
