"""The bundled workloads have none of the known mistakes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from looked_at import found

from trainwright.tools import findings_data
from trainwright.tools.trial import ready

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("workload", ["mlp", "cnn", "text"])
def test_nothing_is_found_in_the_bundled_workloads(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings_data, "update_seconds", lambda _, batches: float(len(batches[0][0])))  # of a quick one
    torch.manual_seed(0)
    names: dict[str, Any] = runpy.run_path(str(EXAMPLES / "advise.py"))
    trainer, loader = names[workload]()
    batches = ready(trainer, loader, updates=3)
    assert found(trainer, batches, train=loader, val=loader) == {}
