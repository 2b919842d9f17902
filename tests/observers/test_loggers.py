"""Loggers of every kind: what the tracker holds, read back by its own package, and that none of them stops a run."""

from __future__ import annotations

import copy
import csv
import json
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from observers.test_tensorboard import Killed, data, hits, made, x, y
from observers.test_tensorboard import read as read_tensorboard
from trainwright import Checkpoint, Observer, Probe, SettingError, TensorBoardLogger, Updates, batches
from trainwright.observers import CSVLogger, Logger, MLflowLogger, WandbLogger
from trainwright.testing import check_observer

Numbers = dict[str, list[tuple[int, float]]]

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # in mlflow's own tables


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow keeps pictures in the current directory, beside a store in a database
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def csv_at(where: Path, **settings: Any) -> Logger:
    return CSVLogger(where / "numbers.csv", **settings)


def tensorboard_at(where: Path, **settings: Any) -> Logger:
    return TensorBoardLogger(where / "board", **settings)


def wandb_at(where: Path, **settings: Any) -> Logger:
    return WandbLogger("digits", directory=where, **settings)


def mlflow_at(where: Path, **settings: Any) -> Logger:
    return MLflowLogger("digits", tracking_uri=f"sqlite:///{where}/numbers.db", **settings)


def read_csv(where: Path) -> Numbers:
    numbers: Numbers = {}
    with (where / "numbers.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            update = int(row.pop("update"))
            for name, value in row.items():
                if value:
                    numbers.setdefault(name, []).append((update, float(value)))
    return numbers


def wandb_records(where: Path) -> list[Any]:
    """The records of all offline runs; a process of W&B's own writes them, until a moment after the end."""
    records = []
    for file in sorted(where.rglob("*.wandb")):
        deadline, found = time.monotonic() + 30, list(wandb_log(file))
        while "exit" not in [one.WhichOneof("record_type") for one in found]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            found = list(wandb_log(file))
        records += found
    return records


def wandb_log(file: Path) -> Iterator[Any]:
    """The records of a file in the form of LevelDB's log, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # a header does not cross the end of a block
            at += 32768 - at % 32768
        _, length, form = struct.unpack("<IHB", content[at : at + 7])  # 1: complete, 2 to 4: first, middle, last
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if form in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def plain(item: Any) -> Any:
    return json.loads(item.value_json)


def read_wandb(where: Path) -> Numbers:
    numbers: Numbers = {}
    for record in wandb_records(where):
        row = {item.key or ".".join(item.nested_key): plain(item) for item in record.history.item}
        for name, value in row.items():
            if name != "update" and not name.startswith("_"):
                numbers.setdefault(name, []).append((row["update"], value))
    return numbers


def mlflow_runs(where: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{where}/numbers.db")
    return client, list(client.search_runs([client.get_experiment_by_name("digits").experiment_id]))


def read_mlflow(where: Path) -> Numbers:
    client, (run,) = mlflow_runs(where)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(one.step, one.value) for one in history] for name, history in histories.items()}


KINDS: dict[str, tuple[Callable[..., Logger], Callable[[Path], Numbers]]] = {
    "csv": (csv_at, read_csv),
    "tensorboard": (tensorboard_at, lambda where: read_tensorboard(where / "board")),
    "wandb": (wandb_at, read_wandb),
    "mlflow": (mlflow_at, read_mlflow),
}
EACH = pytest.mark.parametrize(
    "kind", ["csv", "tensorboard", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wandb", "mlflow"))]
)
DROPS = ("csv", "tensorboard")
"""The stores that can drop what was written after a checkpoint."""


class Seen(Observer):
    def __init__(self) -> None:
        self.updates: list[Any] = []

    def on_update(self, update: Any) -> None:
        self.updates.append(update)


@EACH
def test_a_tracker_holds_every_number_of_a_run(kind: str, tmp_path: Path) -> None:
    at, read = KINDS[kind]
    seen = Seen()
    trainer = made(at(tmp_path, every=Updates(1)), seen, clip=1.0, metrics={"right": hits})
    history = trainer.fit(data(), batches((x, y), 20), epochs=2).history
    shown = read(tmp_path)
    assert set(shown) == {"loss", "lr", "grad_norm", "val_loss", "val_right", "epoch/loss", "epoch/right"}
    for name in ("loss", "lr", "grad_norm"):
        assert shown[name] == [(one.update, pytest.approx(getattr(one, name), rel=1e-6)) for one in seen.updates]
    for tag, name in (("val_loss", "val_loss"), ("epoch/loss", "loss"), ("val_right", "val_right")):
        assert shown[tag] == [(row["update"], pytest.approx(row[name], rel=1e-6)) for row in history]


@EACH
def test_a_resumed_run_continues_in_the_same_place(kind: str, tmp_path: Path) -> None:
    at, read = KINDS[kind]

    def run(cls: Any, name: str) -> None:
        checkpoint = Checkpoint(tmp_path / name / "kept", every=Updates(10))
        logger = at(tmp_path / name, every=Updates(1))
        made(logger, cls=cls, checkpoint=checkpoint).fit(data(), data(), epochs=2, validate=Updates(3), resume="auto")

    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    with pytest.raises(OSError, match="gone"):
        run(Killed, "killed")
    assert [step for step, _ in read(tmp_path / "killed")["loss"]] == list(range(1, 13))
    run(made_by := type("Whole", (Killed,), {"at": -1}), "killed")
    run(made_by, "whole")
    shown, whole = read(tmp_path / "killed"), read(tmp_path / "whole")
    if kind in DROPS:
        assert shown == whole
    assert {name: sorted(set(points)) for name, points in shown.items()} == whole
    if kind == "wandb":
        assert len({record.run.run_id for record in wandb_records(tmp_path / "killed") if record.run.run_id}) == 1
    if kind == "mlflow":
        assert len(mlflow_runs(tmp_path / "killed")[1]) == 1


@EACH
def test_the_stages_of_a_run_follow_one_another(kind: str, tmp_path: Path) -> None:
    at, read = KINDS[kind]
    trainer = made(at(tmp_path, every=Updates(1)))
    trainer.fit(data(), epochs=1)
    trainer.fit(data(), epochs=1)
    assert [step for step, _ in read(tmp_path)["loss"]] == list(range(1, 21))


@EACH
def test_another_run_is_not_mixed_with_the_one_before(kind: str, tmp_path: Path) -> None:
    at, read = KINDS[kind]
    logger = at(tmp_path, every=Updates(1))
    made(logger).fit(data(), epochs=2)
    made(logger).fit(data(), epochs=1)
    if kind in DROPS:
        assert [step for step, _ in read(tmp_path)["loss"]] == list(range(1, 11))
    elif kind == "mlflow":
        assert len(mlflow_runs(tmp_path)[1]) == 2
    else:
        assert len({record.run.run_id for record in wandb_records(tmp_path) if record.run.run_id}) == 2


@EACH
def test_the_run_is_the_same_one_without_a_logger(kind: str, tmp_path: Path) -> None:
    check_observer(KINDS[kind][0](tmp_path, every=Updates(1)))


@EACH
def test_a_nan_is_a_nan_and_a_skipped_update_has_no_step(kind: str, tmp_path: Path) -> None:
    at, read = KINDS[kind]
    bad = x.clone()
    bad[9] = math.nan
    source = batches((bad, y), 4, shuffle=False)
    (tmp_path / "skips").mkdir()
    made(at(tmp_path / "skips", every=Updates(1)), on_nonfinite="skip").fit(source, epochs=1)
    assert [step for step, _ in read(tmp_path / "skips")["loss"]] == list(range(1, 10))
    (tmp_path / "ignores").mkdir()
    made(at(tmp_path / "ignores", every=Updates(1)), on_nonfinite="ignore").fit(source, epochs=1)
    losses = [value for _, value in read(tmp_path / "ignores")["loss"]]
    assert [math.isnan(float(loss)) for loss in losses] == [False, False, *[True] * 8]


def settings_in(kind: str, where: Path) -> dict[str, Any]:
    if kind == "wandb":
        found = [item for record in wandb_records(where) for item in (*record.run.config.update, *record.config.update)]
        return {item.key: plain(item) for item in found}
    if kind == "mlflow":
        return dict(mlflow_runs(where)[1][0].data.params)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    shown = EventAccumulator(str(where / "board")).Reload()
    content = shown.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}


SETTINGS = pytest.mark.parametrize(
    "kind", ["tensorboard", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wandb", "mlflow"))]
)


@SETTINGS
def test_the_settings_of_the_run_and_those_given_are_logged(kind: str, tmp_path: Path) -> None:
    logger = KINDS[kind][0](tmp_path, hyperparameters={"width": 7})
    made(logger, clip=0.5, accumulate=2).fit(data(), epochs=1)
    logged = {name: str(value).removesuffix(".0") for name, value in settings_in(kind, tmp_path).items()}
    expected = {"model": "Linear", "optimizer": "SGD", "loss": "CrossEntropyLoss()", "clip": "0.5", "accumulate": "2"}
    assert expected.items() <= logged.items()
    assert {"lr": "0.1", "batch_size": "4", "rows": "40", "epochs": "1", "parameters": "15", "width": "7"}.items() <= (
        logged.items()
    )


@EACH
def test_neither_environment_nor_command_line_is_logged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-in-the-environment")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2" + 33 * "0")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--password", "hunter2-on-the-command-line"])
    made(KINDS[kind][0](tmp_path, every=Updates(1))).fit(data(), epochs=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


@SETTINGS
def test_a_figure_of_a_probe_is_logged(kind: str, tmp_path: Path) -> None:
    logger = KINDS[kind][0](tmp_path)

    def confusion(trainer: Any) -> None:
        logger.log_figure("confusion", trainer.report(batches((x, y), 20)).plot(), update=trainer.progress.updates)

    result = made(logger, Probe(confusion)).fit(data(), epochs=2)
    assert result.updates == 20
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        images = EventAccumulator(str(tmp_path / "board")).Reload().Images("confusion")
        assert [(image.step, image.height > 100) for image in images] == [(10, True), (20, True)]
    else:
        assert len({path.stem for path in tmp_path.rglob("*.png")}) >= 2 or kind == "mlflow"


def test_a_file_without_figures_refuses_one(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="logs no figures"):
        csv_at(tmp_path).log_figure("loss", None, update=1)


class Failing(Logger):
    """Fails where it is set to, until it is set to stop."""

    def __init__(self, *, at: str) -> None:
        super().__init__(every=Updates(1))
        self.at, self.written, self.calls = at, [], []

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name == self.at:
            raise OSError("the network is gone")

    def open(self, plan: Any, settings: Any, *, keep: Any) -> None:
        self._do("open")

    def write(self, update: int, numbers: Any) -> None:
        self._do("write")
        self.written.append(update)

    def flush(self) -> None:
        self._do("flush")

    def close(self, result: Any) -> None:
        self._do("close")


@pytest.mark.parametrize("at", ["open", "write", "flush", "close"])
def test_a_logger_that_fails_warns_once_and_the_run_ends_as_without_it(at: str) -> None:
    alone = made()
    alone.fit(data(), data(), epochs=2)
    logger = Failing(at=at)
    trainer = made(logger)
    with pytest.warns(UserWarning, match=r"Failing failed.*OSError: the network is gone") as caught:
        trainer.fit(data(), data(), epochs=2)
    assert len(caught) == 1
    assert Path(caught[0].filename).name == "test_loggers.py"
    assert torch.equal(trainer.model.weight, alone.model.weight)
    assert logger.calls.count("open") == 1
    if at == "open":
        assert logger.calls == ["open"]


def test_after_an_error_logging_goes_on_at_the_next_validation() -> None:
    logger = Failing(at="write")

    class Mends(Observer):
        def on_validate(self, record: Any) -> None:
            logger.at = ""

    with pytest.warns(UserWarning, match="Failing failed"):
        made(Mends(), logger).fit(data(), data(), epochs=2)
    assert logger.written == [10, *range(11, 21), 20]


def test_a_full_disk_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loggers = [TensorBoardLogger(tmp_path / "file" / "board"), CSVLogger(tmp_path / "file" / "numbers.csv")]
    with pytest.warns(UserWarning, match="failed, and the run continues without it") as caught:
        result = made(*loggers).fit(data(), epochs=2)
    assert result.updates == 20
    assert len(caught) == 2


@pytest.mark.slow
def test_a_tracker_that_is_not_there_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    wandb.teardown()  # it reads the environment again
    loggers = [MLflowLogger("digits", tracking_uri="http://127.0.0.1:9"), WandbLogger("digits", directory=tmp_path)]
    with pytest.warns(UserWarning, match="failed, and the run continues without it") as caught:
        result = made(*loggers).fit(data(), epochs=2)
    assert result.updates == 20
    wandb.teardown()
    assert sorted(str(one.message).split()[0] for one in caught) == ["MLflowLogger", "WandbLogger"]


@pytest.mark.slow
def test_weights_and_biases_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    import wandb

    before = sys.excepthook, sys.exit, sys.stdout, wandb.run
    made(wandb_at(tmp_path)).fit(data(), epochs=1)
    assert (sys.excepthook, sys.exit, sys.stdout, wandb.run) == before


@pytest.mark.slow
def test_a_run_of_the_users_own_is_used_and_not_finished(tmp_path: Path) -> None:
    import wandb

    run = wandb.init(project="own", dir=str(tmp_path), reinit="create_new")
    made(WandbLogger(run=run, every=Updates(1))).fit(data(), epochs=1)
    run.log({"update": 11, "after": 1.0})
    run.finish()
    shown = read_wandb(tmp_path)
    assert [step for step, _ in shown["loss"]] == list(range(1, 11))
    assert shown["after"] == [(11, 1.0)]


def test_a_table_without_its_last_line_is_mended(tmp_path: Path) -> None:
    def run(cls: Any) -> None:
        checkpoint = Checkpoint(tmp_path / "kept", every=Updates(10))
        made(csv_at(tmp_path, every=Updates(1)), cls=cls, checkpoint=checkpoint).fit(data(), epochs=2, resume="auto")

    with pytest.raises(OSError, match="gone"):
        run(Killed)
    with (tmp_path / "numbers.csv").open("a") as file:
        file.write("1")  # the first digit of update 13
    run(type("Whole", (Killed,), {"at": -1}))
    assert [step for step, _ in read_csv(tmp_path)["loss"]] == list(range(1, 21))


def test_a_new_run_renames_the_table_of_the_one_before(tmp_path: Path) -> None:
    made(csv_at(tmp_path)).fit(data(), epochs=2)
    before = (tmp_path / "numbers.csv").read_text()
    made(csv_at(tmp_path)).fit(data(), epochs=1)
    assert (tmp_path / "numbers.csv.bak").read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["numbers.csv", "numbers.csv.bak"]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_without_its_package_a_logger_names_the_extra(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / kind).mkdir()  # a folder of that name is no package
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {name: one for name, one in sys.modules.items() if name != kind})
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if "editable" not in repr(one).lower()])
    with pytest.raises(SettingError, match=rf'pip install {kind}   # or pip install "\.\[{kind}\]"'):
        KINDS[kind][0](tmp_path)


def test_the_id_of_a_run_stays_over_stages_and_a_resume_and_no_other_run_has_it(tmp_path: Path) -> None:
    class Ids(Observer):
        def __init__(self) -> None:
            self.ids: list[str] = []

        def on_fit_start(self, plan: Any) -> None:
            self.ids.append(plan.run)

    def trained(**settings: Any) -> tuple[Any, list[str]]:
        ids = Ids()
        trainer = made(ids, checkpoint=Checkpoint(tmp_path / "kept"))
        trainer.fit(data(), epochs=1, **settings)
        trainer.fit(data(), epochs=1, **settings)
        return trainer, ids.ids

    _, first = trained()
    _, again = trained(resume="auto")
    untrained = made(ids := Ids())
    for trainer in (untrained, copied := copy.deepcopy(untrained)):
        trainer.fit(data(), epochs=1)
    other = ids.ids[0], next(one for one in copied.observers if isinstance(one, Ids)).ids[-1]
    assert len({*first, *again}) == 1
    assert len({*other, *first}) == 3
    assert all(first)
