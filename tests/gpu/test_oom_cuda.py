"""Memory that really runs out on a GPU: windows are split, and the largest batch is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trainwright import Fast, Trainer, find_batch_size

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture
def small(device: torch.device) -> Iterator[int]:
    """A GPU of which 640 MiB may be used: nothing of earlier tests, and the workspaces of cuBLAS, lies in them."""
    gc.collect()
    torch.cuda.empty_cache()
    bytes_in_all = 640 * MIB
    torch.cuda.set_per_process_memory_fraction(bytes_in_all / torch.cuda.get_device_properties(device).total_memory)
    yield bytes_in_all
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def make(device: torch.device, **settings: object) -> Trainer[nn.Module]:
    """A model of 128 MiB, and as much of gradients, that takes about 100 KiB a row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 4)).double()
    optimizer, fast = torch.optim.SGD(model.parameters(), lr=0.01), Fast()
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), device=device, console=False, fast=fast, **settings)  # type: ignore[arg-type]


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 4096 rows, which do not fit."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8192, 16, generator=generator, dtype=torch.float64)
    return list(zip(x.split(4096), torch.randint(4, (8192,), generator=generator).split(4096), strict=True))


def test_a_window_that_does_not_fit_is_split(device: torch.device, small: int) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make(device).fit(data(), epochs=1)
    assert 'on_oom="split"' in "".join(caught.value.__notes__)
    del caught
    gc.collect()
    split = make(device, on_oom="split")
    result = split.fit(data(), epochs=2)
    assert result.updates == 4 and "out of memory in update 1" in result.notes[0]
    ours = [p.detach().cpu() for p in split.model.parameters()]
    del split
    gc.collect()  # there is no room for two of them
    by_hand = make(device, accumulate=16)
    by_hand.fit([(a, b) for x, y in data() for a, b in zip(x.split(256), y.split(256), strict=True)], epochs=2)
    for one, other in zip(ours, [p.detach().cpu() for p in by_hand.model.parameters()], strict=True):
        assert float((one - other).abs().max() / other.abs().max()) <= 1e-12


def test_the_largest_batch_fits_and_is_found_in_four_trials(device: torch.device, small: int) -> None:
    trainer = make(device)
    before = [p.detach().cpu() for p in trainer.model.parameters()]
    found = find_batch_size(trainer, data(), budget=small, most=4096)
    assert 64 <= found.rows < 4096 and len(found.trials) <= 4
    assert found.how == "torch.cuda.max_memory_allocated" and found.fixed is not None and found.fixed > 64 * MIB
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, trainer.model.parameters(), strict=True))
