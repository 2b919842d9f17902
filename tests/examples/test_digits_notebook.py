"""The notebook of the examples runs, and its outputs are those that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from loading import EXAMPLES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client and the kernel, not of this package
def test_the_notebook_runs_and_its_outputs_are_those_that_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = EXAMPLES / "digits.ipynb"
    committed, again = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(again, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    last = [[cell.outputs[-1].output_type for cell in one.cells if cell.get("outputs")] for one in (committed, again)]
    assert last[0] == last[1]
    assert len(last[0]) == 7
    report = [cell.outputs[0].data["text/plain"] for cell in (committed.cells[10], again.cells[10])]
    assert "accuracy" in report[0]
    assert report[0].splitlines()[-3:] == report[1].splitlines()[-3:]
    assert "\\r" not in path.read_text()
