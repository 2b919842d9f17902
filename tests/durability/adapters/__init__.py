"""What a library must be able to do to be tried: one module with these four names."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Protocol

from ..task import Task, Tell

SHIPPED = ("trainwright", "torch_save", "accelerate")


class Adapter(Protocol):
    """A module that trains with one library.

    It may import its library only inside functions, but for `WARM`: modules that are imported once, before forking.
    """

    LIBRARY: str
    """Its name in tables."""
    WORDS: frozenset[str]
    """Words that a variant may be made of, such as "background" or "workers"."""
    WARM: tuple[str, ...]
    """Modules to import before the first fork."""

    # WRITES_WITH_OS = True, where it writes by the functions of `os` alone: then they can be made to fail, and logged.

    def train(self, task: Task, directory: Path, tell: Tell, *, words: frozenset[str]) -> None:
        """Run the user's script: go on with what is in `directory` by the documented route, else start; train on.

        `tell` every state that training goes on from, every update, every acknowledged save, and the end.
        """

    def checkpoints(self, directory: Path) -> list[Path]:
        """Files or directories of the checkpoints there, newest first, for those who damage them."""
        ...


def load(name: str) -> Adapter:
    """The adapter of that name, or in the file at that path."""
    if name in SHIPPED:
        module = importlib.import_module(f".of_{name}", __package__)
    else:
        spec = importlib.util.spec_from_file_location("own_adapter", name)
        if spec is None or spec.loader is None or not Path(name).is_file():
            raise SystemExit(f"--adapter {name}: neither one of {', '.join(SHIPPED)} nor the path of a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module  # type: ignore[return-value]


def words_of(adapter: Adapter, variant: str) -> frozenset[str]:
    """The words of a variant as it is written, such as "background+workers"."""
    words = frozenset(filter(None, variant.split("+")))
    if unknown := words - adapter.WORDS:
        raise SystemExit(
            f"{adapter.LIBRARY} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(adapter.WORDS))}"
        )
    return words
