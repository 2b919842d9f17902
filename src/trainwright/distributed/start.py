"""Find the processes that belong together and give them a process group: `as_world`."""

from __future__ import annotations

import atexit
import copy
import json
import os
import socket
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from trainwright.core.errors import DistributedError, SettingError, message
from trainwright.distributed.attempts import PAUSE, own_part, share_store
from trainwright.distributed.environment import Place, check_alone, read_environment
from trainwright.distributed.lingering import wait_for
from trainwright.distributed.start_wait import Waiting
from trainwright.distributed.world import Group, World

TIMEOUT = 300.0
"""Seconds after which a process that does not answer ends the run, where the settings say nothing else."""
LEAVE = 5.0
"""Seconds that taking a group down may take when the program ends: a peer that is dead never answers."""

_made: list[weakref.ref[Any]] = []
"""The process group that was made here, to be taken down in the end.

Held weakly, as all groups here: who takes a group down ends its threads, and one that somebody still holds keeps them
until after the interpreter, where they may abort the process (`terminate called without an active exception`).
"""
_known: list[tuple[weakref.ref[Any], Group]] = []
"""The process group that was seen last, and its `Group`: all trainers of a process share them."""


def as_world(parallel: Any, device_type: str = "cpu") -> World:
    """Return the processes of a run, by the `parallel` setting: for all of them to call, in the same order.

    None is one process whatever the environment says. "auto": the group that torch.distributed has already, which
    stays as it is; else the processes that torchrun, or Slurm's `srun`, has started, which get a group that lasts until
    the program ends; else one process. `DDP(...)` and `FSDP(...)` are "auto" with settings.

    Raises SettingError for what contradicts itself, DistributedError where the others do not come.
    """
    settings = _checked(parallel)
    if parallel is None:
        return World()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _of_initialised(settings, device_type)
    place = read_environment()
    if place is None and not settings.alone:
        return World()
    if not torch.distributed.is_available():
        raise SettingError(
            f"{1 if place is None else place.size} processes, and this torch is built without torch.distributed",
            fix="install a torch that has it, or parallel=None",
        )
    return _started(place, settings, device_type)


def leave() -> None:
    """Take down the group that was made here, if it is still the one; wait for nobody who is dead."""
    dist: Any = torch.distributed
    if not _made or not dist.is_initialized() or dist.group.WORLD is not _made.pop()():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    try:
        leaving.start()
    except RuntimeError:  # too late for a thread: the end of the process closes the connections as well
        return
    wait_for(leaving, LEAVE)


@dataclass(frozen=True, slots=True)
class _Settings:
    timeout: float = TIMEOUT
    backend: str | None = None
    alone: bool = False
    """Whether one process needs a group too, as FSDP does."""


def _checked(parallel: Any) -> _Settings:
    if parallel is None or (isinstance(parallel, str) and parallel == "auto"):
        return _Settings()
    if isinstance(parallel, str | bool | int) or not hasattr(parallel, "timeout") or isinstance(parallel, type):
        near = {"ddp": "parallel=DDP()", "fsdp": "parallel=FSDP(blocks={Block})"}.get(str(parallel).lower(), "")
        name = getattr(parallel, "__name__", "")
        near = f"parallel={name}()" if isinstance(parallel, type) and name in ("DDP", "FSDP") else near
        want = '"auto", None, DDP(...) or FSDP(...)'
        raise SettingError(f"parallel={parallel!r} is no setting", want=want, fix=near)
    return _Settings(parallel.timeout, parallel.backend, getattr(parallel, "needs_group", False))


def _of_initialised(settings: _Settings, device_type: str) -> World:
    """Use the group that is there, ours of another trainer or somebody else's, as it is."""
    dist: Any = torch.distributed
    size = dist.get_world_size()
    stated = os.environ.get("WORLD_SIZE", str(size))
    if stated != str(size):
        raise SettingError(
            f"the initialised process group has {size} processes, and WORLD_SIZE is {stated}",
            want="one of the two: the group that torch.distributed has, or the environment's",
            fix="unset WORLD_SIZE, or let Trainer make the group, or parallel=None",
        )
    if size == 1:
        check_alone("the initialised process group has 1 process")
    if size == 1 and not settings.alone:
        return World()
    _check_serves(dist, settings, device_type)
    if not _known or _known[0][0]() is not dist.group.WORLD:
        _known[:] = [(weakref.ref(dist.group.WORLD), _wrapped(dist, settings, device_type))]
    group = _known[0][1]
    if group.timeout != settings.timeout:
        group = copy.copy(group)
        group.timeout = settings.timeout
    return group


def _check_serves(dist: Any, settings: _Settings, device_type: str) -> None:
    """Refuse a group that cannot carry tensors of the device, or is not of the backend that was asked for."""
    served = {str(device) for device in dist.get_backend_config().split(",")}
    devices = {pair.partition(":")[0] for pair in served} if ":" in next(iter(served)) else {device_type}
    if device_type not in devices:
        raise SettingError(
            f"the initialised process group carries no tensors of {device_type}",
            have=f"its backend is {dist.get_backend_config()}",
            fix=f'init_process_group("cpu:gloo,{device_type}:{_backend_of(dist, device_type)}"), or device="cpu"',
        )
    if settings.backend is not None and settings.backend.rpartition(":")[2] not in dist.get_backend_config():
        raise SettingError(
            f"backend={settings.backend!r}, and the initialised process group is of another one",
            have=dist.get_backend_config(),
            fix="leave backend out",
        )


def _wrapped(dist: Any, settings: _Settings, device_type: str) -> Group:
    """Give somebody else's group our methods; its local ranks are counted where nothing tells them."""
    group = Group(timeout=settings.timeout)
    stated = os.environ.get("LOCAL_RANK", "")
    hosts = [] if stated.isdigit() else group.gather(socket.gethostname())
    group.local_rank = int(stated) if stated.isdigit() else hosts[: group.rank].count(hosts[group.rank])
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        group.device_index = bound.index
    elif device_type != "cpu":
        group.device_index = _device_index(device_type, group.local_rank)
    return group


def _started(place: Place | None, settings: _Settings, device_type: str) -> Group:
    """Make the process group of the processes that were started together, or of this one alone."""
    dist: Any = torch.distributed
    limit = timedelta(seconds=settings.timeout)
    if place is None:
        place = Place(0, 1, 0, "", "")
        backend, index = _backend(dist, settings, device_type), None
        store: Any = dist.HashStore()
        local_rank = 0
    else:
        waiting = Waiting(place)
        with waiting.for_the_first():
            store = _met(dist, place, limit, waiting=waiting)
        backend, index, local_rank = _agreed(store, place, settings=settings, device_type=device_type, waiting=waiting)
    device = torch.device(device_type, index) if index is not None else None
    if device is not None:
        torch.get_device_module(device_type).set_device(device)  # it is this process's own from now on
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=limit, device_id=device
    )
    _made[:] = [weakref.ref(dist.group.WORLD)]
    atexit.unregister(leave)  # once, and before what was registered earlier
    atexit.register(leave)
    group = Group(local_rank=local_rank, device_index=index, timeout=settings.timeout)
    _known[:] = [(weakref.ref(dist.group.WORLD), group)]
    return group


def _met(dist: Any, place: Place, limit: timedelta, *, waiting: Waiting) -> Any:
    """Return the store where all processes meet; the first one, or torchrun itself, has it."""
    url = f"tcp://{place.address}?rank={place.rank}&world_size={place.size}"
    seconds = limit.total_seconds()
    try:
        if share_store():
            store, _, _ = next(dist.rendezvous(url, timeout=limit))
            return own_part(dist, store, rank=place.rank, size=place.size, seconds=seconds, look=waiting.look)
        host, _, port = place.address.rpartition(":")
        first = place.rank == 0
        # It waits for nobody: the first process hears of the others in `_agreed`, where it can say who is missing.
        store = dist.TCPStore(
            host.strip("[]"), int(port), is_master=first, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        raise DistributedError(
            f"rank {place.rank}: the {place.size} processes have not met at {place.address}",
            have=str(error).splitlines()[0],
            want=f"{place.size} processes, ranks 0 to {place.size - 1}, within {limit.total_seconds():g} s",
            fix="look at the other processes' output; all must reach that address, and no rank may come twice",
            where=False,
        ) from error
    return store


def _agreed(
    store: Any, place: Place, *, settings: _Settings, device_type: str, waiting: Waiting
) -> tuple[str, int | None, int]:
    """Let the first process hear of every one before any waits in the group: what is wrong on one is told to all.

    Returns the backend, the index of this process's own device and its local rank.
    """
    dist: Any = torch.distributed
    facts: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "local_rank": place.local_rank}
    backend = ""
    try:
        backend = _backend(dist, settings, device_type)
        if device_type != "cpu" and place.local_rank is not None:
            facts["device"] = _identity(device_type, _device_index(device_type, place.local_rank))
    except SettingError as error:
        facts["problem"] = str(error)
    store = dist.PrefixStore("trainwright/start", store)
    store.set(str(place.rank), json.dumps(facts))
    try:
        if place.rank == 0:
            _all_have_come(store, place, timeout=settings.timeout, waiting=waiting)
            store.set("verdict", json.dumps(_verdict([json.loads(store.get(str(r))) for r in range(place.size)])))
        verdict = json.loads(store.get("verdict"))
    except dist.DistError as error:
        raise _not_come(store, place, settings.timeout) from error
    if verdict["problem"]:
        raise SettingError(verdict["problem"])
    local_rank = place.local_rank if place.local_rank is not None else verdict["local_ranks"][place.rank]
    return backend, None if device_type == "cpu" else _device_index(device_type, local_rank), local_rank


def _all_have_come(store: Any, place: Place, *, timeout: float, waiting: Waiting) -> None:
    """Wait, in the first process, until every one has come; torch's DistStoreError where one does not in time."""
    end = time.monotonic() + timeout
    for rank in range(place.size):
        while not store.check([str(rank)]):
            if time.monotonic() > end:
                raise torch.distributed.DistStoreError(f"rank {rank} has not come within {timeout:g} s")
            if waiting.is_due:
                waiting.look(_missing(store, place.size))
            time.sleep(PAUSE)


def _missing(store: Any, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([str(rank)])]


def _not_come(store: Any, place: Place, timeout: float) -> DistributedError:
    dist: Any = torch.distributed
    with suppress(dist.DistError):  # where the store is gone as well, nobody knows
        missing = [str(rank) for rank in _missing(store, place.size)]
        return DistributedError(
            f"rank {place.rank}: not all of the {place.size} processes have come to their Trainer",
            have=f"missing: rank {', '.join(missing)}" if missing else "",
            want=f"all of them within {timeout:g} s",
            fix="every process must run the same script; for a slow start DDP(timeout=...)",
        )
    return DistributedError(f"rank {place.rank}: the process that has the store at {place.address} is gone", where=True)


def _verdict(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first process says to all: what is wrong, and the local ranks where the environment has none."""
    problem, seen, on_host = "", dict[str, int](), Counter[str]()
    local_ranks: list[int] = []
    for rank, fact in enumerate(facts):
        if not problem and fact.get("problem"):
            problem = f"rank {rank} on {fact['host']}: {fact['problem']}"
        device = fact.get("device")
        if not problem and device is not None and device in seen:
            problem = message(
                f"ranks {seen[device]} and {rank} on {fact['host']} would both use the device {device}",
                fix='as many processes as there are devices, or device="cpu"',
                where=False,
            )
        seen[str(device)] = rank
        local_ranks.append(on_host[fact["host"]])
        on_host[fact["host"]] += 1
    complete = all(fact["local_rank"] is not None for fact in facts)
    return {"problem": problem, "local_ranks": [] if complete else local_ranks}


def _backend(dist: Any, settings: _Settings, device_type: str) -> str:
    """Return the backend of a new group: as asked for, else the device's own, with gloo beside it for the host."""
    asked = settings.backend or _backend_of(dist, device_type)
    names = [pair.rpartition(":")[2] for pair in asked.split(",")]
    for name in names:
        if not dist.is_backend_available(name):
            have = [known for known in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(known)]
            raise SettingError(
                f"this torch has no backend {name!r} for several processes on {device_type}",
                have=f"torch {torch.__version__} has {', '.join(have) or 'none'}",
                fix='DDP(backend="gloo")' if "gloo" in have and name != "gloo" else "a torch that is built with it",
            )
    if ":" in asked or device_type == "cpu" or names[0] == "gloo":
        return asked
    return f"cpu:gloo,{device_type}:{asked}"


def _backend_of(dist: Any, device_type: str) -> str:
    name: str | None = dist.Backend.default_device_backend_map.get(device_type)
    if name is None:
        raise SettingError(f"torch knows no backend for several processes on {device_type}", fix='device="cpu"')
    return name


def _device_index(device_type: str, local_rank: int) -> int:
    """Return the device of this process: by its local rank; the only one, where each process is shown its own."""
    count = torch.get_device_module(device_type).device_count()
    if local_rank < count:
        return local_rank
    if count == 1:
        return 0
    raise SettingError(
        f"this is the process with local rank {local_rank}, and it sees {count} {device_type} devices",
        want="a device for each process of a machine",
        fix=f'--nproc-per-node {count}, or device="cpu"' if count else 'device="cpu"',
    )


def _identity(device_type: str, index: int) -> str:
    """What tells a device from all others of all machines, as far as torch knows."""
    properties = torch.get_device_module(device_type).get_device_properties(index)
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', f'{device_type}:{index}')}"
