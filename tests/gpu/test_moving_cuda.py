"""Batches on their way to a real GPU: the same numbers, no wait of the host, no allocation, copies beside kernels.

tests/acceleration/test_moving.py tests the order of things on streams that are reported on the CPU.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from trainwright import Fast, Trainer, batches
from trainwright.acceleration.transfer import SLOTS, Moving
from trainwright.core.device import move
from trainwright.data import Normalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # that it does not find every wait
]
DEVICE = torch.device("cuda", 0)


def host_batches(number, *, shape=(64, 3, 32, 32)):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, 10, shape[:1], generator=generator))
        for _ in range(number)
    ]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_batch_arrives_as_by_the_plain_move(pinned, busy):
    moving, sums, wanted = Moving(DEVICE), [], []
    for x, y in host_batches(40):
        given = (x.pin_memory(), y.pin_memory()) if pinned else (x, y)
        if busy:
            torch.cuda._sleep(2_000_000)
        a, b = moving(given)
        sums.append((a.double().sum(), b.sum()))
        c, d = move((x, y), DEVICE)
        wanted.append((c.double().sum(), d.sum()))
        if not pinned:
            x.fill_(-1)  # it has been copied
    assert [(a.item(), b.item()) for a, b in sums] == [(a.item(), b.item()) for a, b in wanted]


def test_what_is_held_stays_as_it_was():
    moving, given = Moving(DEVICE), host_batches(12)
    kept = [moving(one)[0][1:] for one in given]
    for view, (x, _) in zip(kept, given, strict=True):
        assert torch.equal(view.cpu(), x[1:])


def test_the_host_waits_for_no_kernel_and_nothing_is_allocated_in_steady_state():
    moving, given = Moving(DEVICE), host_batches(2 * SLOTS)
    for one in given:
        moving(one)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        begun = time.perf_counter()
        for one in given[:2]:
            moving(one)
        host = time.perf_counter() - begun
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert host < 0.2
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before


def test_a_copy_runs_beside_the_step_before():
    moving, shape = Moving(DEVICE), (256, 3, 224, 224)
    big = host_batches(1, shape=shape)[0]
    big = tuple(one.pin_memory() for one in big)
    weight = torch.randn(4096, 4096, device=DEVICE)

    def loop(get):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            get()
            for _ in range(10):
                weight @ weight
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    on_device = move(big, DEVICE)
    resident, moved, plain = lambda: on_device, lambda: moving(big), lambda: move(big, DEVICE)
    for one in (resident, moved, plain):
        loop(one)
    times = [(loop(resident), loop(moved), loop(plain)) for _ in range(5)]
    alone, beside, behind = (sorted(each)[2] for each in zip(*times, strict=True))
    assert beside < (alone + behind) / 2, (alone, beside, behind)


def images():
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (50, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(0, 3, (50,), generator=generator)


NORMALIZE = Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def trained(data, val, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(NORMALIZE, nn.Flatten(), nn.Linear(3 * 8 * 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), device=DEVICE, console=False, **settings)
    result = trainer.fit(data, val, epochs=3)
    return [one.detach().cpu() for one in model.parameters()], result.history


def test_data_that_lie_on_the_device_train_what_data_on_the_host_do():
    seen = []
    for device_data in (True, False):
        data = batches(images(), 8, shuffle=True, seed=1)
        seen.append(trained(data, batches(images(), 16), fast=Fast(device_data=device_data)))
        assert data._resident is None
    assert all(map(torch.equal, seen[0][0], seen[1][0])) and seen[0][1] == seen[1][1]


def test_images_are_normalized_on_the_device_as_on_the_host_and_without_a_wait():
    x, _ = images()
    layer, there = NORMALIZE.to(DEVICE), x.to(DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = layer(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made.cpu(), NORMALIZE.to("cpu")(x), rtol=1e-6, atol=1e-6)


def test_a_permutation_is_sent_without_a_wait_and_batches_are_gathered_on_the_device():
    source, plain = batches(images(), 8, shuffle=True, seed=1), batches(images(), 8, shuffle=True, seed=1)
    source.reside(DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = list(source.epoch(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(there, plain.epoch(0), strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(one, other, strict=True))
