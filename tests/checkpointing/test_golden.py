"""A checkpoint of each format that was released is resumed from; another format is refused in test_damage.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from make_golden import GOLDEN, SAVED_AT, fit

from trainwright import load_weights
from trainwright.checkpointing.format import FORMAT_VERSION

FOLDERS = sorted(GOLDEN.glob("format-*"))
SAVED = f"update-{SAVED_AT:010}"


def test_the_current_format_has_a_golden_checkpoint() -> None:
    assert f"format-{FORMAT_VERSION}" in [folder.name for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_golden_checkpoint_is_resumed_to_the_end_of_its_run(folder: Path, tmp_path: Path) -> None:
    """Counters and the rows before the save are equal; what is computed after it, within the rounding of kernels."""
    shutil.copytree(folder / SAVED, tmp_path / SAVED)
    result, model = fit(tmp_path, resume="auto")
    history = json.loads((folder / "history.json").read_text())
    assert [(row["epoch"], row["update"]) for row in result.history] == [
        (row["epoch"], row["update"]) for row in history
    ]
    before = [row for row in history if row["update"] <= SAVED_AT]
    assert before and result.history[: len(before)] == before
    for row, stated in zip(result.history, history, strict=True):
        assert row == pytest.approx(stated, rel=1e-4, abs=1e-6)
    end = load_weights(folder / "end.safetensors")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, end[name], rtol=1e-4, atol=1e-6)
