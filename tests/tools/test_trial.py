"""A trial leaves no trace: the hash of everything before is that after, whatever is done inside."""

from __future__ import annotations

import gc
import hashlib
import pickle
import random
import warnings
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainwright import EMA, DataError, Fast, Observer, SettingError, Trainer, accuracy, batches, find_lr
from trainwright.tools.trainer_snapshot import flushes_denormal
from trainwright.tools.trial import ready, traceless, variant
from trainwright.update import snapshot


def rows(n=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


class Counting(nn.Linear):
    """Counts its calls in a plain attribute and in a list."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return super().forward(x)


class Keeps(Trainer):
    def training_step(self, batch):
        self.steps = getattr(self, "steps", 0) + 1
        self.state["sum"] = self.state.get("sum", torch.zeros(6)) + batch[0].sum(0)
        return super().training_step(batch)


def make(optimizer=torch.optim.AdamW, *, cls=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(Counting(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = optimizer(model.parameters(), lr=0.05)
    return (cls or Keeps)(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes(), tuple(value.shape), value.stride(), value.data_ptr()
    if isinstance(value, dict):
        return [(str(key) if not isinstance(key, torch.Tensor) else id(key), plain(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, int | float | str | bytes | None) else id(value)


def everything(trainer):
    modules = [(module.training, plain(vars(module))) for module in trainer.model.modules()]
    weights = [(plain(p), p.requires_grad, plain(p.grad), id(p)) for p in trainer.model.parameters()]
    optimizer = [(plain(one.state), plain(one.param_groups)) for one in trainer.optimizers.values()]
    draws = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
    own = [plain(vars(trainer)), plain(trainer._counters.state_dict()), plain(trainer.history)]
    switches = torch.get_num_threads(), torch.is_grad_enabled(), flushes_denormal(), gc.isenabled()
    return hashlib.sha256(pickle.dumps((modules, weights, optimizer, draws, own, switches))).hexdigest()


def in_every_way(trainer, before):
    """What a trial may do, and worse."""
    variant(trainer, precision="bf16", fast=Fast(channels_last=True)).fit(
        ready(trainer, rows(), updates=3, batch_size=8), epochs=2
    )
    before.restore()
    for module in trainer.model.modules():
        module.train(not module.training)
    first = trainer.model[0]
    first.weight.requires_grad_(False)
    first.weight.data = torch.zeros_like(first.weight)
    first.new = 1
    first.register_forward_hook(lambda *_: None)
    trainer.optimizer.param_groups[0]["lr"] = 7.0
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    trainer.state["other"] = 1
    trainer.mine = 1
    torch.set_flush_denormal(True)
    torch.set_grad_enabled(False)
    random.random(), np.random.rand(), torch.rand(2)


def check_trial(trained, fails):
    """A trial leaves the hash of everything as it was, whether it raises or not."""
    trainer = make()
    if trained:
        trainer.fit(rows(), batch_size=8, epochs=1)
        trainer.model[3].eval()
        trainer.model[3].weight.requires_grad_(False)
    before = everything(trainer)
    if fails:
        with pytest.raises(ZeroDivisionError), traceless(trainer) as kept:
            in_every_way(trainer, kept)
            raise ZeroDivisionError
    else:
        with traceless(trainer) as kept:
            in_every_way(trainer, kept)
            assert everything(trainer) != before
    assert everything(trainer) == before


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_the_hash_of_everything_as_it_was(trained, fails):
    check_trial(trained, fails)


def test_the_law_sees_a_trial_that_forgets_the_random_states(monkeypatch):
    monkeypatch.setattr(snapshot, "set_random_state", lambda *_: None)
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with pytest.raises(AssertionError):
        check_trial(False, False)
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def test_what_comes_after_a_trial_is_what_would_have_come_without():
    def run(tries):
        trainer = make(average=EMA(0.9))
        data = batches(rows(), 8, shuffle=True)
        trainer.fit(data, epochs=1)
        if tries:
            with traceless(trainer):
                variant(trainer).fit(ready(trainer, data, updates=4), epochs=1)
        trainer.fit(data, epochs=1)
        return trainer

    one, other = run(tries=False), run(tries=True)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert one.history == other.history


def test_a_variant_trains_the_same_model_by_its_own_settings_and_numbers():
    reported = []

    class Tells(Observer):
        def on_update(self, update):
            reported.append(update.loss)

    trainer = make(metrics={"accuracy": accuracy}, clip=1.0, precision="bf16", observers=[Tells()])
    twin = variant(trainer, precision=None, accumulate=2)
    assert type(twin) is Keeps
    assert twin.model is trainer.model
    assert twin.optimizer is trainer.optimizer
    assert (twin.precision, twin.accumulate, twin.clip) == (None, ((0, 2),), trainer.clip)
    with traceless(trainer):
        result = twin.fit(rows(), batch_size=8, max_updates=2)
        assert (trainer.history, trainer.progress.updates, reported) == ([], 0, [])  # before it is put back
    assert result.updates == 2


def test_ready_batches_are_those_that_fit_would_get_and_leave_the_data_as_they_were():
    trainer = make()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(*rows()), 8, shuffle=True, generator=generator)
    found = ready(trainer, loader, updates=7)
    assert len(found) == 7
    first = list(loader)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, first, strict=False))
    assert torch.equal(found[5][0], first[0][0])  # five batches make an epoch; they go round


def test_data_that_a_trial_would_use_up_are_refused_with_the_cure():
    with pytest.raises(DataError, match=r"list\(itertools.islice\(stream, 50\)\)"):
        ready(make(), iter([rows(8)]), updates=1)


class Kept(IterableDataset):
    """Goes on where it was left, where one iterator is kept."""

    def __init__(self, one):
        self.rows = [(x, y) for x, y in zip(*rows(16), strict=True)]
        self.kept = iter(self.rows) if one else None

    def __iter__(self):
        return self.kept or iter(self.rows)


def test_a_data_set_that_goes_on_where_it_was_left_is_refused_before_a_row_is_used_up():
    whole = Kept(one=False)
    assert len(ready(make(), DataLoader(whole, 8), updates=2)) == 2
    assert len(ready(make(), DataLoader(Kept(one=True), 8, num_workers=1), updates=1)) == 1  # a copy of its own
    with pytest.raises(DataError, match="continue where they stopped"):
        ready(make(), DataLoader(used := Kept(one=True), 8), updates=1)
    assert len(list(used)) == len(list(whole))


class Odd(nn.Linear):
    """Keeps what moves in every kind of attribute, and in a slot."""

    __slots__ = ("calls",)

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(1).expand(5))
        self.last, self.kinds, self.sums = deque(maxlen=3), Counter(), np.zeros(2)
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)
        with torch.inference_mode():
            self.seen = torch.zeros(2)

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        self.last.append(self.calls)
        self.kinds[len(x)] += 1
        self.sums += 1.0
        one, other, third = self.generators
        noise = float(torch.rand(1, generator=one)) + other.random() + third.random()
        with torch.inference_mode():
            self.seen.add_(noise)
        return super().forward(x) * self.scale[0] + noise

    def reported(self):
        one, other, third = self.generators
        states = one.get_state().tolist(), str(other.bit_generator.state), third.getstate()
        called = getattr(self, "calls", None)
        return [called, list(self.last), dict(self.kinds), self.sums.tolist(), states, self.seen.tolist()]


@pytest.mark.parametrize("trained", [False, True])
def test_a_trial_puts_back_slots_queues_arrays_generators_and_expanded_buffers(trained):
    model = Odd(6, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    if trained:
        trainer.fit(rows(), batch_size=8, epochs=1)
    before = model.reported()
    with traceless(trainer):
        variant(trainer).fit(rows(), batch_size=8, epochs=1)
        model.scale.data = torch.zeros(5)
        assert model.reported() != before
    assert model.reported() == before
    assert model.scale.tolist() == [1.0] * 5


def test_a_trial_puts_back_sparse_gradients_in_place():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    data = torch.randint(0, 9, (16, 2)), torch.randint(0, 3, (16,))
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    gradient = model[0].weight.grad
    before = gradient.to_dense().clone(), model[0].weight.detach().clone()
    with traceless(trainer):
        gradient.mul_(2.0)
        gradient.add_(gradient.clone())
        variant(trainer).fit(data, batch_size=8, epochs=1)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient.to_dense(), before[0])
    assert torch.equal(model[0].weight, before[1])


def test_a_trial_of_layers_without_a_shape_is_refused_with_the_cure():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    trainer = Trainer(model, lambda it: torch.optim.SGD(it.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    with pytest.raises(SettingError, match="LazyLinear"), traceless(trainer):
        pass


class Noisy(Dataset):
    """Rows with noise of a generator of its own, whose state it tells."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randn(6, generator=self.generator), index % 3

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("wrapped", [lambda rows: DataLoader(rows, 4), lambda rows: batches(rows, 4, shuffle=True)])
@pytest.mark.parametrize("tried", [lambda trainer, data: ready(trainer, data, updates=2), find_lr])
def test_a_data_set_that_tells_its_state_is_left_in_it(wrapped, tried):
    noisy = Noisy()
    before = noisy.generator.get_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a range test that suggests nothing
        tried(make(), wrapped(noisy))
    assert torch.equal(noisy.generator.get_state(), before)
