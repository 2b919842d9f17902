"""Notebooks: records as escaped tables, a bar that does not flood the cell, and an interrupted cell that runs again."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Plan, Result, Trainer, advise
from trainwright.core.records import Best

x, y = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def trained() -> tuple[Trainer[nn.Module], Result]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    return trainer, trainer.fit((x, y), (x, y), epochs=15, batch_size=16)


class Cells(HTMLParser):
    """The texts of the cells; every tag is closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.styles += [value or "" for name, value in attrs if name == "style"]
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_result_shows_its_end_and_its_last_rows() -> None:
    _, result = trained()
    cells = Cells(result._repr_html_())
    assert {"end", "epochs=15 reached", "val_loss", "3 earlier rows are not shown."} <= set(cells.texts)
    assert f"{result.history[-1]['val_loss']:.4g}" in cells.texts
    assert f"{result.history[2]['val_loss']:.4g}" not in cells.texts


def test_a_trainer_a_plan_a_report_and_advice_show_tables() -> None:
    trainer, _ = trained()
    assert {"CrossEntropyLoss()", "SGD", "60"} <= set(Cells(trainer._repr_html_()).texts)
    assert {"batch_size", "16", "epochs", "2"} <= set(
        Cells(trainer.plan((x, y), epochs=2, batch_size=16)._repr_html_()).texts
    )
    assert {"precision", "recall", "macro avg", "accuracy"} <= set(Cells(trainer.report((x, y))._repr_html_()).texts)
    assert "rows/s" in Cells(advise(trainer, (x, y), seconds=0.5, batch_size=16)._repr_html_()).texts


def test_a_report_on_values_shows_them_too() -> None:
    model = nn.Linear(4, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    assert {"R2", "MAE", "RMSE", "0", "1", "all"} <= set(Cells(trainer.report((x, x[:, :2]))._repr_html_()).texts)


def test_text_is_escaped_and_no_color_is_set() -> None:
    evil = "<script>alert('&')</script>"
    result = Result(
        [{"epoch": 1.0, "update": 1.0, evil: 1.0}], Best(evil, 1.0, 1, 1), 1, 1, evil, 1.0, notes=(evil, evil)
    )
    for shown in (result._repr_html_(), Plan(model=evil, settings=(evil,))._repr_html_()):
        cells = Cells(shown)
        assert "<script" not in shown
        assert evil in cells.texts
        assert not any("color" in style or "background" in style for style in cells.styles)


SLOW = """
import os, signal, threading, time
import torch
from torch import nn
from trainwright import Trainer

x, y = torch.randn(400, 8), torch.arange(400) % 3

class Slow(Trainer):
    def after_update(self):
        time.sleep(0.01)

def made():
    model = nn.Linear(8, 3)
    return Slow(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
"""
INTERRUPTED = """
trainer = made()
threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
trainer.fit((x, y), epochs=1000, batch_size=4)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client and the kernel, not of this package
def test_in_a_kernel_the_bar_is_one_output_and_an_interrupted_cell_runs_again() -> None:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    cells = [
        *(SLOW, "result = made().fit((x, y), epochs=2, batch_size=4)", "result", "result.plot()"),
        *(
            INTERRUPTED,
            "made().fit((x, y), epochs=1, batch_size=4).stopped",
            "trainer.fit((x, y), epochs=1, batch_size=4).stopped",
        ),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    bars: list[str] = []
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    shown = client.process_message

    def watch(message: Any, *rest: Any) -> Any:
        if message["header"]["msg_type"] in ("display_data", "update_display_data"):
            bars.append(message["content"]["data"].get("text/plain", ""))
        return shown(message, *rest)

    client.process_message = watch
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.source == INTERRUPTED:
                with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                    client.execute_cell(cell, index)
            else:
                client.execute_cell(cell, index)
    _, fit, result, plot, _, again, further = (cell.outputs for cell in notebook.cells)
    texts = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "\r" not in texts
    assert [output.data["text/plain"] for output in fit if output.output_type == "display_data"] == [""]
    assert any("epoch 2/2" in bar and "left" in bar for bar in bars)
    assert len([bar for bar in bars if "/2 " in bar]) <= 20
    assert "<table>" in result[0].data["text/html"]
    assert "image/png" in plot[0].data
    assert [cell[-1].data["text/plain"] for cell in (again, further)] == 2 * ["'epochs=1 reached'"]
