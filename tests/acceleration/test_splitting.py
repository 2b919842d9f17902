"""Windows that are run again in parts: what is refused, what is reported, and what is never tried again."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laws.oom_cases import FULL, Noisy, Scarce, numbers, scarce
from trainwright import EMA, Console, MeanLoss, SettingError, Trainer, freeze
from trainwright.core.device import is_out_of_memory
from trainwright.distributed.world import World
from trainwright.fit.arguments import checked_on_oom

X, Y = numbers()


def make(model, loss=None, cls=Trainer, **settings):
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"on_oom": "split", "console": False, **settings}
    return cls(model, optimizer, loss or nn.CrossEntropyLoss(), **settings)


def fit(trainer, size=8, epochs=1, data=(X, Y)):
    return trainer.fit(data, epochs=epochs, batch_size=size)


def refused(trainer, **how):
    """The notes of the memory error that comes out."""
    with pytest.raises((torch.OutOfMemoryError, RuntimeError, MemoryError)) as caught:
        fit(trainer, **how)
    assert is_out_of_memory(caught.value)
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried to allocate 2 GiB", "CUBLAS_STATUS_ALLOC_FAILED when calling"]
)
def test_memory_that_has_run_out_is_known_by_the_words_of_older_errors_too(text):
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


# What is refused.


def normed(norm=None):
    return nn.Sequential(nn.Linear(5, 6), norm or nn.BatchNorm1d(6), nn.Linear(6, 4)).double()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)])
def test_a_training_batch_norm_is_refused_before_the_first_update(norm):
    model = Scarce(normed(norm), 10**6)
    with pytest.raises(SettingError, match=r"on_oom=\"split\" and BatchNorm1d 'inner.1' in train mode"):
        fit(make(model))
    assert model.calls == []
    freeze(model, "inner.1")
    if norm.track_running_stats:
        assert fit(make(model)).updates == 3


def test_a_batch_norm_that_begin_epoch_sets_free_is_refused():
    class Thaws(Trainer):
        def begin_epoch(self, epoch):
            self.model.inner[1].train(epoch > 0)

    trainer = make(Scarce(normed(), 10**6), cls=Thaws)
    with pytest.raises(SettingError, match="BatchNorm1d"):
        fit(trainer, epochs=2)
    assert trainer.progress.updates == 3


def pairs(output, target):
    """Every row against every other: more rows, a larger loss."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


@pytest.mark.slow
def test_a_loss_over_pairs_of_rows_is_not_split():
    note = refused(make(scarce(4)[0], pairs))
    assert "a row's loss depends on the other rows of its micro-batch: of 4 rows at once it is" in note


class CenteredRows(nn.Module):
    """Takes the mean of its batch off each row, and has noise."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(5, 4), nn.Dropout(0.5)

    def forward(self, x):
        made = self.layer(x)
        return self.drop(made - made.mean(0))


def test_a_layer_over_the_batch_is_found_out_beside_noise():
    assert "depends on the other rows" in refused(make(scarce(4, kind=CenteredRows)[0]))


def test_a_count_that_is_not_one_of_rows_is_found_out():
    class Constant(Trainer):
        def count(self, batch):
            return 3

        def training_step(self, batch):
            return F.cross_entropy(self.model(batch[0]), batch[1])

    assert "depends on the other rows" in refused(make(scarce(4)[0], cls=Constant))


def test_a_step_that_needs_all_rows_is_not_split():
    class Eight(Trainer):
        def training_step(self, batch):
            output = self.model(batch[0])
            if len(output) % 4:
                raise ValueError("rows come in fours")
            return F.cross_entropy(output, batch[1])

    note = refused(make(scarce(4)[0], cls=Eight))
    assert "a part of its rows cannot be run: ValueError: rows come in fours" in note


class OwnUpdate(Trainer):
    def update(self, window):
        return super().update(window)


class OwnGradients(Trainer):
    def compute_gradients(self, window):
        return super().compute_gradients(window)


@pytest.mark.parametrize(("cls", "name"), [(OwnUpdate, "update"), (OwnGradients, "compute_gradients")])
def test_an_update_of_ones_own_is_refused(cls, name):
    with pytest.raises(SettingError, match=rf'on_oom="split" with {name}\(\) of your own'):
        make(scarce(4)[0], cls=cls)


def test_a_step_that_had_changed_weights_is_not_run_again():
    class Moves(Trainer):
        def training_step(self, batch):
            with torch.no_grad():
                self.model.inner.first.weight.mul_(0.9)
            return super().training_step(batch)

    model = scarce(4)[0]
    assert "weights were changed before memory ran out" in refused(make(model, cls=Moves))
    assert model.calls == [8]


class Greedy(torch.optim.SGD):
    """Has no memory for its state."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].zero_()
        raise torch.OutOfMemoryError(FULL)


def test_a_step_that_had_begun_is_not_made_again():
    model = scarce(10**6)[0]
    note = refused(make(model, optimizer=Greedy(model.parameters(), lr=0.1)))
    assert "a step had begun, and weights may be half-way" in note
    assert model.calls == [8]


@pytest.mark.slow
def test_one_row_that_does_not_fit_ends_the_run():
    model = scarce(0)[0]
    note = refused(make(model))
    assert "each micro-batch is one row already" in note and "train batch 1" in note
    assert model.calls[0] == 8 and model.calls[-1] == 1
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (lambda x, y: {"x": x, "y": y, "odd": torch.zeros(3)}, "its rows are not known"),
        (lambda x, y: {"x": x, "y": y, "odd": torch.eye(8).to_sparse()}, "a nested or sparse tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_ends_the_run(batch, why):
    class Odd(Trainer):
        def training_step(self, batch):
            return F.cross_entropy(self.model(batch["x"]), batch["y"])

    note = refused(make(scarce(4)[0], cls=Odd), data=[batch(X[:8], Y[:8])], size=None)
    assert why in note


def test_other_errors_are_not_caught():
    model = scarce(2, error=lambda: RuntimeError("CUDA error: device-side assert triggered"))[0]
    with pytest.raises(RuntimeError, match="device-side"):
        fit(make(model))
    assert model.calls == [8]


def test_several_processes_are_refused():
    several = type("Several", (World,), {"size": 2})()
    with pytest.raises(SettingError, match='on_oom="split" with 2 processes'):
        checked_on_oom("split", several, own=())
    assert checked_on_oom("split", World(), own=()) == "split" and checked_on_oom(None, several, own=()) is None


# What is caught.


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError(FULL),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: not enough memory: you tried"),
        MemoryError,
        lambda: torch.empty(2**50),  # which really runs out
    ],
)
def test_each_way_of_running_out_of_memory_is_caught(error):
    model = scarce(2, error=error)[0]
    assert fit(make(model)).updates == 3


# What is reported and remembered.


def test_a_split_is_reported_once_and_remembered():
    model, stream = scarce(4)[0], io.StringIO()
    trainer = make(model, console=Console(stream))
    assert trainer.fast_path.endswith("which waits for nothing")
    result = fit(trainer, epochs=3)
    reported = "out of memory in update 1: micro-batches of 8 rows are run in parts of up to 4"
    assert result.notes == (f"{reported}; batches of 4 rows with accumulate=2 do so from the start",)
    assert sum(reported in line for line in stream.getvalue().splitlines() if not line.startswith(" note")) == 1
    assert reported in trainer.fast_path
    assert model.calls.count(8) == 1
    assert fit(make(scarce(10**6)[0])).notes == ()


@pytest.mark.slow
def test_the_copies_are_given_back_when_a_run_is_over():
    trainer = make(scarce(4)[0])
    run = []

    class Looks(nn.Module):
        def forward(self, output, target):
            run.append(weakref.ref(trainer._record.path.splits))
            return F.cross_entropy(output, target)

    trainer.loss = Looks()
    fit(trainer)
    gc.collect()
    assert run[0]() is None and "up to 4" in trainer.fast_path


def test_noise_is_reported():
    result = fit(make(scarce(4, kind=Noisy)[0]))
    assert "and noise such as dropout is drawn for each part" in result.notes[0]


def test_without_on_oom_the_error_says_what_to_write():
    note = refused(make(scarce(4)[0], on_oom=None))
    assert 'batches of 4 rows with Trainer(..., accumulate=2): the same rows in each update; or on_oom="split"' in note
    note = refused(make(Scarce(normed(), 4), on_oom=None))
    assert "accumulate=2" in note and "on_oom" not in note


@pytest.mark.slow
def test_what_a_failed_try_has_computed_is_let_go_before_the_next():
    held = []

    class Watched(Scarce):
        def forward(self, x):
            gc.collect()
            alive.append(sum(one() is not None for one in held))
            made = self.inner(x)
            held.append(weakref.ref(made))
            if len(x) > self.most:
                raise torch.OutOfMemoryError(FULL)
            return made

    alive = []
    fit(make(Watched(nn.Linear(5, 4).double(), 2)))
    assert alive[0] == 0 and max(alive) == 0


def test_parts_of_rows_that_are_longer_are_cut_finer():
    """What fits is remembered as elements: 2 rows of 8 tokens are as many as 8 rows of 2."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head, self.calls = nn.Embedding(5, 4), nn.Linear(4, 3), []

        def forward(self, x):
            self.calls.append(tuple(x.shape))
            if x.numel() > 16:
                raise torch.OutOfMemoryError(FULL)
            return self.head(self.embedding(x).mean(1))

    sizes = [(8, 4), (2, 8), (4, 8), (16, 2), (3, 2)]
    data = [(torch.randint(5, size), torch.randint(3, size[:1])) for size in sizes]
    model = Tokens()
    result = make(model).fit(data, epochs=1)
    tried = [shape for shape in model.calls if shape[0] * shape[1] > 16]
    (note,) = result.notes
    assert "micro-batches of 8 rows are run in parts of up to 4" in note
    assert tried == [(8, 4)] and model.calls[-1] == (3, 2) and model.calls.count((4, 2)) == 0


@pytest.mark.slow
def test_an_average_and_a_mean_of_ones_own_go_on():
    class Own(Trainer):
        def training_step(self, batch):
            loss = F.cross_entropy(self.model(batch[0]), batch[1], reduction="sum")
            return MeanLoss(loss / len(batch[1]), len(batch[1]))

    models = [scarce(most)[0] for most in (10**6, 3)]
    for model, on_oom in zip(models, (None, "split"), strict=True):
        torch.manual_seed(0)
        fit(make(model, cls=Own, on_oom=on_oom, average=EMA(0.9), clip=0.1), epochs=4)
    torch.testing.assert_close(dict(models[0].state_dict()), dict(models[1].state_dict()), rtol=1e-12, atol=1e-14)
