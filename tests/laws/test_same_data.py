"""The Same law, of data: what is read out of memory at once is bit for bit what a loader reads row by row.

The reference is the user's own `DataLoader` in a plain loop. Each fault is planted and must be seen.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from trainwright.core.rng import random_state, set_random_state
from trainwright.data.dataloader import tensor_dataset
from trainwright.data.opening import open_source
from trainwright.distributed.mesh import Shard

from . import faults_data
from .same_data import DATA, ROWS, SAMPLERS, SETS, X, Y, check_batches, check_loader, check_training, exactly, seeded


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_recognized_loader_gives_and_draws_what_the_plain_loop_over_it_does(name):
    check_loader(SAMPLERS[name])


@pytest.mark.parametrize("order", ["in order", "shuffled", "by a batch sampler"])
@pytest.mark.parametrize("name", SETS)
def test_tensors_of_every_kind_and_their_subsets_come_as_the_loader_gives_them(name, order):
    check_loader(SAMPLERS[order], SETS[name])


@pytest.mark.parametrize("name", ["in order", "shuffled", "shuffled, its own generator", "weighted", "twice over"])
def test_a_fit_over_a_recognized_loader_ends_with_the_weights_of_the_plain_loop(name):
    check_training(SAMPLERS[name])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", [name for name in SETS if name not in ("columns apart", "pictures, channels last")])
def test_batches_in_memory_are_those_of_a_loader_with_the_same_order(name, shuffle):
    check_batches(shuffle, SETS[name])


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "lazily"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_recognized_loader_goes_on_inside_an_epoch(name, epoch):
    seeded()
    source = open_source(DataLoader(DATA, **SAMPLERS[name]()))
    for earlier in range(epoch):
        list(source.epoch(earlier))
    start = random_state()
    iterator = source.epoch(epoch)
    next(iterator)
    source.commit()
    kept, boundary = source.position(), random_state()
    rest = [exactly(batch) for batch in iterator]
    resumed = open_source(DataLoader(DATA, **SAMPLERS[name]()))
    resumed.seek(kept)
    set_random_state(start)
    iterator = resumed.epoch(epoch, skip=1)
    set_random_state(boundary)
    assert [exactly(batch) for batch in iterator] == rest


@pytest.mark.parametrize(
    "name", ["in order", "shuffled", "shuffled, its own generator", "weighted", "of a subset", "by a list"]
)
def test_the_slices_of_a_recognized_loader_are_the_batches_of_the_loader(name):
    seeded()
    expected = list(DataLoader(DATA, **SAMPLERS[name]()))
    parts = []
    for rank in range(3):
        seeded()
        source = open_source(DataLoader(DATA, **SAMPLERS[name]()))
        source.shard(Shard(rank, 3))
        parts.append([one.batch if one.rows else [X[:0], Y[:0]] for one in source.epoch(0)])
    joined = [[torch.cat(column) for column in zip(*some, strict=True)] for some in zip(*parts, strict=True)]
    assert [exactly(batch) for batch in joined] == [exactly(batch) for batch in expected]


def calls_per_batch(read):
    """Python functions begun or gone on with, for each batch of a pass."""
    list(read(0))
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    kept = list(read(1))
    sys.setprofile(None)
    return len(calls) / len(kept)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("name", ["in order", "shuffled", "shuffled, its own generator", "weighted", "of a subset"])
def test_a_recognized_loader_runs_no_python_for_a_row_and_next_to_none_for_a_batch(name):
    data = TensorDataset(torch.randn(4000, 2), torch.randn(4000))
    settings = SAMPLERS[name]()
    if name == "weighted":
        settings["sampler"] = WeightedRandomSampler(torch.ones(4000), 4000)
    if name == "of a subset":
        settings["sampler"] = SubsetRandomSampler(range(4000))
    assert calls_per_batch(open_source(DataLoader(data, **settings)).epoch) < 1
    assert calls_per_batch(lambda _: DataLoader(data, **settings)) > 20


def test_a_batch_sampler_of_the_users_own_costs_a_few_calls_for_a_batch():
    class Given(Sampler):
        rows = torch.randperm(4000).split(8)

        def __init__(self):
            self.lists = [part.tolist() for part in self.rows]

        def __iter__(self):
            return iter(self.lists)

    loader = DataLoader(TensorDataset(torch.randn(4000, 2), torch.randn(4000)), batch_sampler=Given())
    assert calls_per_batch(open_source(loader).epoch) < 6


@pytest.mark.parametrize("order", ["in order", "shuffled", "by a list"])
def test_a_step_may_write_into_a_batch_while_another_ones_graph_is_kept(order):
    kept = X.clone()
    weight = torch.ones(6, requires_grad=True)
    reader = iter(open_source(DataLoader(TensorDataset(kept, Y), **SAMPLERS[order]())).epoch(0))
    (first, _), (second, _) = next(reader), next(reader)
    loss = (first * weight).square().sum()
    second.zero_()
    loss.backward()
    assert torch.equal(kept, X)


class Reported(TensorDataset):
    pass


class Doubled(DataLoader):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Reported(X, Y), batch_size=8),
        lambda: Doubled(DATA, batch_size=8),
        lambda: DataLoader(DATA, batch_size=8, collate_fn=partial(torch.utils.data.default_collate)),
        lambda: DataLoader(DATA, batch_size=None),
        lambda: DataLoader(TensorDataset(nn.Parameter(X)), batch_size=8),
        lambda: DataLoader(TensorDataset(X.clone().requires_grad_()), batch_size=8),
        lambda: DataLoader(TensorDataset(X.to_sparse_coo()), batch_size=8),
    ],
)
def test_what_is_anything_else_is_read_as_torch_reads_it(loader):
    made = loader()
    assert type(tensor_dataset.index_select_batches(made, iter(made))).__name__ == "_SingleProcessDataLoaderIter"


def test_a_row_that_is_not_there_ends_a_pass_with_torchs_own_error():
    loader = DataLoader(DATA, batch_sampler=[[1, 2], [3, ROWS]])
    reader = open_source(loader).epoch(0)
    next(reader)
    with pytest.raises(IndexError, match="index 37 is out of bounds for dimension 0 with size 37"):
        next(reader)


def test_a_collate_function_that_a_user_has_taught_tensors_is_asked(monkeypatch):
    monkeypatch.setitem(tensor_dataset.default_collate_fn_map, torch.Tensor, lambda rows, **_: -torch.stack(rows))
    assert torch.equal(next(open_source(DataLoader(DATA, batch_size=8)).epoch(0))[0], -X[:8])


def test_tensors_that_are_exchanged_between_epochs_are_seen():
    data = TensorDataset(X, Y)
    source = open_source(DataLoader(data, batch_size=ROWS))
    assert torch.equal(next(source.epoch(0))[0], X)
    data.tensors = (X + 1, Y)
    assert torch.equal(next(source.epoch(1))[0], X + 1)


OWN = partial(check_loader, SAMPLERS["shuffled, its own generator"])
LISTED = partial(check_loader, SAMPLERS["by a batch sampler"])
ALIGNED = partial(check_loader, SAMPLERS["shuffled"], SETS["of numbers"])
SEEN_BY = {
    faults_data.skips_the_base_seed: (check_loader, OWN, LISTED, check_training),
    faults_data.draws_an_order_of_its_own: (check_loader, OWN, check_training),
    faults_data.gives_the_rows_of_a_batch_in_another_order: (check_loader, OWN, LISTED, check_training, check_batches),
    faults_data.forgets_what_is_drawn_at_the_end: (OWN,),
    faults_data.gives_tuples: (check_loader, LISTED, check_batches),
    faults_data.leaves_out_the_short_batch: (check_loader, check_training),
    faults_data.gathers_a_row_late: (ALIGNED,),
}


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        pytest.param(fault, check, id=f"{fault.__name__}-{n}")
        for fault, some in SEEN_BY.items()
        for n, check in enumerate(some)
    ],
)
def test_a_fault_is_seen(fault, check, monkeypatch):
    check()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
