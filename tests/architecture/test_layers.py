"""A package imports only those before it, no files import each other in a circle, outside packages stay in place."""

from __future__ import annotations

from pathlib import Path

import pytest
from known import CIRCLES, UPWARD
from layers import (
    LAYERS,
    PACKAGE,
    Import,
    attributes,
    circles,
    files,
    imports,
    module_of,
    name_of,
    place,
    target_place,
)

EVERYTHING = [found for path in files() for found in imports(path)]
LAZY = {"sklearn", "scipy", "matplotlib", "pandas", "optuna", "safetensors", "tensorboard", "torchvision"} | {
    "wandb",
    "mlflow",
    "PIL",
}
"""Heavy or optional: imported where they are used, inside functions."""
ESTIMATORS = "tools/sklearn_wrapper.py"
"""Its classes are scikit-learn's, and it is imported itself where they are asked for."""


def upward(found: Import) -> str | None:
    """What is wrong with an import, if anything is."""
    here, there = place(found.path), target_place(found.target)
    if found.relative:
        return f"{found.where}: a relative import"
    if found.annotation or there is None or there == here or LAYERS[there] < LAYERS[here]:
        return None
    return f"{found.where}: {here} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})"


def outside(package: str, allowed: set[str]) -> list[str]:
    """Imports and uses of an outside package in files that are not among the allowed ones."""
    wrong = [f.where for f in EVERYTHING if _is(f.target, package) and not _allowed(f.path, allowed)]
    for path in files():
        if not _allowed(path, allowed):
            wrong += [f"{path.name}:{line} {name}" for line, name in attributes(path) if _is(name, package)]
    return wrong


def _is(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _allowed(path: Path, allowed: set[str]) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return name in allowed or name.split("/")[0] in allowed


def test_every_file_has_a_layer() -> None:
    assert {place(path) for path in files()} <= set(LAYERS)


def test_imports_point_down_and_never_sideways() -> None:
    wrong = {(name_of(f.path), module_of(f.target).removeprefix("trainwright.")): upward(f) for f in EVERYTHING}
    assert [line for edge, line in wrong.items() if line is not None and edge not in UPWARD] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert [circle for circle in circles() if not any(set(circle) <= known for known in CIRCLES)] == []


def test_a_circle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (
        ("a", "def f():\n    from trainwright.b import y"),
        ("b", "from trainwright import a"),
        ("c", ""),
    ):
        (tmp_path / f"{name}.py").write_text(line + "\n")
    monkeypatch.setattr("layers.PACKAGE", tmp_path)
    assert circles() == [["a", "b"]]


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ("core/x.py", "from trainwright.modules import modes"),
        ("metrics/x.py", "from trainwright.data.row_batches import batches"),
        ("data/x.py", "import trainwright.observers.console"),
        ("fit/x.py", "from trainwright.trainer import Trainer"),
        ("fit/x.py", "def f():\n    from trainwright.tools import advise"),
        ("core/x.py", "from trainwright import Trainer"),
        ("optim/x.py", "from .clip import ClipNorm"),
    ],
)
def test_an_import_that_points_up_or_sideways_is_seen(here: str, line: str) -> None:
    assert [wrong for found in imports(PACKAGE / here, line) if (wrong := upward(found)) is not None] != []


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("torch.distributed", {"distributed"}),
        ("tqdm", {"observers/console.py", "observers/live.py"}),
        ("sklearn", {"tools", "__main__.py", "evaluation/reports.py"}),
        ("optuna", {"observers/pruning.py", "tools"}),
        ("matplotlib", {"core/figures.py"}),
        ("torch.cuda.amp", set()),
        ("torch.cpu.amp", set()),
    ],
)
def test_outside_packages_are_used_only_where_they_belong(package: str, allowed: set[str]) -> None:
    assert outside(package, allowed) == []


def test_heavy_and_optional_packages_are_imported_inside_functions() -> None:
    others = [f for f in EVERYTHING if f.path.relative_to(PACKAGE).as_posix() != ESTIMATORS]
    at_import = [f.where for f in others if f.target.split(".")[0] in LAZY and not f.inside_function]
    assert at_import == []
