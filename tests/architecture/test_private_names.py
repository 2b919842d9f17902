"""Private names of torch are used in one file, core/torch_private.py, which says for which versions they were tried."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from layers import PACKAGE, files

HOME = PACKAGE / "core" / "torch_private.py"
TORCHS = {"_buffers", "_metadata", "_modules", "_parameters", "_version"}
"""Names of torch's that classes of ours have as well."""
OTHERS = {
    *("_replace", "_asdict", "_fields", "_make", "_getframe", "_exit", "_current_frames"),  # Python documents them
    *("_inheriting", "_threads_queues"),  # multiprocessing, concurrent.futures
    *("_bit_generator", "_inst", "_rand"),  # NumPy's global generator, Python's
    *("_computed", "_reductions", "_to_sync", "_update_count"),  # torchmetrics
}
"""Private or underscored names of other packages."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Every name that the package itself defines: functions, classes, variables, attributes."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign(path: Path, tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The uses of private names of others in a file."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        elif (
            isinstance(node, ast.Attribute)
            and not _is_self(node.value)
            and (node.attr in TORCHS or node.attr not in own)
        ):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and one.value not in own]
        for name in names:
            if (
                is_private(str(name)) and name not in OTHERS and not name.startswith("_foreach_")
            ):  # torch documents these
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"


def uses(sources: dict[Path, str]) -> dict[str, list[str]]:
    """The uses of private names of torch's in sources of the package, by file."""
    trees = {path: ast.parse(text) for path, text in sources.items() if path != HOME}
    own = own_names(list(trees.values()))
    found = {path.relative_to(PACKAGE).as_posix(): list(foreign(path, tree, own)) for path, tree in trees.items()}
    return {name: lines for name, lines in found.items() if lines}


def test_private_names_of_torch_are_used_in_one_file() -> None:
    found = uses({path: path.read_text() for path in files()})
    assert [line for lines in found.values() for line in lines] == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch._utils import ExceptionWrapper",
        "import torch._dynamo",
        "torch._fused_adam_([])",
        "module._buffers.clear()",
        "getattr(loader, '_tasks_outstanding', 0)",
    ],
)
def test_a_private_name_elsewhere_is_found(line: str) -> None:
    path = PACKAGE / "core" / "trees.py"
    assert list(uses({path: f"{line}\ntorch._foreach_add_([], 1)\n"})) == ["core/trees.py"]
    assert uses({path: "self._buffers = {}\nself._buffers.clear()\n"}) == {}
