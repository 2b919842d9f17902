"""Runs a script, or the code of pages of the docs, on a machine whose GPU is the emulated device.

python on_apart.py LIBRARY script SCRIPT [ARGUMENTS]
python on_apart.py LIBRARY pages PAGE...          # prints a line of JSON for each: its name, and what failed
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import apart
import torch

NOT_HERE = "opcheck("
"""What compiles, which torch does for devices that it knows."""


def script(path: str, *arguments: str) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does."""
    sys.argv, sys.path[0] = [path, *arguments], str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")


def pages(*names: str) -> None:
    """Run the blocks of each page, in a directory of its own."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import test_docs

    by_name = {page.relative_to(test_docs.ROOT).as_posix(): page for page in test_docs.PAGES}
    for name in names:
        failed = ""
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
            os.chdir(directory)
            namespace: dict[str, Any] = {"__name__": "__main__"}
            try:
                for block in test_docs.blocks(by_name[name]):
                    if block.reason is None and NOT_HERE not in block.code:
                        test_docs.run(block, namespace)
            except Exception:
                failed = traceback.format_exc()
            os.chdir("/")
        print(json.dumps([name, failed]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    apart.install(sys.argv[1])
    {"script": script, "pages": pages}[sys.argv[2]](*sys.argv[3:])
