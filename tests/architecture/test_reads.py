"""The step reads no number back from a tensor outside `core/host_reads.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from layers import PACKAGE

PATH = (
    *("trainer.py", "fit/run.py", "update/optimizer_steps.py", "update/reporter.py", "update/loss_tracker.py"),
    *("update/window.py", "optim/gradients.py", "precision/mixed_precision.py", "update/nonfinite_policy.py"),
    "update/strategy.py",
)
READERS = {"item", "tolist", "cpu", "numpy"}
CASTS = {"float", "bool", "int"}
OFF_THE_PATH = {"__init__", "state_dict", "load_state_dict"}
ALLOWED = {
    ("update/optimizer_steps.py", "lrs"): "the rates of the parameter groups are plain numbers",
    ("update/optimizer_steps.py", "norms"): "numbers that were read already",
    ("update/strategy.py", "apply_policy"): "the count of the loss, for the error that ends the run",
    ("update/loss_tracker.py", "waiting"): "a list",
    ("update/window.py", "find_rows"): "the sizes of a PackedSequence, which lie on the host",
    ("trainer.py", "_rows_or_count"): "the count of a host batch whose rows nothing tells",
}
"""Casts on the path that touch no tensor of the device, each with its reason."""


def reading_calls(source: str) -> Iterator[tuple[str, int, str]]:
    """Calls on the path of an update that may read a tensor: (function, line, call)."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name not in OFF_THE_PATH:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and _reads(node.func):
                    yield function.name, node.lineno, ast.unparse(node)


def _reads(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in READERS
    return isinstance(function, ast.Name) and function.id in CASTS


@pytest.mark.parametrize("name", PATH)
def test_no_line_of_the_step_reads_a_tensor(name: str) -> None:
    found = [read for read in reading_calls((PACKAGE / name).read_text()) if (name, read[0]) not in ALLOWED]
    assert found == []


def test_a_line_that_reads_would_be_found() -> None:
    source = "def step(self, loss):\n    return float(loss) + loss.item()\n"
    assert [line for _, line, _ in reading_calls(source)] == [2, 2]
