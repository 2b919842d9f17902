"""What a CPU and its process are set to, and the settings of the process that are worth a try, in words."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainwright.core.device import usable_cores

PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "TORCH_", "ATEN_", "LD_PRELOAD", "THP_MEM_ALLOC")
"""Of variables of the environment that threads, memory and kernels of a process depend on."""
JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
"""Memory that was given back is kept: torch's tuning guide advises so."""
_MEBI = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """The cores that this process may use, and what it does with them."""

    cores: int
    """That may be used: of those that it is bound to, no more than the limit of its control group."""
    physical: int | None
    """Cores that are not two threads of one; None where the system does not tell."""
    sockets: int | None
    threads: int
    """Inside of one operator."""
    interop_threads: int
    """Between operators."""
    openmp: str
    """The library that runs the threads: "libgomp", "libiomp5", "libomp", or ""."""
    allocator: str
    """"jemalloc", "tcmalloc", "mimalloc", or "the system's"."""
    vectors: str
    """The widest instructions that torch's kernels use: "AVX512", "AVX2", "DEFAULT"."""
    mkldnn: bool
    bf16: bool
    """Whether products in bfloat16 have instructions of their own: AVX512_BF16, AMX or ARM's."""
    amx: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is set of the variables that matter."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting that holds for a process, mostly from its start on."""

    name: str
    how: str
    """The line to write: in the shell, or first in the script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """Where it pays, or how to install it."""


def cpu_facts() -> CpuFacts:
    """Return what this process may use of the CPU, and what it is set to."""
    flags, physical, sockets = _cpuinfo()
    loaded = _loaded()
    return CpuFacts(
        cores=usable_cores(),
        physical=physical,
        sockets=sockets,
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        openmp=next((name for name in ("libiomp5", "libgomp", "libomp") if name in loaded), ""),
        allocator=next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in loaded), "the system's"),
        vectors=torch.backends.cpu.get_cpu_capability(),
        mkldnn=bool(torch.backends.mkldnn.is_available()),
        bf16=not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"}),
        amx="amx_tile" in flags,
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    )


def settings_to_try(facts: CpuFacts | None = None) -> list[Setting]:
    """Return the settings of a process that may make it faster on this machine, those that it has left out.

    They are advice, not measured: time a run of the whole script with and without each.
    """
    facts = cpu_facts() if facts is None else facts
    found = [*_threads(facts), *_binding(facts), *_allocators(facts), _flushing()]
    return [one for one in found if not one.environment or not one.environment.items() <= facts.environment.items()]


def _threads(facts: CpuFacts) -> Iterator[Setting]:
    """Other numbers of threads: one, as many as there are cores, and half of them."""
    whole = min(facts.physical or facts.cores, facts.cores)
    for number in sorted({1, max(1, whole // 2), whole} - {facts.threads}):
        how = f"OMP_NUM_THREADS={number} python train.py"
        yield Setting(
            name=f"{number} thread{'s' if number > 1 else ''}", how=how, environment={"OMP_NUM_THREADS": str(number)}
        )
    if facts.interop_threads != 1:
        how = "torch.set_num_interop_threads(1)  # right after import torch"
        yield Setting(name="1 interop thread", how=how, note="a model without parallel branches")


def _binding(facts: CpuFacts) -> Iterator[Setting]:
    """Threads that stay on their cores, where there are some to stay on."""
    if facts.cores < 2:
        return
    if facts.openmp == "libiomp5":
        each = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    else:
        each = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    yield _of("threads bound to cores", each)
    if (facts.sockets or 1) > 1:
        how = "numactl --cpunodebind=0 --membind=0 python train.py"
        yield Setting(name="one socket", how=how, note="memory of the other socket is slower")


def _allocators(facts: CpuFacts) -> Iterator[Setting]:
    """Other allocators, where they are installed, and the system's with other limits."""
    if platform.system() != "Linux":
        return
    if facts.allocator == "the system's":
        kept = {"MALLOC_MMAP_THRESHOLD_": str(32 * _MEBI), "MALLOC_TRIM_THRESHOLD_": str(1024 * _MEBI)}
        yield _of("glibc keeps its memory", kept)
        for name in ("jemalloc", "tcmalloc"):
            yield _preloaded(name)
    yield _of("huge pages", {"THP_MEM_ALLOC_ENABLE": "1"})


def _preloaded(name: str) -> Setting:
    found = next((one for one in (name, f"{name}_minimal") if ctypes.util.find_library(one)), "")
    path = ctypes.util.find_library(found) if found else None
    package = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}[name]
    if path is None:
        how = f"LD_PRELOAD=lib{name}.so python train.py"
        return Setting(name=name, how=how, note=f"install it first: apt install {package}")
    each = {"LD_PRELOAD": " ".join(filter(None, (path, os.environ.get("LD_PRELOAD"))))}
    return _of(name, each | ({"MALLOC_CONF": JEMALLOC} if name == "jemalloc" else {}))


def _of(name: str, environment: dict[str, str]) -> Setting:
    quoted = (f'{key}="{value}"' if not value.isalnum() else f"{key}={value}" for key, value in environment.items())
    return Setting(name=name, how=f"{' '.join(quoted)} python train.py", environment=environment)


def _flushing() -> Setting:
    note = "numbers that fade over many steps: products of denormal numbers are slow; else it changes nothing"
    return Setting(name="flush denormal", how="torch.set_flush_denormal(True)", note=note)


def _cpuinfo() -> tuple[frozenset[str], int | None, int | None]:
    """The flags of the first core, physical cores and sockets, as Linux tells them."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.M)
    cores = set(re.findall(r"^physical id\s*: (\d+)(?:.*\n)+?^core id\s*: (\d+)", text, re.M))
    names = frozenset(flags[1].split()) if flags else frozenset()
    return names, len(cores) or None, len({socket for socket, _ in cores}) or None


def _loaded() -> str:
    """The names of the libraries that this process has loaded."""
    file = Path("/proc/self/maps")
    return file.read_text() if file.is_file() else ""
