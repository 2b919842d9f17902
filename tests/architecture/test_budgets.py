"""How much of the source a reader must enter: sizes, circles, names, and the code that runs on four walks.

A walk is every function of the package that is entered between two forwards of a user's network; its figure is the
code lines of these functions. The limits fall as the source does: a goal is where they are to end.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from layers import PACKAGE, circles, files, imports, module_of, name_of
from torch import nn

import trainwright
from trainwright import EMA, Checkpoint, ClipNorm, EarlyStopping, OneCycle, Trainer, accuracy, batches


@dataclass(frozen=True)
class Budget:
    """The limit of a figure at present, and its goal."""

    limit: float
    goal: float


BUDGETS = {
    "code lines": Budget(29_020, 22_000),
    "files": Budget(185, 150),
    "files in one folder": Budget(19, 16),
    "largest file": Budget(600, 600),
    "files below 40 code lines": Budget(8, 8),
    "circles": Budget(0, 0),
    "modules with one importer": Budget(35, 45),
    "top-level names": Budget(58, 60),
    "class names used twice": Budget(0, 0),
    "hasattr and getattr with a default": Budget(170, 170),
}
WALKS = {
    "one update, empty slots": Budget(302, 300),  # `fit` has two arguments more: validate_at_start, max_val_batches
    "fit to the second update, empty slots": Budget(1_650, 1_600),
    "one update, all slots": Budget(589, 500),
    "end of an epoch, all slots": Budget(2_170, 1_900),
    "resume to the first forward, all slots": Budget(3_533, 2_900),
}


def code_lines(path: Path) -> set[int]:
    """The numbers of the lines of a file that hold code: no docstring, comment or blank line."""
    source = path.read_text()
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return {number for number, line in lines if line.strip() and not line.strip().startswith("#")} - documented


def static() -> dict[str, float]:
    """The figures that the sources alone give."""
    sizes = {path: len(code_lines(path)) for path in files()}
    unlike = {path: size for path, size in sizes.items() if path.name != "__init__.py"}
    trees = [ast.walk(ast.parse(path.read_text())) for path in files()]
    nodes = [node for tree in trees for node in tree]
    edges = {
        (name_of(path), module_of(found.target))
        for path in unlike
        for found in imports(path)
        if found.target.startswith("trainwright.") and not found.annotation
    }
    importers = Counter(target for name, target in edges if f"trainwright.{name}" != target)
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = [
        call
        for call in calls
        if isinstance(call.func, ast.Name)
        and (call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3))
    ]
    assert statistics.median(unlike.values()) >= 80
    return {
        "code lines": sum(sizes.values()),
        "files": len(sizes),
        "files in one folder": max(Counter(path.parent for path in unlike).values()),
        "largest file": max(sizes.values()),
        "files below 40 code lines": sum(size < 40 for size in unlike.values()),
        "circles": len(circles()),
        "modules with one importer": sum(importers[f"trainwright.{name_of(path)}"] == 1 for path in unlike),
        "top-level names": len(trainwright.__all__),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "hasattr and getattr with a default": len(asked),
    }


def test_no_figure_of_the_source_is_over_its_budget() -> None:
    found = static()
    assert {name: value for name, value in found.items() if value > BUDGETS[name].limit} == {}
    assert set(found) == set(BUDGETS)


@dataclass
class Walk:
    """Every function of the package that is entered while it is on."""

    seen: set[tuple[str, int]] = field(default_factory=set)

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(f"{PACKAGE}/") or frame.f_code.co_name.startswith("<"):
            return None
        self.seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        return self.trace

    def start(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
                frame.f_trace = self.trace
            frame = frame.f_back
        sys.settrace(self.trace)

    def to_read(self) -> int:
        """The code lines of these functions, bodies of `raise` left out."""
        total = 0
        for file in {file for file, _ in self.seen}:
            lines, taken = code_lines(Path(file)), set()
            for node in ast.walk(ast.parse(Path(file).read_text())):
                if not isinstance(node, ast.FunctionDef):
                    continue
                first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
                if {(file, first), (file, node.lineno)} & self.seen:
                    raised = {
                        line
                        for one in ast.walk(node)
                        if isinstance(one, ast.Raise)
                        for line in range(one.lineno + 1, (one.end_lineno or 0) + 1)
                    }
                    taken |= {line for line in lines - raised if first <= line <= (node.end_lineno or 0)}
            total += len(taken)
        return total


class Net(nn.Module):
    """One layer that calls `at` with the number of each forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.forwards = nn.Linear(8, 3), 0
        self.at: Callable[[int], None] = lambda number: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            self.at(self.forwards)
        out: torch.Tensor = self.layer(x)
        return out


def full(directory: Path, **saving: Any) -> dict[str, Any]:
    return {
        "metrics": {"accuracy": accuracy},
        "precision": "fp16",
        "accumulate": 4,
        "clip": ClipNorm(1.0),
        "schedule": OneCycle(max_lr=1e-3),
        "average": EMA(0.9),
        "early_stopping": EarlyStopping("val_loss", patience=50),
        "checkpoint": Checkpoint(directory, best="val_loss", **saving),
    }


def walked(slots: dict[str, Any], begin: int, end: int, *, epochs: int = 3, resume: str | None = None) -> int:
    """The code lines to read between two forwards; from the call of `fit` where `begin` is 0."""
    torch.manual_seed(0)
    rows, classes = torch.randn(256, 8), torch.randint(0, 3, (256,))
    net, walk = Net(), Walk()

    def at(number: int) -> None:
        if number == end:
            sys.settrace(None)
        elif number == begin:
            walk.start()

    net.at = at
    trainer = Trainer(net, torch.optim.AdamW(net.parameters()), nn.CrossEntropyLoss(), console=False, **slots)
    data = batches((rows, classes), 16, shuffle=True, seed=1), batches((rows, classes), 64)
    if not begin:
        walk.start()
    try:
        trainer.fit(*data, epochs=epochs, resume=resume)
    finally:
        sys.settrace(None)
    return walk.to_read()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:schedule re-planned")
def test_no_walk_is_over_its_budget(tmp_path: Path) -> None:
    saves = {"async_save": False}
    found = {
        "one update, empty slots": walked({}, 20, 21),
        "fit to the second update, empty slots": walked({}, 0, 2),
        "one update, all slots": walked(full(tmp_path / "a", **saves), 37, 41),
        "end of an epoch, all slots": walked(full(tmp_path / "b", **saves), 32, 33),
    }
    walked(full(tmp_path / "c"), 10**9, 10**9, epochs=2)
    found["resume to the first forward, all slots"] = walked(full(tmp_path / "c"), 0, 1, epochs=4, resume="auto")
    print(found)
    assert {name: value for name, value in found.items() if value > WALKS[name].limit} == {}
    assert set(found) == set(WALKS)
