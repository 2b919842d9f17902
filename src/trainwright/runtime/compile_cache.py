"""What torch has compiled, kept in a directory that the user names, from one process to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainwright.base.errors import SettingError, message
from trainwright.runtime.files import replace_file

NAME = "compiled.bin"
"""The one file in the directory. Torch loads it by pickle: whoever may write there runs code in this process."""


@contextmanager
def kept_in(directory: Path | None, *, saves: bool = True) -> Iterator[None]:
    """Load what the directory holds; where nothing goes wrong inside, keep there what was compiled meanwhile."""
    if directory is None:
        yield
        return
    path = directory / NAME
    if path.is_file():
        torch.compiler.load_cache_artifacts(path.read_bytes())
    yield
    kept = torch.compiler.save_cache_artifacts() if saves else None
    if kept is not None:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, kept[0])


def check_apart(cache: Path | None, checkpoints: Path | None) -> None:
    """Refuse a cache in or around a directory of checkpoints, which are loaded without running code; SettingError."""
    if cache is None or checkpoints is None:
        return
    here, there = cache.resolve(), checkpoints.resolve()
    if here == there or here in there.parents or there in here.parents:
        what = f"Fast(compile={{'cache': {str(cache)!r}}}) beside checkpoints: torch unpickles it, which runs code"
        have = f"checkpoints in {checkpoints}"
        fix = "Fast(compile={'cache': 'compiled'})"
        raise SettingError(message(what, have=have, want="a directory of its own, that you alone write", fix=fix))
