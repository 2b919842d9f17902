"""The step reads no number back from a tensor outside `core/host_reads.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import PACKAGE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import MixedPrecision, Observer, OneCycle, Trainer, accuracy
from trainwright.observers import Update

PATH = (
    *("trainer.py", "fit/run.py", "update/optimizer_steps.py", "update/reporter.py", "update/loss_tracker.py"),
    *("update/window.py", "optim/gradients.py", "precision/mixed_precision.py", "update/nonfinite_policy.py"),
)
READERS = {"item", "tolist", "cpu", "numpy"}
CASTS = {"float", "bool", "int"}
OFF_THE_PATH = {"__init__", "state_dict", "load_state_dict"}
ALLOWED = {
    ("update/optimizer_steps.py", "lrs"): "the rates of the parameter groups are plain numbers",
    ("update/optimizer_steps.py", "norms"): "numbers that were read already",
    ("fit/run.py", "judge"): "whether an update was applied, as the host knows it",
    ("update/loss_tracker.py", "waiting"): "a list",
    ("update/window.py", "find_rows"): "the sizes of a PackedSequence, which lie on the host",
    ("trainer.py", "_rows_or_count"): "the count of a host batch whose rows nothing tells",
}
"""Casts on the path that touch no tensor of the device, each with its reason."""
HOST = {
    ("update/losses.py", "count_targets"): "targets on the host are counted before the batch is moved",
    ("metrics/totals.py", "_add"): "terms that lie on the host are added there: there is nothing to wait for",
}
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"}


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


class Reads(TorchDispatchMode):
    """Notes which file of the package reads numbers from tensors, between `fit` and the end of an update."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the innermost frame that is the package's own."""
        frame: Any = sys._getframe(1)
        stack = []
        while frame is not None:
            if frame.f_code.co_name != "__torch_function__":  # a mode that looks on lies between a caller and torch
                stack.append((Path(frame.f_code.co_filename), frame.f_code.co_name))
            frame = frame.f_back
        ours = [(path.relative_to(PACKAGE).as_posix(), name) for path, name in stack if path.is_relative_to(PACKAGE)]
        if ours and "fit" in {name for _, name in ours} and "_between_updates" not in {name for _, name in ours}:
            self.seen.add(ours[0])


class Watching(Observer):
    """Asks for everything that is told of an update."""

    wants = frozenset({"grad_norm"})

    def on_update(self, update: Update) -> None:
        assert isinstance(update.loss, float)


class Logging(Trainer[nn.Module]):
    """Logs a tensor of its own."""

    def training_step(self, batch: Any) -> Any:
        self.log("size", batch[0].abs().mean())
        return super().training_step(batch)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Reads by dispatch, and by the methods that copy to the host without one."""
    noted = Reads()

    def noting(name: str) -> Any:
        real = getattr(Tensor, name)

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            noted.note()
            return real(self, *args, **kwargs)

        return method

    for name in ("numpy", "tolist", "cpu", "__array__"):
        monkeypatch.setattr(Tensor, name, noting(name))
    with noted:
        yield noted


@pytest.mark.parametrize("precision", [None, "bf16", MixedPrecision("fp16", init_scale=2.0**8)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_only_late_reads_in_a_fit_with_everything_on(reads: Reads, precision: Any, accumulate: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    trainer = Logging(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        precision=precision,
        accumulate=accumulate,
        clip=1.0,
        schedule=OneCycle(max_lr=0.1),
        console=False,
        observers=[Watching()],
    )
    data = [(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in (8, 8, 5, 8, 8, 8, 3)]
    result = trainer.fit(data, epochs=2)
    assert result.updates == 2 * -(-len(data) // accumulate)
    assert ("core/host_reads.py", "read") in reads.seen
    assert {read for read in reads.seen if read[0] != "core/host_reads.py"} - set(HOST) == set()


@pytest.mark.parametrize("how", ["item", "float", "bool", "tolist", "numpy", "cpu"])
def test_a_read_in_the_step_would_be_noted(reads: Reads, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.optim.gradients import Gradients

    real = Gradients.zero
    namespace: dict[str, Any] = {"real": real}
    code = {"float": "float(p)", "bool": "bool(p)"}.get(how, f"p.{how}()")
    source = f"def zero(self):\n    p = self.parameters[0].detach().sum()\n    {code}\n    return real(self)\n"
    exec(compile(source, str(PACKAGE / "optim" / "gradients.py"), "exec"), namespace)
    monkeypatch.setattr(Gradients, "zero", namespace["zero"])
    model = nn.Linear(4, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    trainer.fit([(torch.randn(8, 4), torch.randint(0, 3, (8,)))], epochs=1)
    assert ("optim/gradients.py", "zero") in reads.seen
