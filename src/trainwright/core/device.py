"""Devices: the choice for a run, the placement of models, moves of nested batches, and memory in use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import SettingError, first_line, listed
from trainwright.core.trees import map_tree

Home = torch.device | Callable[[str], torch.device]
"""The target device of loaded state that was saved on an accelerator: one device, or a function of the saved name."""
_FULL = (
    *("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory"),
    *("CUDA error: out of memory", "CUDA out of memory", "MPS backend out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""Messages of out-of-memory errors that torch raises as RuntimeError."""


def choose_device(wanted: str | torch.device, model: nn.Module) -> torch.device:
    """Return the device of a run and its batches for `device=wanted`.

    "auto": the model's device if it is on an accelerator, else cuda, mps or cpu, the first that is available. For a
    model on several devices: the device of its first parameters, and SettingError for any other value than "auto".
    """
    placed = devices_of(model)
    if wanted != "auto":
        device = _named(wanted)
        if len(placed) > 1:
            raise _moved_nowhere(wanted, placed)
        if device.type == "meta" and placed and placed != [device]:
            what = f"device={str(wanted)!r}: the meta device has shapes and no data, and the weights would be lost"
            raise SettingError(what, have=f"a model on {placed[0]}", fix='device="auto"')
        return device
    if len(placed) > 1:
        return placed[0]
    for device in placed:
        if device.type != "cpu":
            return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the distinct devices of a module's parameters, then of its buffers, in order."""
    return list(dict.fromkeys(tensor.device for tensor in (*module.parameters(), *module.buffers())))


def place(module: nn.Module, device: torch.device, *, beside: nn.Module | None = None) -> None:
    """Move a module to `device` in place; no-op for a module on several devices.

    `beside`: the model that a loss or a teacher belongs to. If that model is on several devices, a module on one of
    them is not moved either.
    """
    placed, of_model = devices_of(module), [] if beside is None else devices_of(beside)
    stays = len(of_model) > 1 and set(placed) <= set(of_model)
    if len(placed) == 1 and placed != [device] and not stays:
        module.to(device)


def refuse_meta(module: nn.Module, what: str, *, want: str = "") -> None:
    """Raise SettingError for a module with tensors on the meta device; `what`: the module's name in the message."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        number = f"{len(empty)} of its {len(tensors)} tensors" if len(empty) < len(tensors) else "all of its tensors"
        raise SettingError(
            f"{what} lies on the meta device, without data",
            have=f"{number}: {listed(empty)}",
            want=want,
            fix='build it outside of torch.device("meta"); or model.to_empty(device="cpu") and '
            "load_weights(path, model), before Trainer(model, ...)",
        )


def homes(model: nn.Module, device: torch.device) -> Home:
    """Return the target of state that is loaded for this model: the `device` of the run.

    For a model on several devices, each tensor returns to the device that it was saved from, if the model uses it.
    """
    placed = {str(used): used for used in devices_of(model)}
    return device if len(placed) < 2 else lambda saved: placed.get(saved, device)


def move(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with its tensors on `device`; containers (as in `map_tree`) keep their types."""
    return change(batch, device, lambda tensor: tensor.to(device, non_blocking=_is_awaited(tensor, device)))


def change(batch: Any, device: torch.device, each: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested batch with `each` applied to its tensors; objects with a method `to` are moved by that."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return each(leaf)
        return leaf.to(device) if moves_itself(leaf) else leaf

    return map_tree(changed, batch, is_leaf=moves_itself)


def moves_itself(batch: Any) -> bool:
    """Return whether a batch, or a value in it, is moved by its own method `to`."""
    try:
        return callable(batch.to)
    except (AttributeError, KeyError):  # a `__getattr__` that reads a dict, as some outputs of models have
        return False


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of a device: float64, or float32 on mps."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error: torch's class, a MemoryError, or a known message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)


def release_memory(device: torch.device, free: Callable[[], None] = lambda: None) -> None:
    """Free unreferenced memory and torch's caches; `free` is called once the device is idle.

    The CUDA path has not run on a GPU yet.
    """
    gc.collect()  # reference cycles keep autograd graphs alive
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    free()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def available_memory(device: torch.device) -> int:
    """Return the bytes available for new tensors on a CUDA device: free memory, and cached memory of the allocator.

    Respects `torch.cuda.set_per_process_memory_fraction`. Not run on a GPU yet.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved: int = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)


def device_memory(device: torch.device) -> dict[str, int]:
    """Return memory in bytes, by name.

    CUDA: `allocated`, `reserved` and `peak` (of allocated so far). mps: `allocated`. CPU: `process`, the resident
    memory of this process, on Linux only. Otherwise empty.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        kinds = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
        found = {name: stats.get(kind, 0) for name, kind in kinds.items()}
        return found | {"peak": stats.get("allocated_bytes.all.peak", 0)}
    if device.type == "mps":
        return {"allocated": torch.mps.current_allocated_memory()}
    if device.type == "cpu" and sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:  # in pages: total, resident, ...
            return {"process": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    return {}


def _is_awaited(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a copy to `device` can be asynchronous."""
    return device.type == "cuda" and tensor.is_cpu and tensor.is_pinned()


def _named(wanted: str | torch.device) -> torch.device:
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        meant = f"cuda:{wanted}" if isinstance(wanted, int) else "cuda" if wanted == "gpu" else "auto"
        want = '"auto", "cpu", "cuda", "cuda:1", "mps"'
        raise SettingError(f"device={wanted!r} is no device", want=want, fix=f'device="{meant}"') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device={wanted!r}, and this torch sees no CUDA device", fix='device="auto"')
    if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
        what = f"device={str(wanted)!r}: there is no such CUDA device"
        raise SettingError(what, have=f"{there} of them, numbered from 0", fix='device="auto"')
    if device.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(0, device=device)
        except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:  # depends on the backend
            what = f"device={str(wanted)!r}, and this torch cannot use it"
            raise SettingError(what, have=first_line(error, 100), fix='device="auto"') from error
    return device


def _moved_nowhere(wanted: str | torch.device, placed: list[torch.device]) -> SettingError:
    """Return the error for `device=` with a model on several devices, which is never moved."""
    return SettingError(
        f"device={str(wanted)!r}, and the model is on several devices",
        have=", ".join(map(str, placed)),
        want=f"no device: such a model is never moved; batches go where its first parameters are, {placed[0]}",
        fix="leave device= out, or model.to(device) before, to have all of it on one",
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use by its affinity and its cgroup; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(bound, int(_quota() or bound)))


def _quota() -> float | None:
    """Return the CPU quota of this process's cgroup, in cores; None without a limit."""
    for path, joined in (("/sys/fs/cgroup/cpu.max", True), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", False)):
        file = Path(path)
        if not file.is_file():
            continue
        parts = file.read_text().split()
        period = parts[1] if joined else Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        return None if parts[0] in ("max", "-1") else max(1.0, float(parts[0]) / float(period))
    return None
