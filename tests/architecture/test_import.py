"""`import trainwright` is light: it brings its own modules, a few of the standard library's, and nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("sklearn", "scipy", "matplotlib", "pandas", "safetensors", "torch._dynamo", "torch.distributed.fsdp")
MOST_OTHERS = 8
"""Modules of the standard library that torch has not imported already."""
SCRIPT = "import json, sys; import {first}; before = set(sys.modules); {then}; print(json.dumps(sorted({what})))"


def modules(first: str, then: str = "pass", what: str = "before") -> set[str]:
    """The modules of a fresh process."""
    script = SCRIPT.format(first=first, then=then, what=what)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_adds_nothing_heavy_to_what_torch_brings() -> None:
    torchs = modules("torch")
    added = modules("torch", "import trainwright", "set(sys.modules) - before")
    heavy = {name for name in added for package in HEAVY if name == package or name.startswith(package + ".")}
    assert "trainwright.trainer" in added
    assert heavy == set()
    others = {name for name in added - torchs if not name.startswith("trainwright")}
    assert len(others) <= MOST_OTHERS, sorted(others)


def test_it_can_be_imported_before_torch() -> None:
    assert "torch" in modules("trainwright")
