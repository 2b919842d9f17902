"""Figures show the numbers that they are given, leave pyplot alone, and say what to install where it is missing."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from trainwright import (
    Cosine,
    EarlyStopping,
    Epochs,
    OneCycle,
    Plateau,
    Result,
    StepLR,
    TorchSchedule,
    Trainer,
    Updates,
)
from trainwright.core.errors import SettingError
from trainwright.core.figures import confusion_figure, history_figure, values_figure
from trainwright.observers import Best
from trainwright.schedules import Cyclic, Exponential, Linear, MultiStep, WarmupStableDecay


def lines(axes):
    """The lines of a panel that have a name, by it."""
    named = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in named}


def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes}


# --- confusion matrices


def test_a_confusion_matrix_shows_counts_in_cells_and_shares_of_the_true_class_as_colors():
    figure = confusion_figure([[6, 2], [0, 0]], ["no", "yes"])
    axes = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "6", (1, 0): "2", (0, 1): "0", (1, 1): "0"}
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25], [0, 0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["no", "yes"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")


@pytest.mark.parametrize("name", ["", "a class with a name"])
@pytest.mark.parametrize("size", [2, 20])
def test_nothing_of_a_confusion_matrix_overlaps_or_is_cut_off(size, name):
    figure = confusion_figure([[1234] * size] * size, [f"{name} {index}" for index in range(size)])
    figure.canvas.draw()
    axes = figure.axes[0]
    renderer = figure.canvas.get_renderer()
    cell = axes.get_window_extent(renderer).width / size
    assert max(text.get_window_extent(renderer).width for text in axes.texts) < cell
    whole = figure.get_tightbbox(renderer)
    width, height = figure.get_size_inches()
    assert whole.x0 >= 0 and whole.y0 >= 0 and whole.x1 <= width and whole.y1 <= height
    if name:
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {45.0}
    else:
        boxes = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_a_confusion_matrix_of_many_classes_has_colors_alone():
    axes = confusion_figure(torch.eye(100).long().tolist(), [str(index) for index in range(100)]).axes[0]
    assert not axes.texts and len(axes.get_xticklabels()) <= 40


# --- values


def test_values_are_drawn_over_the_true_ones_with_the_line_where_they_are_equal():
    target, output = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([[0.5], [2.5], [4.0]])
    axes = values_figure(target, output).axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[1.0, 0.5], [2.0, 2.5], [5.0, 4.0]]
    assert axes.get_lines()[0].get_xydata().tolist() == [[0.5, 0.5], [5.0, 5.0]]
    assert axes.get_xlim() == axes.get_ylim()


def test_values_that_cannot_be_drawn_are_counted_in_the_title():
    target = torch.tensor([[1.0, 1.0], [2.0, math.nan]])
    figure = values_figure(target, torch.tensor([[1.0, 1.0], [math.inf, 1.0]]), names=["a", "b"])
    assert [axes.get_title() for axes in figure.axes] == ["a · 1 not finite, not drawn", "b · 1 not finite, not drawn"]
    assert (
        values_figure(torch.full((2, 1), math.nan), torch.ones(2, 1)).axes[0].get_title() == "2 not finite, not drawn"
    )


def test_many_columns_share_a_panel():
    figure = values_figure(torch.rand(4, 13), torch.rand(4, 13))
    assert [axes.get_title() for axes in figure.axes] == ["all 13 columns"]
    assert len(figure.axes[0].collections[0].get_offsets()) == 52


# --- histories


def history(rows, **more):
    result = Result(history=rows, best=None, updates=0, epochs=0, stopped="", seconds=0.0)
    return Result(**{**{name: getattr(result, name) for name in result.__slots__}, **more}).plot()


ROWS = [
    {"epoch": 1, "update": 5, "loss": 3.0, "val_loss": 4.0, "accuracy": 0.1, "val_easy_accuracy": 0.2, "lr": 1.0},
    {"epoch": 2, "update": 10, "loss": 2.0, "val_loss": 3.5, "accuracy": 0.3, "val_easy_accuracy": 0.4, "lr": 0.5},
    {"epoch": 3, "update": 15, "loss": 1.0, "val_loss": math.nan, "accuracy": 0.5, "kl": 7.0, "lr": 0.1, "lr_D": 2.0},
]


def test_a_history_has_a_panel_for_losses_one_for_each_number_and_one_for_rates():
    found = {title: lines(axes) for title, axes in panels(history(ROWS)).items()}
    assert list(found) == ["loss", "accuracy", "kl", "learning rate"]
    assert found["loss"]["loss"] == ([1, 2, 3], [3.0, 2.0, 1.0])
    assert found["accuracy"] == {"accuracy": ([1, 2, 3], [0.1, 0.3, 0.5]), "val_easy_accuracy": ([1, 2], [0.2, 0.4])}
    assert found["kl"] == {"kl": ([3], [7.0])}
    assert found["learning rate"] == {"lr": ([1, 2, 3], [1.0, 0.5, 0.1]), "lr_D": ([3], [2.0])}


def test_a_nan_shows_in_a_history():
    assert lines(panels(history(ROWS))["loss"])["val_loss: not finite"][0] == [3]


def test_the_best_is_marked_in_every_panel_and_on_its_number():
    figure = history(ROWS, best=Best("val_easy_accuracy", 0.4, 2, 10))
    assert lines(panels(figure)["accuracy"])["best: 0.4 (epoch 2)"] == ([2], [0.4])
    for axes in figure.axes:
        assert [2, 2] in [list(line.get_xdata()) for line in axes.get_lines()]


def test_a_history_with_several_rows_in_an_epoch_goes_by_updates():
    rows = [{"epoch": 0, "update": 3, "loss": 2.0}, {"epoch": 0, "update": 6, "loss": 1.0}]
    axes = history(rows, best=Best("loss", 1.0, 0, 6)).axes[0]
    assert axes.get_xlabel() == "update"
    assert lines(axes)["loss"] == ([3, 6], [2.0, 1.0]) and "best: 1 (update 6)" in lines(axes)


def test_an_empty_history_is_refused():
    with pytest.raises(SettingError, match="no history to draw"):
        history_figure([])


def test_the_plot_of_a_run_shows_its_numbers(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    model = nn.Linear(3, 1)
    stopping = EarlyStopping("val_loss", patience=9)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), early_stopping=stopping, console=False
    )
    result = trainer.fit((x, x.sum(1, keepdim=True)), (x, x[:, :1]), epochs=3, batch_size=8)
    figure = result.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    assert lines(panels(figure)["loss"])["val_loss"][1] == [row["val_loss"] for row in result.history]


# --- schedules


STEPPED_BY_VALIDATIONS = TorchSchedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 2), unit="validation")


def drawn(schedule, **settings):
    axes = schedule.plot(**settings).axes[0]
    return [list(line.get_ydata()) for line in axes.get_lines()]


def test_every_group_is_drawn_from_its_own_rate():
    one, other = drawn(Linear(), updates=10, lr=[1.0, 0.5])
    assert one == [2 * rate for rate in other] == pytest.approx([1 - u / 10 for u in range(10)])


def test_epochs_are_those_that_were_given():
    assert drawn(StepLR(Epochs(2)), updates=12, updates_per_epoch=3)[0] == pytest.approx([1.0] * 6 + [0.1] * 6)
    stepped = TorchSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), unit="epoch")
    assert drawn(stepped, updates=12, updates_per_epoch=3)[0] == pytest.approx([1.0] * 6 + [0.1] * 6)


@pytest.mark.parametrize(
    "schedule",
    [
        *(OneCycle(max_lr=1.0), Cosine(warmup=0.1), Linear(), Cyclic(0.1, 1.0, step_size_up=Updates(5))),
        *(StepLR(Updates(5)), Exponential(0.9), MultiStep([0.5]), WarmupStableDecay(warmup=0.1, decay=0.2)),
        TorchSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_every_schedule_of_the_clock_draws_what_bind_gives(schedule):
    from trainwright.core.plan import Plan
    from trainwright.schedules.table import BareOptimizer

    optimizer = BareOptimizer([{"lr": 0.2}])
    rates = schedule.bind(optimizer, Plan(max_updates=20, epoch_updates=4))
    expected = []
    for update in range(20):
        rates.apply(update)
        expected.append(optimizer.param_groups[0]["lr"])
    assert drawn(schedule, updates=20, lr=0.2, updates_per_epoch=4) == [expected]


@pytest.mark.parametrize(
    ("schedule", "settings", "said"),
    [
        (Plateau("val_loss"), {"updates": 9}, "depend on the validations of a run.*\n.*result.plot"),
        (STEPPED_BY_VALIDATIONS, {"updates": 9}, "depend on the validations of a run"),
        (Exponential(0.9), {"updates": 9}, r"counts epochs.*\n.*plot\(updates=9, updates_per_epoch=100\)"),
        (MultiStep([Epochs(1)]), {"updates": 9}, "counts epochs"),
        (Linear(), {"updates": 0}, r"plot\(updates=0\)"),
        (Linear(), {"updates": 5, "updates_per_epoch": 1.5}, r"plot\(updates_per_epoch=1.5\)"),
        (Linear(), {"updates": 5, "lr": "high"}, "plot.lr='high'"),
        (Linear(), {"updates": 5, "path": "rates.xyz"}, r"ends in .*\.png"),
    ],
)
def test_what_cannot_be_drawn_is_refused(schedule, settings, said):
    with pytest.raises(SettingError, match=said):
        schedule.plot(**settings)


# --- the process around


def test_a_figure_shows_itself_in_a_notebook():
    assert Linear().plot(updates=5)._repr_png_().startswith(b"\x89PNG")


@pytest.mark.slow
def test_drawing_leaves_pyplot_and_its_backend_alone():
    script = (
        "import sys, trainwright as t; assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; now = lambda: {name: matplotlib.rcParams._get(name) for name in matplotlib.rcParams}\n"
        "before = now(); t.OneCycle(max_lr=1.0).plot(updates=9)._repr_png_()\n"
        "assert 'matplotlib.pyplot' not in sys.modules and now() == before"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match=r'pip install matplotlib   # or pip install "\.\[plot\]"'):
        Linear().plot(updates=5)


def short_fit():
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), console=False)
    return trainer.fit((torch.ones(4, 2), torch.ones(4, 1)), batch_size=2, epochs=1)


def test_a_fit_whose_caller_will_plot_warns_at_its_begin_where_matplotlib_is_missing(monkeypatch, tmp_path):
    def script(plots):
        result = short_fit()
        if plots:
            result.plot(tmp_path / "history.png")

    script(plots=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"test_figures.py, script calls plot(.|\n)*pip install matplotlib"):
        script(plots=False)
    short_fit()  # nothing here plots: no warning
