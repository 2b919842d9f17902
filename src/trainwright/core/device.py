"""Choose a device, place the model there, move nested batches without changing their types, and read its memory."""

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
"""The device of loaded state that was saved on an accelerator: one device, or a function of the saved name."""
_FULL = (
    *("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory"),
    *("CUDA error: out of memory", "CUDA out of memory", "MPS backend out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""Texts of errors without a class of their own that mean that memory has run out."""


def choose_device(wanted: str | torch.device, model: nn.Module) -> torch.device:
    """Return the device of a run and its batches; "auto" is the device of the model, else cuda, mps, cpu.

    For a model on several devices it is the one of the first parameters, and `device=` is refused.
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
    """Return the devices of a module's parameters, in their order, then those of its buffers."""
    return list(dict.fromkeys(tensor.device for tensor in (*module.parameters(), *module.buffers())))


def place(module: nn.Module, device: torch.device, *, beside: nn.Module | None = None) -> None:
    """Move a module to `device` in place; a module on several devices stays as it is.

    `beside`: the model of a loss or a teacher. A module on one of several devices of that model stays too: it may
    belong to any of them.
    """
    placed, of_model = devices_of(module), [] if beside is None else devices_of(beside)
    stays = len(of_model) > 1 and set(placed) <= set(of_model)
    if len(placed) == 1 and placed != [device] and not stays:
        module.to(device)


def refuse_meta(module: nn.Module, what: str, *, want: str = "") -> None:
    """Refuse a module with tensors on the meta device, which have shapes and no data; `what` names it."""
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
    """Return the device of state that is loaded for this model: the `device` of the run.

    For a model on several devices each tensor returns to its own, if the model is there still.
    """
    placed = {str(used): used for used in devices_of(model)}
    return device if len(placed) < 2 else lambda saved: placed.get(saved, device)


def move(batch: Any, device: torch.device) -> Any:
    """Return a nested batch with its tensors on `device`; tuples, named tuples, dicts, dataclasses keep their types."""
    return change(batch, device, lambda tensor: tensor.to(device, non_blocking=_is_awaited(tensor, device)))


def change(batch: Any, device: torch.device, each: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested batch with `each` applied to its tensors; an object with a method `to` is moved to `device`."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return each(leaf)
        return leaf.to(device) if moves_itself(leaf) else leaf

    return map_tree(changed, batch, is_leaf=moves_itself)


def moves_itself(batch: Any) -> bool:
    """Return whether a batch, or a value in it, has a method `to`."""
    return hasattr(batch, "to") and callable(batch.to)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating type of a device: float64, and float32 on mps, which has no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory has run out: by torch's class, a MemoryError, or the text."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)


def release_memory(device: torch.device, free: Callable[[], None] = lambda: None) -> None:
    """Free unreferenced memory and torch's caches; `free` is called when the device has finished its work.

    The path of CUDA has not run on a GPU yet.
    """
    gc.collect()  # reference cycles hold autograd graphs
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    free()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def available_memory(device: torch.device) -> int:
    """Return the bytes that new tensors may take on a CUDA device: unused ones of torch's allocator, and free ones.

    Within the share of the process (`torch.cuda.set_per_process_memory_fraction`). Not run on a GPU yet.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved: int = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)


def device_memory(device: torch.device) -> dict[str, int]:
    """Return bytes by name: `allocated`, `reserved`, `peak` (of allocated, so far) on CUDA, `allocated` on mps.

    On the CPU `process`, the resident memory of this process on Linux; empty where it is unknown.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        kinds = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
        found = {name: stats.get(kind, 0) for name, kind in kinds.items()}
        return found | {"peak": stats.get("allocated_bytes.all.peak", 0)}
    if device.type == "mps":
        return {"allocated": torch.mps.current_allocated_memory()}
    if device.type == "cpu" and sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:  # pages: of all, and resident ones
            return {"process": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    return {}


def _is_awaited(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a copy to `device` may run while the host continues."""
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
        except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:  # it differs by backend
            what = f"device={str(wanted)!r}, and this torch cannot use it"
            raise SettingError(what, have=first_line(error, 100), fix='device="auto"') from error
    return device


def _moved_nowhere(wanted: str | torch.device, placed: list[torch.device]) -> SettingError:
    """Return the refusal of `device=` for a model on several devices: it would be moved, or the setting ignored."""
    return SettingError(
        f"device={str(wanted)!r}, and the model is on several devices",
        have=", ".join(map(str, placed)),
        want=f"no device: such a model is never moved; batches go where its first parameters are, {placed[0]}",
        fix="leave device= out, or model.to(device) before, to have all of it on one",
    )


def usable_cores() -> int:
    """Return the number of cores that the affinity and the control group of this process allow; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(bound, int(_quota() or bound)))


def _quota() -> float | None:
    """Return the CPU quota of the control group of this process, in cores; None without a limit."""
    for path, joined in (("/sys/fs/cgroup/cpu.max", True), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", False)):
        file = Path(path)
        if not file.is_file():
            continue
        parts = file.read_text().split()
        period = parts[1] if joined else Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        return None if parts[0] in ("max", "-1") else max(1.0, float(parts[0]) / float(period))
    return None
