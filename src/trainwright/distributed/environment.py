"""Rank and world size from environment variables, and the rendezvous of the ranks in a store.

Reads the variables of torchrun, MPI launchers and Slurm's `srun`. A launcher's store outlives the processes that it
restarts. Every wait for another rank has a time limit and is reported.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from trainwright.core.errors import SettingError

_LAST_STEP = 0xFFFFFFF0
"""The first step id that Slurm gives to shells (batch, interactive, extern)."""
_ALONE = "parallel=None for a process of its own"


@dataclass(frozen=True, slots=True)
class Place:
    """Rank, world size and rendezvous address of a process that a launcher has started."""

    rank: int
    size: int
    local_rank: int | None
    """The rank on its machine; None if no variable states it."""
    address: str
    """The address of the store of rank 0 or of the launcher, "host:port"."""
    launcher: str
    """The launcher that set the variables: "torchrun", "mpirun" or "srun"."""


@dataclass(frozen=True, slots=True)
class _Mpi:
    """The variables of one family of MPI launchers; of several names, the first one that is set counts."""

    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_PMI = _Mpi("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"))
"""MPICH, Intel MPI, MS-MPI. `srun --mpi=pmi2` sets rank and size too."""
_LAUNCHERS = (
    *(  # Open MPI; MVAPICH2
        _Mpi(f"{name}_RANK", f"{name}_SIZE", (f"{name}_LOCAL_RANK",), (f"{name}_LOCAL_SIZE",))
        for name in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    ),
    _PMI,
)
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID")
"""Variables with an id of the job: equal in all processes of one `mpirun`, different in another."""
_SIZES = (*(one.size for one in _LAUNCHERS), "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE", "LOCAL_WORLD_SIZE")
_RANKS = ("PMIX_RANK", "PALS_RANKID", "LOCAL_RANK")


def read_environment() -> Place | None:
    """Return rank and world size of this process; None if it is the only one.

    Raises SettingError if variables contradict each other, since ranks would then wait for a rank that does not exist,
    and if a variable implies several processes that cannot form a group.
    """
    if "WORLD_SIZE" in os.environ or "RANK" in os.environ:
        place = _of_torchrun()
        if place is None and "TORCHELASTIC_RUN_ID" not in os.environ:
            check_alone("WORLD_SIZE is 1")  # exported by hand or by an image: each process would train alone
        return place
    for launcher in _LAUNCHERS:
        if launcher.size in os.environ and (launcher is not _PMI or os.environ[launcher.size] != _size_of_step()):
            return _of_mpi(launcher)
    if "SLURM_NTASKS" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ:
        return _of_slurm()
    check_alone("WORLD_SIZE is not set")
    return None


def rank_and_size() -> tuple[int, int]:
    """Return rank and world size of this process, from the initialized process group or else from the environment.

    Raises SettingError if variables contradict each other.
    """
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = read_environment()
    return (0, 1) if place is None else (place.rank, place.size)


def check_alone(what: str) -> None:
    """Raise SettingError if a variable implies that several processes were started; `what`: why this one is alone."""
    least = {name: 1 for name in _SIZES} | {name: 0 for name in _RANKS}
    if _size_of_step():
        least["SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"] = 1
    for name, most in least.items():
        given = os.environ.get(name, "").strip()
        if given.isdecimal() and int(given) > most:
            _refuse(
                f"{what}, and {name} is {given}: several processes would train apart from each other",
                want="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
                fix=f"start the script with torchrun, or export these four for each process, or {_ALONE}",
            )


def is_shell_of_slurm() -> bool:
    """Return whether this is the shell of a Slurm job: it runs once, with the resources of several tasks."""
    names = ("WORLD_SIZE", "RANK", *_SIZES, *_RANKS)
    return "SLURM_NTASKS" in os.environ and not _size_of_step() and not any(name in os.environ for name in names)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: "node01" for "node[01-03,7],gpu1"."""
    first = re.split(r",(?![^\[]*\])", nodes.strip())[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def variables() -> str:
    """Return the variables that this module reads and that are set, as text."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_NODELIST")
    mpi = [name for one in _LAUNCHERS for name in (one.rank, one.size, *one.local_rank, *one.local_size)]
    read = dict.fromkeys((*names, *mpi, *_SIZES, *_RANKS, *slurm))
    return ", ".join(f"{name}={os.environ[name]}" for name in read if name in os.environ)


def _of_torchrun() -> Place | None:
    if "WORLD_SIZE" not in os.environ:
        _refuse("RANK is set and WORLD_SIZE is not", fix=f"start the script with torchrun, or unset RANK, or {_ALONE}")
    size = _number("WORLD_SIZE", least=1)
    if "RANK" not in os.environ:
        if size == 1:
            return None
        _refuse(f"WORLD_SIZE is {size} and RANK is not set", fix=f"start the script with torchrun, or {_ALONE}")
    rank, local_rank = _rank_of("RANK", size), None
    if "LOCAL_RANK" in os.environ:
        local_rank = _rank_of("LOCAL_RANK", size)
    if size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            fix = f"start the script with torchrun, which sets it, or export {name}, or {_ALONE}"
            _refuse(f"WORLD_SIZE is {size} and {name} is not set", want="the host and the port of rank 0", fix=fix)
    return Place(rank, size, local_rank, f"{_host(os.environ['MASTER_ADDR'])}:{_port()}", "torchrun")


def _of_mpi(launcher: _Mpi) -> Place | None:
    """Read the variables of `mpirun`, which do not include an address."""
    size = _number(launcher.size, least=1)
    if size == 1:
        return None
    rank = _rank_of(launcher.rank, size)
    local_rank = next((_rank_of(name, size) for name in launcher.local_rank if name in os.environ), None)
    host, fix = os.environ.get("MASTER_ADDR", ""), "export MASTER_ADDR=$(hostname) MASTER_PORT=29500 before mpirun"
    fix = f"{fix}, with `-x MASTER_ADDR -x MASTER_PORT` for Open MPI, or {_ALONE}"
    if not host:
        local_size = next((_number(name, least=1) for name in launcher.local_size if name in os.environ), 0)
        if local_size != size:
            what = f"{launcher.size} is {size}, not all are known to be on this machine, and MASTER_ADDR is not set"
            _refuse(what, want="the host of rank 0", fix=fix)
        host = "127.0.0.1"
    job = next((os.environ[name] for name in _JOBS if os.environ.get(name)), "")
    if not job and not os.environ.get("MASTER_PORT"):
        _refuse(f"{launcher.size} is {size}, and MASTER_PORT is not set", want="the port of rank 0", fix=fix)
    port = _port() if os.environ.get("MASTER_PORT") else 15_000 + zlib.crc32(job.encode()) % 15_000
    return Place(rank, size, local_rank, f"{_host(host)}:{port}", "mpirun")


def _size_of_step() -> str:
    """Return the number of tasks of the `srun` that started this process; "" outside of `srun`."""
    step, of_step = os.environ.get("SLURM_STEP_ID", ""), "SLURM_STEP_NUM_TASKS"
    if not step.isdigit() or int(step) >= _LAST_STEP:
        return ""
    return os.environ.get(of_step, os.environ.get("SLURM_NTASKS", ""))  # SLURM_NTASKS may be that of the complete job


def _of_slurm() -> Place | None:
    """Read the variables of `srun`.

    The shell of `sbatch` or `salloc` has the job's number of tasks too, but only one process runs there.
    """
    step = os.environ.get("SLURM_STEP_ID", "")
    if not _size_of_step():
        tasks = _number("SLURM_NTASKS", least=1) if "SLURM_NTASKS" in os.environ else 1
        if tasks > 1:
            fix = f"write `srun python script.py` in the job's script, or {_ALONE}"
            _refuse(f"this Slurm job has {tasks} tasks, and the script runs once, outside `srun`", fix=fix)
        return None
    of_step = "SLURM_STEP_NUM_TASKS"  # of this `srun`; SLURM_NTASKS may be that of the complete job
    size = _number(of_step if of_step in os.environ else "SLURM_NTASKS", least=1)
    if size == 1:
        return None
    rank = _rank_of("SLURM_PROCID", size)
    local_rank = _rank_of("SLURM_LOCALID", size) if "SLURM_LOCALID" in os.environ else None
    return Place(rank, size, local_rank, f"{_host_of_slurm()}:{_port_of_slurm(int(step))}", "srun")


def _host_of_slurm() -> str:
    if os.environ.get("MASTER_ADDR"):
        return _host(os.environ["MASTER_ADDR"])
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if os.environ.get(name):
            return first_host(os.environ[name])
    _refuse("Slurm names no hosts: SLURM_NODELIST is not set", fix=f"export MASTER_ADDR, or {_ALONE}")


def _port_of_slurm(step: int) -> int:
    """Return a port that depends on job and step, below the range of ephemeral ports."""
    if os.environ.get("MASTER_PORT"):
        return _port()
    job = "SLURM_JOB_ID" if "SLURM_JOB_ID" in os.environ else "SLURM_JOBID"
    return 15_000 + (31 * _number(job, least=0) + step) % 15_000


def _host(given: str) -> str:
    return f"[{given}]" if ":" in given and not given.startswith("[") else given  # IPv6 as in a URL


def _port() -> int:
    port = _number("MASTER_PORT", least=0)
    if port > 65_535:
        _refuse(f"MASTER_PORT is {port}", want="a port, 0 to 65535")
    return port


def _rank_of(name: str, size: int) -> int:
    rank = _number(name, least=0)
    if rank >= size:
        _refuse(f"{name} is {rank}, and there are {size} processes", want=f"{name} from 0 to {size - 1}")
    return rank


def _number(name: str, *, least: int) -> int:
    given = os.environ.get(name)
    if given is None:
        _refuse(f"{name} is not set", want=f"a whole number, at least {least}", fix=_ALONE)
    if not re.fullmatch(r"\s*[0-9]+\s*", given) or int(given) < least:
        _refuse(f"{name} is {given!r}", want=f"a whole number, at least {least}")
    return int(given)


def _refuse(
    what: str, *, want: str = "", fix: str = f"start the script with torchrun or `srun`, or {_ALONE}"
) -> NoReturn:
    raise SettingError(what, have=variables(), want=want, fix=fix)


# Rendezvous of the ranks in a store.

PAUSE = 0.02
"""Seconds between two polls of the store by rank 0."""
REPORT_AFTER = 10.0
"""Seconds of waiting before a report. Many processes that import torch at once start slowly."""
LAST_WAIT = 10.0
"""Seconds to wait at exit for threads that have not returned."""
_SHOWN = 8
"""Number of ranks that a report names."""

_threads: list[threading.Thread] = []
"""Threads that have not returned in time."""


def share_store() -> bool:
    """Whether the launcher hosts the store, which then survives a restart of the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_part(
    dist: Any, store: Any, *, rank: int, size: int, seconds: float, look: Callable[[Sequence[int]], None] | None = None
) -> Any:
    """Return a store with a key prefix that only the processes of this attempt share; all ranks call this.

    The launcher's store still holds keys of earlier attempts. A group that reads them waits for dead processes, as
    torch's own groups do after a restart by torchrun. The number of restarts does not identify an attempt: launchers
    on several machines count separately. So each rank writes a random token, and rank 0 of this attempt answers it with
    the prefix. Rank 0 calls `look` repeatedly with the ranks that are still missing.

    Raises torch's DistStoreError if a rank does not join within `seconds`.
    """
    word = secrets.token_hex(8)
    rendezvous = dist.PrefixStore("trainwright/rendezvous", store)
    if rank:
        rendezvous.set(f"asks/{rank}", word)
        word = rendezvous.get(f"answer/{word}").decode()
        rendezvous.set(f"joined/{word}/{rank}", "")
    else:
        _answer(dist, rendezvous, word, size=size, seconds=seconds, look=look)
    return dist.PrefixStore(f"trainwright/{word}", store)


def _answer(
    dist: Any, rendezvous: Any, word: str, *, size: int, seconds: float, look: Callable[[Sequence[int]], None] | None
) -> None:
    """Answer every token, also those of dead processes, until all ranks have joined."""
    answered: dict[int, str] = {}
    missing, end = list(range(1, size)), time.monotonic() + seconds
    while missing:
        for rank in missing:
            if rendezvous.check([f"asks/{rank}"]):
                asked = rendezvous.get(f"asks/{rank}").decode()
                if asked != answered.get(rank):
                    rendezvous.set(f"answer/{asked}", word)
                    answered[rank] = asked
        missing = [rank for rank in missing if not rendezvous.check([f"joined/{word}/{rank}"])]
        if time.monotonic() > end:
            raise dist.DistStoreError(f"rank {missing[0]} has not joined within {seconds:g} s")
        if missing:
            if look is not None:
                look(missing)
            time.sleep(PAUSE)


class WaitReport:
    """Reports once on stderr that this rank waits for others to start."""

    def __init__(self, place: Place) -> None:
        self._place, self._begin, self._reported = place, time.monotonic(), False

    @contextmanager
    def of_rank0(self) -> Iterator[None]:
        """Report a wait for rank 0 inside the block, from a timer thread: torch's calls there cannot be interrupted."""
        if not self._place.rank:
            yield
            return
        timer = threading.Timer(REPORT_AFTER, self._report, [f"rank 0 of {self._place.size} processes does not answer"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_due(self) -> bool:
        """Whether the wait must be reported now."""
        return not self._reported and time.monotonic() >= self._begin + REPORT_AFTER

    def look(self, missing: Sequence[int]) -> None:
        """Report the missing ranks, if a report is due."""
        if self.is_due and missing:
            named = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
            size = self._place.size
            self._report(f"{size - len(missing)} of {size} processes have joined; missing: rank {named}")

    def _report(self, what: str) -> None:
        self._reported = True
        place = self._place
        text = f"rank {place.rank} waits at {place.address}: {what} (set: {variables()}; parallel=None is alone)\n"
        os.write(2, text.encode())  # one write: other ranks may write to the same terminal


def wait_for(thread: threading.Thread, seconds: float) -> None:
    """Join a daemon thread that calls torch, for at most `seconds`; join it again at exit if it is still alive.

    A thread that returns from C++ after the interpreter has ended aborts the process (`terminate called without an
    active exception`).
    """
    thread.join(seconds)
    if not thread.is_alive():
        return
    if not _threads:
        atexit.register(_wait_once_more)
    _threads.append(thread)


def _wait_once_more() -> None:
    for thread in _threads:
        thread.join(LAST_WAIT / len(_threads))
