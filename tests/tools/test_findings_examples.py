"""The bundled workloads have none of the known mistakes, and findings in them are quick."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from looked_at import found

from trainwright.tools.trial import ready

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("workload", ["mlp", "cnn", "text"])
def test_nothing_is_found_in_the_bundled_workloads(workload: str) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = runpy.run_path(str(EXAMPLES / "advise.py"))
    trainer, loader = names[workload]()
    batches = ready(trainer, loader, updates=3)
    begun = time.thread_time()
    assert found(trainer, batches, train=loader, val=loader) == {}
    assert time.thread_time() - begun < 20
