"""The parts of the fast path on a real GPU: late errors, fused kernels, precision, compile, memory, and its meter."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from gpu_runs import (
    SIZE,
    UPDATES,
    Case,
    checked_at_once,
    data_of,
    distance,
    fitted,
    host_batches,
    make,
    net,
    noisy_net,
    path_of,
    rows,
    same,
    state_of,
    tensors,
    trained,
)
from torch import nn

from trainwright import Fast, NonFiniteError, Observer, Trainer, Updates, batches
from trainwright.checkpointing.tensorfile import Contents
from trainwright.checkpointing.writer import Memory, memory_needs
from trainwright.observers import Throughput
from trainwright.optim.fused import maskable_step_of, ready_to_mask

pytestmark = pytest.mark.gpu

CASE = Case("adamw", 0.25, "one", None, "step")

# Errors that come late.


def poisoned(case: Case, at: int) -> list[Any]:
    """Data of which one batch makes the loss NaN."""
    data = data_of(case)
    x, y = data[at]
    data[at] = torch.full_like(x, torch.nan), y
    return data


def refused(case: Case, device: torch.device, at: int, **settings: Any) -> tuple[Any, str]:
    """A trainer that a loss has ended which is not finite, and what it said."""
    trainer = make(case, device, **settings)
    with pytest.raises(NonFiniteError) as raised:
        fitted(trainer, poisoned(case, at))
    return trainer, str(raised.value)


LATE = {
    "one": CASE,
    "four": Case("adamw", 0.25, "four", None, "step"),
    "bf16": Case("sgd", 0.25, "one", "bf16", "step"),
    "cycled": Case("sgd", None, "one", None, "cycled"),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("at", [0, 2, 6, 11])
@pytest.mark.parametrize("kind", LATE)
def test_an_error_that_comes_late_leaves_what_one_at_once_does(kind: str, at: int, device: torch.device) -> None:
    case = LATE[kind]
    late, said_late = refused(case, device, at, build=noisy_net)
    with checked_at_once():
        at_once, said = refused(case, device, at, build=noisy_net)
    assert said_late == said
    assert f"update {at // case.micro_batches + 1}" in said
    # Clipping may be folded into the step of an update that is judged late.
    assert same(tensors(late.model), tensors(at_once.model)) or case.clip
    assert distance(late.model, at_once.model) <= 1e-5
    assert late.progress.updates == at_once.progress.updates == at // case.micro_batches
    assert late.progress.batch == at_once.progress.batch
    assert late.optimizer.param_groups[0]["lr"] == at_once.optimizer.param_groups[0]["lr"]
    assert [int(norm.num_batches_tracked) for norm in norms(late)] == [late.progress.batch] * 2


def norms(trainer: Any) -> list[Any]:
    return [one for one in trainer.model.modules() if isinstance(one, nn.BatchNorm1d)]


# Fused kernels that are called directly.

FORMS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "maximize": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, dampening=0.1, maximize=True, fused=True),
}


def stepped(form: str, device: torch.device, *, direct: bool, held_back: int | None = None, steps: int = 8) -> Any:
    """What a model and its optimizer are after some steps, one of which may be held back."""
    model = net().to(device)
    optimizer = FORMS[form](model.parameters())
    found = torch.zeros((), device=device)
    if held_back is not None:
        ready_to_mask(optimizer)
    step = maskable_step_of(optimizer, found if held_back is not None else None)
    for number, (x, y) in enumerate(host_batches(steps)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        found.fill_(number == held_back)
        for group in optimizer.param_groups:
            group["lr"] *= 0.75
        if direct:
            step()
        elif number != held_back:
            optimizer.step()
    return [*tensors(model), *[v.cpu() for one in optimizer.state.values() for v in one.values() if v is not None]]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_that_is_called_directly_is_the_step(form: str, device: torch.device) -> None:
    assert same(stepped(form, device, direct=True), stepped(form, device, direct=False))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("held_back", [0, 1, 5])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "maximize"])  # dampening cannot be held back
def test_a_step_that_the_device_holds_back_moves_nothing(form: str, held_back: int, device: torch.device) -> None:
    ours = stepped(form, device, direct=True, held_back=held_back)
    for one, other in zip(ours, stepped(form, device, direct=False, held_back=held_back), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# Precision.


def native(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@pytest.mark.usefixtures("deterministic")
def test_auto_is_bf16_where_the_device_computes_it(device: torch.device) -> None:
    auto, reported = (
        trained(CASE, device, precision="auto"),
        trained(CASE, device, precision="bf16" if native(device) else None),
    )
    assert str(auto.precision) == ("bf16" if native(device) else "None")
    assert same(state_of(auto), state_of(reported))


def products(device: torch.device, precision: str | None) -> tuple[Any, str]:
    """What a step computes of a large product, and the process's setting after the fit."""
    seen = []

    class Looks(Trainer[nn.Module]):
        def training_step(self, batch: Any) -> Any:
            generator = torch.Generator().manual_seed(5)
            a = torch.randn(512, 512, generator=generator).to(self.device)
            seen.append((a @ a).cpu())
            return super().training_step(batch)

    fitted(make(Case(), device, kind=Looks, precision=precision), data_of(Case()), updates=1)
    return seen[0], torch.get_float32_matmul_precision()


def test_tf32_is_used_where_it_was_asked_for_and_put_back(device: torch.device) -> None:
    exact, before = products(device, None)
    rounded, after = products(device, "tf32")
    again, _ = products(device, None)
    assert before == after
    assert torch.equal(exact, again)
    off = float((exact - rounded).abs().max() / exact.abs().max())
    assert (1e-6 < off < 1e-2) if native(device) else off == 0


# Compile.

COMPILER = bool(importlib.util.find_spec("triton")) and any(map(shutil.which, ("cc", "gcc", "clang")))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return x + torch.relu(self.linear(self.norm(x)))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), *[Block() for _ in range(3)], nn.Linear(64, 5))


@pytest.mark.skipif(not COMPILER, reason="needs triton, and a compiler of C for it")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_compiled_is_eager(precision: str | None, device: torch.device) -> None:
    eager, compiled = compiled_too("inductor", device, precision=precision)
    assert "compiled" in path_of(compiled)
    assert distance(eager.model, compiled.model) <= (1e-5 if precision is None else 1e-3)


def test_compiled_without_other_kernels_is_eager(device: torch.device) -> None:
    eager, compiled = compiled_too("aot_eager", device)
    assert distance(eager.model, compiled.model) <= 1e-6


def compiled_too(
    backend: str, device: torch.device, *, precision: str | None = None, updates: int = 20
) -> tuple[Any, Any]:
    """An eager run, and the same compiled."""
    case = Case("adamw", 0.25, "one", precision, "step")
    fast = Fast(compile={"backend": backend})
    eager = trained(case, device, build=blocks, updates=updates)
    return eager, trained(case, device, build=blocks, updates=updates, fast=fast)


# Memory.


class PeakMemory(Observer):
    """What the device's allocator, and that of pinned memory, hold at some updates."""

    def __init__(self, device: torch.device, at: tuple[int, ...]) -> None:
        self._device, self._at = device, at
        self.held: list[tuple[int, ...]] = []

    def on_update(self, update: Any) -> None:
        if update.update in self._at and self._device.type == "cuda":
            host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
            found = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
            self.held.append((*found, host.get("allocated_bytes.current", 0)))


def held_at(at: tuple[int, ...], device: torch.device, *, kind: str) -> list[tuple[int, ...]]:
    """What was held at these updates of a run over several epochs, with data of one kind."""
    memory = PeakMemory(device, at)
    data = host_batches(100) if kind == "host" else batches(rows(100 * SIZE), SIZE, shuffle=True, seed=0)
    gc.collect()
    trained(CASE, device, data=data, updates=at[-1] + 10, observers=[memory])
    return memory.held


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_thousand_updates_take_no_more_memory_than_fifty(kind: str, device: torch.device) -> None:
    held = held_at((150, 450, 1150), device, kind=kind)
    assert len(held) == 3
    assert held[0] == held[1] == held[2]


def copied(device: torch.device) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Tensors of a device, what a checkpoint's memory holds of them, and whether that is pinned."""
    model = net().to(device)
    arena, tensors_of = Memory(), dict(model.state_dict())
    files: dict[str, Any] = {"model": Contents(tensors_of, {})}
    arena.reserve(*memory_needs(files))
    held: Any = arena.copy(files)["model"]
    values = {name: one.clone() for name, one in held.tensors.items()}
    pinned = all(one.is_pinned() for one in held.tensors.values()) if device.type == "cuda" else False
    held.tensors.clear()
    arena.free()
    return tensors_of, values, pinned


def test_what_is_saved_is_copied_to_pinned_memory(device: torch.device) -> None:
    there, here, pinned = copied(device)
    assert pinned
    assert all(torch.equal(one.cpu(), here[name]) for name, one in there.items())


# The meter.


class Reported(Observer):
    def __init__(self) -> None:
        self.speeds: list[Any] = []

    def on_speed(self, speed: Any) -> None:
        self.speeds.append(speed)


def wide(width: int, depth: int) -> Any:
    """A model of nothing but large products."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
    return lambda: nn.Sequential(*layers[:-1])


def measured(device: torch.device, *, width: int, size: int, updates: int, depth: int = 4) -> tuple[list[Any], float]:
    """What a meter tells of a run, and the seconds that the device took for it by events of its own."""
    reported, timing = Reported(), device.type == "cuda"
    x = torch.randn(size, width, device=device)
    data = [(x, x)] * updates
    trainer = make(
        Case("sgd", None, "one", "bf16"),
        device,
        build=wide(width, depth),
        loss=nn.MSELoss(),
        observers=[Throughput(every=Updates(updates // 2)), reported],
    )
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if timing else []
    for end in ends[:1]:
        end.record()
    fitted(trainer, data, updates=updates)
    for end in ends[1:]:
        end.record()
        end.synchronize()
    return reported.speeds, ends[0].elapsed_time(ends[1]) / 1000 if timing else 0.0


def test_the_meter_tells_what_large_products_reach(device: torch.device) -> None:
    measured(device, width=4096, size=8192, updates=4)  # what is loaded first
    speeds, seconds = measured(device, width=4096, size=8192, updates=40)
    last = speeds[-1]
    assert last.flops_per_row == (6 * 4 - 2) * 4096**2  # the input memory_needs no gradient
    if last.peak is None:
        pytest.skip(last.note)
    assert 0.2 < last.mfu < 1.0
    assert sum(one.seconds for one in speeds) <= 1.1 * seconds
    assert sum(one.updates for one in speeds) == 40
    assert last.memory["peak"] >= last.memory["allocated"] >= last.memory["parameters"] == 4 * 4 * 4096**2


def test_the_meter_tells_what_is_bound_by_launches(device: torch.device) -> None:
    speeds, _ = measured(device, width=16, size=8, updates=UPDATES)
    assert 0 <= (speeds[-1].mfu or 0) < 0.01
    assert speeds[-1].updates_per_second > 50
