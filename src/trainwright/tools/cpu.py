"""What a CPU and its process are set to, and other settings of the process, tried by running a script with them."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainwright.base.errors import SettingError, message
from trainwright.runtime.cores import usable_cores
from trainwright.tools.advice import Effect

PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "TORCH_", "ATEN_", "LD_PRELOAD", "THP_MEM_ALLOC")
"""Of variables of the environment that threads, memory and kernels of a process depend on."""
OWN_SECONDS = re.compile(r"^seconds:? +([0-9.]+(?:e[-+]?\d+)?)$", re.M)
"""The line by which a script tells its own time."""
JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
"""Memory that was given back is kept: torch's tuning guide advises so."""
SLOWEST = 5.0
"""How many times as long as without it a run with a setting may take."""
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
    """One setting that a process must begin with."""

    name: str
    how: str
    """The line to write: in the shell, or first in the script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    interop_threads: int | None = None
    why_not: str = ""
    """Why it cannot be tried here."""


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
    """Return the settings of a process that may make it faster on this machine, those that it has left out."""
    facts = cpu_facts() if facts is None else facts
    found = [*_threads(facts), *_binding(facts), *_allocators(facts)]
    return [one for one in found if not one.environment or not one.environment.items() <= facts.environment.items()]


def measure_settings(
    script: str | Path, settings: Sequence[Setting], *, seconds: float = 60, arguments: Sequence[str] = ()
) -> list[Effect]:
    """Run a script in processes of its own, by turns without and with each setting, and compare the times.

    What counts is the number in a last line `seconds 1.23` where the script prints one, so that its start and imports
    can be left out; else the time of the whole process. `seconds`: about how long all of it may take. `arguments`: of
    the script. The script does whatever it does, each time: it should write nothing that a next run would find.
    SettingError where there is no such script, or it fails without any setting.
    """
    path = Path(script)
    if not path.is_file():
        raise SettingError(message(f"script={str(script)!r}: no such file", want="a Python file", fix='"train.py"'))
    begun = time.perf_counter()
    command = [str(path), *arguments]
    first = _run(command, None, limit=seconds)
    if isinstance(first, str):
        if first.startswith("it took longer"):
            return [
                Effect(name=one.name, how=one.how, why_not=f"the script alone takes over {seconds:g} s")
                for one in settings
            ]
        raise SettingError(message(f"{path.name} fails as it is", have=first, want="a script that runs to its end"))
    ratios: dict[str, list[float]] = {one.name: [] for one in settings}
    why: dict[str, str] = {one.name: one.why_not for one in settings}
    each = time.perf_counter() - begun
    for one in _in_turn(settings):
        able = [name for name in ratios if not why[name]]
        if not able or seconds - (time.perf_counter() - begun) < 2 * each:
            break
        if why[one.name]:
            continue
        ratio = _compare(command, one, swapped=len(ratios[one.name]) % 2 == 1, limit=SLOWEST * each + 1)
        if isinstance(ratio, str):
            why[one.name], ratios[one.name] = ratio, []
        else:
            ratios[one.name].append(ratio)
    return [_told(one, ratios[one.name], why[one.name]) for one in settings]


def _compare(command: list[str], one: Setting, *, swapped: bool, limit: float) -> float | str:
    """One run without and one with a setting, that one first where `swapped`: the ratio of seconds, or why not."""
    times = {with_it: _run(command, one if with_it else None, limit=limit) for with_it in (swapped, not swapped)}
    without, with_it = times[False], times[True]
    if isinstance(with_it, str):
        return with_it
    return without if isinstance(without, str) else without / with_it


def _in_turn(settings: Sequence[Setting]) -> Iterator[Setting]:
    """The settings over and over."""
    while settings:
        yield from settings


def _told(one: Setting, ratios: list[float], why_not: str) -> Effect:
    if not ratios:
        why_not = why_not or "the time was over before its turn; give more seconds"
        return Effect(name=one.name, how=one.how, why_not=why_not)
    few = len(ratios) < 2
    quartiles = (ratios[0],) * 3 if few else statistics.quantiles(ratios, n=4, method="inclusive")
    spread = (quartiles[0], quartiles[2])
    return Effect(name=one.name, how=one.how, speedup=statistics.median(ratios), spread=spread, trials=len(ratios))


def _run(command: list[str], setting: Setting | None, *, limit: float) -> float | str:
    """Run a script once; the seconds that it took, or why they are not known."""
    environment = {**os.environ, **(setting.environment if setting is not None else {})}
    interop = setting.interop_threads if setting is not None else None
    started = [sys.executable, *command]
    if interop is not None:
        code = f"import runpy, sys, torch; torch.set_num_interop_threads({interop}); sys.argv = sys.argv[1:]; "
        code += "import os; sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0])); "
        started = [sys.executable, "-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')", *command]
    begun = time.perf_counter()
    with subprocess.Popen(
        started,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            printed, complaint = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"it took longer than {limit:.0f} s"
        finally:
            _end(process)
    took = time.perf_counter() - begun
    if process.returncode:
        return (complaint.strip().splitlines() or [f"it ended with {process.returncode}"])[-1][:160]
    own = OWN_SECONDS.findall(printed)
    return float(own[-1]) if own and float(own[-1]) > 0 else took


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that is still there, with those that it has started."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


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
        yield Setting(name="1 interop thread", how=how, interop_threads=1)


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
        yield Setting(name="one socket", how=how, why_not="it is a command of its own: put it before python")


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
        return Setting(name=name, how=how, why_not=f"it is not installed: apt install {package}")
    each = {"LD_PRELOAD": " ".join(filter(None, (path, os.environ.get("LD_PRELOAD"))))}
    return _of(name, each | ({"MALLOC_CONF": JEMALLOC} if name == "jemalloc" else {}))


def _of(name: str, environment: dict[str, str]) -> Setting:
    quoted = (f'{key}="{value}"' if not value.isalnum() else f"{key}={value}" for key, value in environment.items())
    return Setting(name=name, how=f"{' '.join(quoted)} python train.py", environment=environment)


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
