"""Findings in the user's own lines: reads in each step, rows that are copied, files opened anew; clean code passes."""

from __future__ import annotations

import builtins
import inspect
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looked_at import CLASSES, found, perceptron, rows, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from trainwright import Trainer, batches
from trainwright.tools.findings_code import loader_findings


class Reading(Trainer[Any]):
    """A step that asks for a number of its own in one of many ways."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        READS[self.state["how"]](loss.detach())
        return loss


def _prints(loss: Tensor) -> None:
    print(f"{loss:.3f}", file=io.StringIO())


def _branches(loss: Tensor) -> None:
    if loss > 100:
        raise AssertionError


READS: dict[str, Any] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss) + 1,
    "cpu": lambda loss: loss.cpu(),
    "to": lambda loss: loss.to("cpu"),
    "tolist": lambda loss: (loss + 1).tolist(),
    "numpy": lambda loss: loss.numpy(),
    "array": lambda loss: np.asarray(loss) + 1,
    "print": _prints,
    "repr": lambda loss: str(loss) + "",
    "branch": _branches,
}


@pytest.mark.parametrize("how", READS)
def test_a_read_in_every_step_is_found_with_its_file_and_line(how: str) -> None:
    trainer = trainer_of(perceptron(), kind=Reading)
    trainer.state["how"] = how
    one = found(trainer, rows())["read in every step"]
    source, start = inspect.getsourcelines(READS[how])
    assert len(one.where) == 1
    file, line = one.where[0].split(":")
    assert file == "test_findings_code.py" and start <= int(line) < start + len(source)


class Plain(Trainer[Any]):
    """What costs nothing: a number kept on the device, one now and then, a batch that is looked at."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        assert x.min().item() < 0  # of the batch, which lies on the host
        loss = F.cross_entropy(self.model(x), y)
        self.log("size", loss.detach().square())
        if self.progress.updates % 100 == 0:
            print(loss.item(), file=io.StringIO())
        return loss

    def end_epoch(self, metrics: dict[str, float]) -> None:
        self.last = metrics["val_loss"]

    def begin_epoch(self, epoch: int) -> None:
        self.norm = self.model[0].weight.norm().item()


def test_numbers_that_are_logged_read_now_and_then_or_of_the_batch_are_passed_over() -> None:
    assert found(trainer_of(perceptron(), kind=Plain), rows()) == {}


def test_what_a_new_epoch_reads_is_read_once_an_epoch() -> None:
    class Beginning(Trainer[Any]):
        begin_epoch = Plain.begin_epoch

    assert found(trainer_of(perceptron(), kind=Beginning), rows(batches=1)) == {}


def test_reads_of_the_librarys_own_and_of_torchs_are_passed_over() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.last = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x.unflatten(1, (3, 2)), torch.full((len(x),), 2), batch_first=True)
            out: Tensor = self.last(self.lstm(packed)[1][0][0])
            return out

    assert found(trainer_of(Packed(), clip=1.0), rows()) == {}


def test_a_metric_that_reads_in_every_batch_is_found() -> None:
    def reading(output: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(float((output.argmax(1) == target).float().mean()))

    trainer = trainer_of(perceptron(), metrics={"reading": reading})
    assert len(found(trainer, rows())["read in every step"].where) == 1


def _indexed(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([model(x[i]) for i in range(len(x))])


def _sliced(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(x[i : i + 1]) for i in range(len(x))])


def _iterated(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([model(row) for row in x])


def _unbound(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([model(row) for row in x.unbind()])


def _split(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(row) for row in torch.split(x, 1)])


def _chunked(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(row) for row in x.chunk(len(x))])


def _selected(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([model(x.select(0, i)) for i in range(len(x))])


def _mapped(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack(list(map(model, x)))


def _of_outputs(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([out - out.mean() for out in model(x)])


LOOPS = {
    one.__name__: one
    for one in (_indexed, _sliced, _iterated, _unbound, _split, _chunked, _selected, _mapped, _of_outputs)
}


class Looping(Trainer[Any]):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.state["how"](self.model, x), y)


@pytest.mark.parametrize("how", LOOPS)
def test_a_python_loop_over_the_rows_of_a_batch_is_found_with_its_line(how: str) -> None:
    trainer = trainer_of(perceptron(), kind=Looping)
    trainer.state["how"] = LOOPS[how]
    one = found(trainer, rows(number=24, batches=1))["Python loop over rows"]
    source, start = inspect.getsourcelines(LOOPS[how])
    (place,) = one.where
    file, line = place.split(":")
    assert file == "test_findings_code.py" and start <= int(line) < start + len(source)
    assert source[int(line) - start].strip() in one.what


def test_a_loop_over_rows_inside_of_the_model_is_found_under_the_default_step_and_accumulation() -> None:
    class PerRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.inner(row) for row in x])

    assert "Python loop over rows" in found(trainer_of(PerRow(), accumulate=2), rows(number=24, batches=2))


def _steps_in_time(model: nn.Module, x: Tensor) -> Tensor:
    total = x.new_zeros(len(x), CLASSES)
    for t in range(2):
        total = total + model(x[:, 6 * t : 6 * t + 6])
    return total


def _columns(model: nn.Module, x: Tensor) -> Tensor:
    first = torch.stack([x[:, i] for i in range(6)], 1)
    return model(torch.stack(first.unbind(1), 1))


def _first_rows(model: nn.Module, x: Tensor) -> Tensor:
    assert x[0].ndim == x[-1].ndim == 1
    return model(x[:, :6])


def _halves(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(half[:, :6]) for half in x.chunk(2)])


def _taken_apart_for_one_call(model: nn.Module, x: Tensor) -> Tensor:
    return model(torch.stack(x[:, :6].unbind(0)))


def _permuted(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[torch.arange(len(x) - 1, -1, -1)][:, :6].flip(0))


def _weights(model: nn.Module, x: Tensor) -> Tensor:
    weight = model[0].weight  # as many rows as a batch has here, by chance
    return model(x[:, :6]) + sum(weight[i].sum() for i in range(len(weight)))


@pytest.mark.parametrize(
    "how", [_steps_in_time, _columns, _first_rows, _halves, _taken_apart_for_one_call, _permuted, _weights]
)
def test_loops_over_time_columns_chunks_and_weights_are_passed_over(how: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    trainer = trainer_of(model, kind=Looping)
    trainer.state["how"] = how
    assert found(trainer, rows(24, 12)) == {}


class Copying(Dataset[Any]):
    def __init__(self, how: str = "copy") -> None:
        self.x, self.how = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), how

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        row = self.x[index]
        if self.how == "copy":
            return torch.tensor(row), index % CLASSES
        if self.how == "pile":
            return torch.tensor([row, row]), 0
        if self.how == "convert":
            return torch.tensor(row, dtype=torch.float64), torch.tensor(index)  # one copy in any case; a number
        return torch.from_numpy(row), 0


WAYS: dict[str, Any] = {
    "data set": lambda data: data,
    "loader": lambda data: DataLoader(data, batch_size=4),
    "subset": lambda data: DataLoader(Subset(data, list(range(6))), batch_size=2),
    "batches": lambda data: batches(data, 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_copied_by_torch_tensor_are_found_by_their_line(way: str) -> None:
    (one,) = loader_findings(WAYS[way](Copying()))
    assert one.name == "rows copied by torch.tensor" and "`return torch.tensor(row), index" in one.what
    assert loader_findings(WAYS[way](Copying("share"))) == []


def test_a_list_of_arrays_is_found_and_a_copy_that_converts_is_not() -> None:
    with pytest.warns(UserWarning, match="extremely slow"):
        (one,) = loader_findings(Copying("pile"))
    assert "np.stack" in one.fix and "number by number" in one.why
    assert loader_findings(Copying("convert")) == []


def test_a_copy_in_the_collate_function_is_found() -> None:
    def collate(pairs: list[Any]) -> Any:
        return torch.tensor(np.stack([row.numpy() for row, _ in pairs])), torch.zeros(len(pairs))

    (one,) = loader_findings(DataLoader(Copying("share"), batch_size=4, collate_fn=collate))
    assert "np.stack" in one.what


class Files(Dataset[Any]):
    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how, self.kept = folder, how, None
        np.save(folder / "all.npy", np.zeros((8, 3), dtype=np.float32))
        for index in range(8):
            (folder / f"{index}.txt").write_text("1 2 3")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.how == "again":
            return torch.from_numpy(np.load(self.folder / "all.npy")[index])
        if self.how == "path":
            with (self.folder / "0.txt").open() as file:
                return torch.tensor([float(one) for one in file.read().split()])
        if self.how == "each":
            return torch.tensor([float(one) for one in (self.folder / f"{index}.txt").read_text().split()])
        if self.kept is None or (self.how == "twice" and index == 3):
            self.kept = np.load(self.folder / "all.npy")
        return torch.from_numpy(self.kept[index])


@pytest.mark.parametrize(
    ("how", "path"), [("again", "all.npy"), ("path", "0.txt"), ("each", ""), ("once", ""), ("twice", "")]
)
def test_a_file_that_is_opened_for_every_row_is_found_and_a_file_of_each_row_is_not(
    how: str, path: str, tmp_path: Path
) -> None:
    before = builtins.open, io.open
    each = loader_findings(DataLoader(Files(tmp_path, how), batch_size=2))
    assert [one.name for one in each] == (["file opened for every row"] if path else [])
    assert not path or path in each[0].what
    assert (builtins.open, io.open) == before


def test_fetching_rows_draws_nothing_and_streams_and_tables_are_not_read() -> None:
    class Noisy(Copying):
        def __getitem__(self, index: int) -> Any:
            return torch.randn(3)

    state = torch.get_rng_state()
    assert loader_findings(Noisy()) == []
    assert torch.equal(state, torch.get_rng_state())

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError

    table = TensorDataset(torch.zeros(4, 2))
    for data in (Stream(), DataLoader(Stream()), iter([1]), [1, 2], (torch.zeros(3),), batches(torch.zeros(4), 2)):
        assert loader_findings(data) == []
    assert loader_findings(DataLoader(table, batch_size=2)) == []


def test_the_loader_rides_along_with_the_findings_of_the_step() -> None:
    assert list(found(trainer_of(perceptron()), rows(), train=Copying())) == ["rows copied by torch.tensor"]
