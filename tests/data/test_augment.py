"""Images changed where they lie: each row as a reference of a few lines changes it, by draws of its batch alone."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from trainwright import Checkpoint, DataError, SettingError, Trainer, Updates, batches
from trainwright.data import Augment, Normalize
from trainwright.data.transforms.augment import Draws
from trainwright.distributed.mesh import Shard

MEAN, STD = (0.5, 0.4), (0.2, 0.3)


def images(rows=20, *, height=5, width=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, 2, height, width), dtype=torch.uint8, generator=generator)


class Noted(Draws):
    """Draws whose numbers are kept."""

    def __init__(self, rows, seed=3):
        super().__init__(seed, whole=rows, rows=range(rows), device=torch.device("cpu"))
        self.drawn = []

    def integers(self, below, *shape):
        self.drawn.append(super().integers(below, *shape))
        return self.drawn[-1]


def by_rows(given, flips, offsets, crop):
    """Row by row, as one would write it."""
    changed = []
    for row, image in enumerate(given.numpy()):
        cut = image
        if offsets is not None:
            top, left = offsets[row]
            around = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
            cut = around[:, top : top + image.shape[1], left : left + image.shape[2]]
        cut = cut[:, :, ::-1] if flips is not None and flips[row] else cut
        changed.append(torch.from_numpy(cut.copy()))
    return torch.stack(changed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
@pytest.mark.parametrize(("flip", "crop"), [(True, 0), (False, 3), (True, 2), (True, 9)])
def test_flips_and_crops_are_those_of_a_loop_over_rows(flip, crop, dtype):
    given = images(60).to(dtype)
    kept, draws = given.clone(), Noted(60)
    changed = Augment(flip=flip, crop=crop)(given, draws)
    numbers = [one.tolist() for one in draws.drawn]
    flips = [row[0] for row in numbers.pop(0)] if flip else None
    offsets = numbers.pop(0) if crop else None
    assert changed.dtype == dtype and changed.is_contiguous()
    assert torch.equal(changed, by_rows(given, flips, offsets, crop)) and torch.equal(given, kept)
    if flip:
        assert 0.2 < sum(flips) / 60 < 0.8
    if crop and crop < 9:
        assert {one for row in offsets for one in row} == set(range(2 * crop + 1))


def test_normalise_gives_the_bits_of_torchvisions_two_steps():
    given = images()
    mean, std = (torch.tensor(one).reshape(-1, 1, 1) for one in (MEAN, STD))
    wanted = given.float().div(255).sub(mean).div(std)
    normalise = Normalize(MEAN, STD)
    for _unused in range(2):
        assert torch.equal(normalise(given, Noted(20)), wanted)
    floats = given.double() / 255
    kept = floats.clone()
    assert torch.equal(normalise(floats, Noted(20)), floats.float().sub(mean).div(std)) and torch.equal(floats, kept)
    floats = given.float()
    assert normalise(floats, Noted(20)).data_ptr() != floats.data_ptr() and torch.equal(floats, given.float())


def given_batches(**settings):
    data = (images(), torch.arange(20))
    return batches(data, 6, **{"shuffle": True, "seed": 1, "augment": Augment(flip=True, crop=2), **settings})


def all_of(source, epoch=0, skip=0):
    return list(source.epoch(epoch, skip))


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_what_a_batch_draws_depends_on_seed_epoch_and_number_alone_and_moves_no_other_generator():
    source = given_batches()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = all_of(source)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    torch.manual_seed(9)
    assert same(first, all_of(given_batches())) and same(first[2:], all_of(given_batches(), skip=2))
    plain = all_of(given_batches(augment=None))
    assert [torch.equal(a[1], b[1]) for a, b in zip(first, plain, strict=True)] == [True] * 4
    in_order = given_batches(shuffle=False)
    first = all_of(in_order)
    for other in (all_of(in_order, 1), all_of(given_batches(shuffle=False, seed=2))):
        assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    same_rows = batches((torch.cat([images(6)] * 2), torch.arange(12)), 6, seed=1, augment=Augment(crop=2))
    one, two = all_of(same_rows)
    assert not torch.equal(one[0], two[0])


@pytest.mark.parametrize("size", [2, 3, 7])
def test_processes_draw_together_what_one_draws(size):
    plain = all_of(given_batches())
    parts = []
    for rank in range(size):
        source = given_batches()
        source.deal(Shard(rank, size))
        parts.append(all_of(source))
    for number, whole in enumerate(plain):
        own = [slices[number].batch for slices in parts if slices[number].rows]
        assert all(
            torch.equal(torch.cat(columns), each) for columns, each in zip(zip(*own, strict=True), whole, strict=True)
        )


def test_a_seed_that_was_not_given_is_drawn_once_and_kept_in_the_state():
    torch.manual_seed(4)
    source = given_batches(shuffle=False, seed=None)
    first = all_of(source)
    other = given_batches(shuffle=False, seed=None)
    other.load_state_dict(source.state_dict())
    assert same(first, all_of(other)) and not same(first, all_of(given_batches(shuffle=False, seed=None)))


def test_who_iterates_by_hand_gets_batches_changed_epoch_by_epoch():
    source, wanted = given_batches(shuffle=False, seed=None), given_batches(shuffle=False, seed=None)
    source.finishing(None, trains=True)  # a run is about to read them too
    for epoch in range(3):
        changed = list(source)
        wanted.load_state_dict(source.state_dict())
        assert same(changed, all_of(wanted, epoch))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "data",
    [images(), (images(), torch.arange(20)), {"y": torch.arange(20), "x": images()}, Pair(images(), torch.arange(20))],
    ids=lambda data: type(data).__name__,
)
def test_a_batch_keeps_its_form_and_everything_but_its_images(data):
    plain = all_of(batches(data, 6))
    changed = all_of(batches(data, 6, seed=1, augment=[Augment(flip=True), Normalize(MEAN, STD)]))
    for one, other in zip(plain, changed, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert other.dtype == torch.float32
        else:
            assert (other["x"] if isinstance(other, dict) else other[0]).dtype == torch.float32
            assert torch.equal(*((each["y"] if isinstance(each, dict) else each[1]) for each in (one, other)))


class Rows(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return images(11)[index].float() + torch.rand(()), index


def test_a_data_set_that_draws_itself_is_changed_behind_it():
    plain = all_of(batches(Rows(), 4, seed=5))
    changed = all_of(batches(Rows(), 4, seed=5, augment=lambda images, draws: images + draws.uniform(1, 1, 1)))
    for (x, y), (a, b) in zip(plain, changed, strict=True):
        moved = (a - x).flatten(1)
        assert torch.equal(y, b) and torch.allclose(moved, moved[:, :1], atol=1e-4) and float(moved.min()) > 0


class Seen(Trainer):
    """Keeps what its steps were given."""

    def training_step(self, batch):
        self.__dict__.setdefault("trained", []).append([one.clone() for one in batch])
        return self._loss(batch)

    def validation_step(self, batch):
        self.__dict__.setdefault("validated", []).append([one.clone() for one in batch])
        return self._loss(batch)

    def _loss(self, batch):
        return self.loss(self.model(batch[0].flatten(1).float()), batch[1] % 3)


class Twice(Seen):
    """Reads every micro-batch twice."""

    def update(self, window):
        self.compute_gradients(window)
        return super().update(window)


def trainer(kind=Seen, **settings):
    torch.manual_seed(0)
    model = nn.Linear(2 * 5 * 7, 3)
    return kind(model, torch.optim.SGD(model.parameters(), lr=1e-4), nn.CrossEntropyLoss(), console=False, **settings)


BOTH = [Augment(flip=True, crop=2), Normalize(MEAN, STD)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_trains_on_changed_images_and_evaluates_those_that_are_there(accumulate):
    made = trainer(accumulate=accumulate)
    made.fit(given_batches(augment=BOTH), given_batches(augment=BOTH), epochs=2)
    wanted = [one for epoch in range(2) for one in all_of(given_batches(augment=BOTH), epoch)]
    assert same(made.trained, wanted)
    plain = all_of(given_batches(augment=Normalize(MEAN, STD)))
    assert same(made.validated[1:], plain * 2)  # the first is the rehearsal
    made.validated.clear()
    made.evaluate(given_batches(augment=BOTH))
    assert same(made.validated, plain)


def test_a_micro_batch_that_is_read_again_is_changed_in_the_same_way():
    made = trainer(Twice, accumulate=2)
    made.fit(given_batches(augment=BOTH), epochs=1)
    once = all_of(given_batches(augment=BOTH))
    assert same(made.trained, [*once[:2], *once[:2], *once[2:], *once[2:]])


def test_images_are_moved_as_they_are_and_changed_where_they_lie_then():
    sent = []

    class Noting(Seen):
        def to_device(self, batch):
            sent.append(batch[0].dtype)
            return super().to_device(batch)

    made = trainer(Noting)
    made.fit(given_batches(augment=BOTH), given_batches(augment=BOTH), epochs=1)
    assert len(sent) == 9 and set(sent) == {torch.uint8}
    assert same(made.trained, all_of(given_batches(augment=BOTH)))


def test_batches_that_a_function_of_the_epoch_gives_are_changed_as_well():
    made, source = trainer(), given_batches(augment=BOTH)
    made.fit(source, max_updates=2)  # a run that had them as they are
    made.trained.clear()
    made.fit(lambda epoch: source, epochs=2)
    assert same(made.trained, [one for epoch in range(2) for one in all_of(given_batches(augment=BOTH), epoch)])


@pytest.mark.parametrize("stops_at", [1, 3, 5])
def test_a_run_that_is_resumed_goes_on_with_the_images_of_one_that_never_stopped(stops_at, tmp_path):
    class Stopping(Seen):
        def after_update(self):
            if self.progress.updates == stops_at:
                self.stop("enough")

    whole = trainer()
    whole.fit(given_batches(augment=BOTH), epochs=2)
    saving = Checkpoint(tmp_path, every=Updates(1), async_save=False)
    cut = trainer(Stopping, checkpoint=saving)
    cut.fit(given_batches(augment=BOTH), epochs=2)
    resumed = trainer(checkpoint=saving)
    resumed.fit(given_batches(augment=BOTH), epochs=2, resume="auto")
    assert same([*cut.trained, *resumed.trained], whole.trained)
    assert torch.equal(resumed.model.weight, whole.model.weight)


@pytest.mark.parametrize(
    "make",
    [
        Augment,
        lambda: Augment(flip=1),
        lambda: Augment(crop=-1),
        lambda: Augment(crop=2.0),
        lambda: Normalize(0.5, 0.2),
        lambda: Normalize((0.5,), (0.2, 0.2)),
        lambda: Normalize((0.5,), (0.0,)),
        lambda: Normalize((), ()),
        lambda: given_batches(augment=Augment),
        lambda: given_batches(augment=[]),
        lambda: given_batches(augment="flip"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_given(make):
    with pytest.raises(SettingError):
        make()


@pytest.mark.parametrize(
    ("data", "augment", "said"),
    [
        ((torch.zeros(4, 3), torch.zeros(4)), Augment(flip=True), "finds no images"),
        ({"a": torch.zeros(4, 5, 5)}, Augment(flip=True), "finds no images"),
        (images(4), Normalize((0.5,), (0.2,)), "of 1 channels"),
        (images(4).long(), Normalize(MEAN, STD), "uint8, or floating point"),
    ],
)
def test_batches_without_such_images_are_refused_at_the_first(data, augment, said):
    with pytest.raises(DataError, match=said):
        all_of(batches(data, 2, augment=augment, seed=1))
