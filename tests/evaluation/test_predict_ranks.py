"""Outputs of several processes: those of one, in data-set order, on all of them, without what stood in."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from distributed.pool import RankFailed, pool
from trainwright import StepOutput, Trainer, batches
from trainwright.data.sharding import sharded
from trainwright.distributed.mesh import Slice
from trainwright.distributed.world import World
from trainwright.evaluation import predictions
from trainwright.evaluation.predictions import DistributedOutputs, _joined_slices

SIZES = (1, 7, 51, 64)
BATCH = 16


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Boxes:
    corners: Tensor
    image: Tensor


FORMS: dict[str, Any] = {
    "tensor": lambda y, x: y,
    "a number for each row": lambda y, x: y.sum(1),
    "columns": lambda y, x: (y, [y[:, 0], x.long()]),
    "named": Pair,
    "dict": lambda y, x: {"scores": y, "deep": {"x": x}, "nothing": None},
    "dataclass": Boxes,
    "dicts of rows": lambda y, x: [{"box": row.repeat(1 + int(row[0] > 0), 1), "name": str(len(row))} for row in y],
    "words": lambda y, x: [f"{float(row[0]):.6f}" for row in y],
    "rows of tensors": lambda y, x: [row[: 1 + int(row[0] > 0)] for row in y],
    "step": lambda y, x: StepOutput(None, y, x),
    "nothing": lambda y, x: None,
    "view": lambda y, x: y.T[1],
}


class Formed(Trainer[nn.Module]):
    form: Any = None
    ran = 0

    def predict_step(self, batch: Any) -> Any:
        self.ran += 1
        x = batch if isinstance(batch, Tensor) else batch[0]
        return self.form(self.model(x), x)


def rows(n: int) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def trainer(form: str = "tensor") -> Formed:
    torch.manual_seed(3)
    made = Formed(nn.Linear(3, 2).double(), None, None, console=False)
    made.form = FORMS[form]
    return made


def predicted(form: str, n: int) -> Any:
    return trainer(form).predict(batches(rows(n), BATCH))


def predicted_all(forms: list[str]) -> list[Any]:
    return [predicted(form, n) for form in forms for n in SIZES]


def equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
        assert found.shape == wanted.shape
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            equal(found[key], value)
    elif isinstance(wanted, Boxes):
        equal(vars(found), vars(wanted))
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            equal(one, other)
    else:
        assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_outputs_of_any_form_are_those_of_one_process_on_every_one(ranks: int) -> None:
    names = list(FORMS)
    answers = pool(ranks).run(predicted_all, names)
    for index, (form, n) in enumerate(itertools.product(names, SIZES)):
        wanted = predicted(form, n)
        for answer in answers:
            equal(answer[index], wanted)


def test_shapes_that_do_not_join_give_a_list_in_data_set_order() -> None:
    """Each output is as wide as the largest number it was made of: a batch is one tensor where its slices agree."""
    answers = pool(2).run(padded)
    assert answers[0] == answers[1] == [[[1, 0], [2, 2]], [[3, 3, 3]], [[4, 4, 4, 4]]]


def padded() -> Any:
    made = trainer()
    made.model = nn.Identity()
    widths = torch.tensor([[1, 2], [2, 2], [3, 3], [4, 4]])
    made.form = lambda y, x: torch.stack(
        [torch.cat([row[:1].repeat(row[0]), row.new_zeros(int(y.max()) - row[0])]) for row in y]
    )
    return [one.tolist() for one in made.predict(batches(widths, 2))]


# --- loaders and streams


class Shuffled(IterableDataset[Any]):
    """Rows `rank, rank + step, ...` of a stream, as many as this process has."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        rank = dist.get_rank()
        for index in range(self.counts[rank]):
            yield torch.full((3,), 100.0 * rank + index, dtype=torch.float64)


def streamed(counts: list[int]) -> Any:
    made = trainer()
    made.form = lambda y, x: x[:, 0]
    outputs = made.predict(sharded(DataLoader(Shuffled(counts), batch_size=2)))
    return outputs.tolist(), made.ran


def test_streams_are_reported_by_batch_and_rank_and_every_process_runs_as_many_forwards() -> None:
    wanted = [0.0, 1.0, 100.0, 101.0, 200.0, 2.0, 3.0, 102.0, 103.0, 104.0]
    assert pool(3).run(streamed, [4, 5, 1]) == [(wanted, 3)] * 3


def test_a_stream_of_which_a_process_has_nothing_ends_on_all() -> None:
    assert pool(2).run(streamed, [0, 3]) == [([100.0, 101.0, 102.0], 2)] * 2


def test_streams_without_a_batch_are_refused_on_all() -> None:
    with pytest.raises(RankFailed) as caught:
        pool(2).run(streamed, [0, 0])
    assert str(caught.value).count("DataError: the data to predict gave no batch") == 2


def loaded(workers: int) -> Any:
    made = trainer()
    torch.manual_seed(5 + dist.get_rank())  # the order is drawn by the first process
    data = DataLoader(rows(51), batch_size=BATCH, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    output = made.predict(data)
    assert torch.equal(before, torch.get_rng_state())
    return output, made.ran


def test_a_shuffled_loader_gives_the_order_of_the_first_process() -> None:
    (first, ran), (second, also) = pool(2).run(loaded, 0)
    made = trainer()
    torch.manual_seed(5)
    equal(first, made.predict(DataLoader(rows(51), batch_size=BATCH, shuffle=True)))  # type: ignore[arg-type]
    equal(second, first)
    assert ran == also == 4


@pytest.mark.slow
def test_every_process_runs_every_batch_though_it_has_no_rows_of_it() -> None:
    assert pool(3).run(forwards, 1) == [1, 1, 1]


def forwards(n: int) -> int:
    made = trainer()
    made.predict(batches(rows(n), BATCH))
    return made.ran


# --- how they are gathered


class Two(World):
    """Two processes that have made the same."""

    size = 2

    def __init__(self) -> None:
        self.gathered: list[Any] = []

    def all_gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value, value]


def test_small_outputs_are_gathered_many_at_once_and_large_ones_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "AT_ONCE", 2**14)
    for size, most in ((1, 12), (2**10, 110)):
        world = Two()
        outputs = DistributedOutputs(world)
        for index in range(100):
            outputs._begun(Slice(index, 2, 4))
            outputs.append(torch.full((2, size), index))
            assert len(outputs) == index + 1
        assert [int(one[0, 0]) for one in outputs.in_order()] == list(range(100))
        assert len(world.gathered) <= most
        assert size == 1 or max(map(len, world.gathered)) < 3 * 2**14


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([[1, 2], [3]], [[1, 2, 3]]),  # one entry for each row
        ([[1, 2], [3, 4]], [[1, 2, 3, 4]]),
        ([{"a": [1, 2]}, {"b": [3, 4]}], None),
        ([torch.zeros(2), torch.zeros(2, 3)], None),
        ([torch.zeros(()), torch.zeros(())], None),
        (["one", "two"], None),
        ([(torch.zeros(2),), (torch.zeros(2), torch.zeros(2))], None),
        ([torch.zeros(2), [0, 0]], None),
    ],
)
def test_what_is_no_output_of_a_batch_is_reported_piece_by_piece(pieces: list[Any], wanted: Any) -> None:
    dealt = [(piece, len(piece) if isinstance(piece, list) else 2) for piece in pieces]
    found = _joined_slices(dealt)
    assert (
        found == wanted if wanted is not None else all(one is other for one, other in zip(found, pieces, strict=True))
    )


def test_columns_that_have_as_many_rows_as_there_are_columns_stay_columns() -> None:
    left, right = [torch.zeros(2, 5), torch.zeros(2)], [torch.ones(2, 5), torch.ones(2)]
    (whole,) = _joined_slices([(left, 2), (right, 2)])
    assert [one.shape for one in whole] == [(4, 5), (4,)]
