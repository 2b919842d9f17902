"""Start of the ranks of a run: `as_world` finds them, checks that their settings agree, makes the process group."""

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
from datetime import timedelta
from typing import Any

import torch

from trainwright.core.errors import DistributedError, SettingError, message
from trainwright.distributed.environment import (
    PAUSE,
    Place,
    WaitReport,
    check_alone,
    own_part,
    read_environment,
    share_store,
    wait_for,
)
from trainwright.distributed.mesh import Parallel, checked_parallel, of_ranks
from trainwright.distributed.world import ProcessGroupWorld, World

LEAVE = 5.0
"""Seconds to wait for the destruction of a group at exit: a dead peer never answers."""


class _Leaver(threading.Thread):
    """Destroys a process group at exit: the destruction may never return, so that it needs a thread of its own.

    It is started with the group, because Python 3.12 starts no thread at exit. The references here are weak. A group
    that is not destroyed, or is still referenced after that, as by the reducer of DDP, keeps threads that outlive the
    interpreter and may abort the process (`terminate called without an active exception`).
    """

    def __init__(self, group: Any) -> None:
        super().__init__(name="trainwright-leave", daemon=True)
        self.group, self.due = weakref.ref(group), threading.Event()
        self.start()

    def run(self) -> None:
        """Wait for the exit; destroy the default group."""
        self.due.wait()
        torch.distributed.destroy_process_group()


_made: list[_Leaver] = []
"""The thread for the process group that was made here, if any."""
_known: list[tuple[weakref.ref[Any], ProcessGroupWorld]] = []
"""The last process group, and its `ProcessGroupWorld`: all trainers of a process share them."""


def as_world(parallel: Any, device_type: str = "cpu") -> World:
    """Return this rank of a run for the setting `parallel=`; all ranks call this, in the same order.

    None: one rank, whatever the environment. "auto": the initialized group of torch.distributed, unchanged; else a new
    group of the ranks that torchrun, MPI or Slurm's `srun` has started, destroyed at exit; else one rank. `DDP(...)`
    and `FSDP(...)` are "auto" with settings.

    Raises SettingError for settings that contradict each other, DistributedError if other ranks do not join in time.
    """
    settings = checked_parallel(parallel)
    if parallel is None:
        return World()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _for(settings, _of_initialized(settings, device_type))
    place = read_environment()
    if place is None and not settings.shards:
        return World()
    if not torch.distributed.is_available():
        raise SettingError(
            f"{1 if place is None else place.size} processes, and this torch is built without torch.distributed",
            fix="install a torch that has it, or parallel=None",
        )
    return _for(settings, _started(place, settings, device_type))


def _for(settings: Parallel, world: World) -> World:
    """Return the world that all trainers share, with the time-out and the mesh of one trainer."""
    if not isinstance(world, ProcessGroupWorld):
        return world
    mesh = of_ranks(world.rank, world.size, shards=settings.shards)
    if (world.timeout, world.mesh) != (settings.timeout, mesh):
        world = copy.copy(world)
        world.timeout, world.mesh = settings.timeout, mesh
    return world


def leave() -> None:
    """Destroy the process group if `as_world` made it and it is still the default one; wait at most LEAVE seconds."""
    dist: Any = torch.distributed
    if not _made or not dist.is_initialized() or dist.group.WORLD is not _made[0].group():
        return
    leaver = _made.pop()
    leaver.due.set()
    wait_for(leaver, LEAVE)


def _of_initialized(settings: Parallel, device_type: str) -> World:
    """Return the rank in the initialized group, which another trainer or the user has made."""
    dist: Any = torch.distributed
    size = dist.get_world_size()
    stated = os.environ.get("WORLD_SIZE", str(size))
    if stated != str(size):
        raise SettingError(
            f"the initialized process group has {size} processes, and WORLD_SIZE is {stated}",
            want="one of the two: the group that torch.distributed has, or the environment's",
            fix="unset WORLD_SIZE, or let Trainer make the group, or parallel=None",
        )
    if size == 1:
        check_alone("the initialized process group has 1 process")
    if size == 1 and not settings.shards:
        return World()
    _check_serves(dist, settings, device_type)
    if not _known or _known[0][0]() is not dist.group.WORLD:
        _known[:] = [(weakref.ref(dist.group.WORLD), _of_user_group(dist, settings, device_type))]
    return _known[0][1]


def _check_serves(dist: Any, settings: Parallel, device_type: str) -> None:
    """Refuse a group without a backend for the device, or with another backend than the setting."""
    served = {str(device) for device in dist.get_backend_config().split(",")}
    devices = {pair.partition(":")[0] for pair in served} if ":" in next(iter(served)) else {device_type}
    if device_type not in devices:
        raise SettingError(
            f"the initialized process group carries no tensors of {device_type}",
            have=f"its backend is {dist.get_backend_config()}",
            fix=f'init_process_group("cpu:gloo,{device_type}:{_backend_of(dist, device_type)}"), or device="cpu"',
        )
    if settings.backend is not None and settings.backend.rpartition(":")[2] not in dist.get_backend_config():
        raise SettingError(
            f"backend={settings.backend!r}, and the initialized process group is of another one",
            have=dist.get_backend_config(),
            fix="leave backend out",
        )


def _of_user_group(dist: Any, settings: Parallel, device_type: str) -> ProcessGroupWorld:
    """Return the rank in a group that the user made; local ranks are counted by host if LOCAL_RANK is not set."""
    group = ProcessGroupWorld(timeout=settings.timeout)
    stated = os.environ.get("LOCAL_RANK", "")
    hosts = [] if stated.isdigit() else group.all_gather(socket.gethostname())
    group.local_rank = int(stated) if stated.isdigit() else hosts[: group.rank].count(hosts[group.rank])
    bound = dist.group.WORLD.bound_device_id
    if bound is not None:
        group.device_index = bound.index
    elif device_type != "cpu":
        group.device_index = _device_index(device_type, group.local_rank)
    return group


def _started(place: Place | None, settings: Parallel, device_type: str) -> ProcessGroupWorld:
    """Make the process group of the ranks that were started together, or of this rank alone if `place` is None."""
    dist: Any = torch.distributed
    limit = timedelta(seconds=settings.timeout)
    if place is None:
        place = Place(0, 1, 0, "", "")
        backend, index = _backend(dist, settings, device_type), None
        store: Any = dist.HashStore()
        local_rank = 0
    else:
        waiting = WaitReport(place)
        with waiting.of_rank0():
            store = _store(dist, place, limit, waiting=waiting)
        backend, index, local_rank = _agreed(store, place, settings=settings, device_type=device_type, waiting=waiting)
    device = torch.device(device_type, index) if index is not None else None
    if device is not None:
        torch.get_device_module(device_type).set_device(device)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=limit, device_id=device
    )
    _made[:] = [_Leaver(dist.group.WORLD)]
    atexit.unregister(leave)  # registered once, and called before all earlier registrations
    atexit.register(leave)
    group = ProcessGroupWorld(local_rank=local_rank, device_index=index, timeout=settings.timeout)
    _known[:] = [(weakref.ref(dist.group.WORLD), group)]
    return group


def _store(dist: Any, place: Place, limit: timedelta, *, waiting: WaitReport) -> Any:
    """Return the store that all ranks share, hosted by rank 0 or by torchrun."""
    url = f"tcp://{place.address}?rank={place.rank}&world_size={place.size}"
    seconds = limit.total_seconds()
    try:
        if share_store():
            store, _, _ = next(dist.rendezvous(url, timeout=limit))
            return own_part(dist, store, rank=place.rank, size=place.size, seconds=seconds, look=waiting.look)
        host, _, port = place.address.rpartition(":")
        # No wait for workers: rank 0 waits in `_agreed`, where it can name missing ranks.
        store = dist.TCPStore(
            host.strip("[]"),
            int(port),
            is_master=place.rank == 0,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        raise DistributedError(
            f"rank {place.rank}: not all of the {place.size} processes have connected to {place.address}",
            have=str(error).splitlines()[0],
            want=f"{place.size} processes, ranks 0 to {place.size - 1}, within {limit.total_seconds():g} s",
            fix="look at the other processes' output; all must reach that address, and no rank may come twice",
            where=False,
        ) from error
    return store


def _agreed(
    store: Any, place: Place, *, settings: Parallel, device_type: str, waiting: WaitReport
) -> tuple[str, int | None, int]:
    """Return the backend, the index of this rank's device and its local rank, after rank 0 has checked all ranks.

    Runs before the first collective, so that a problem of one rank raises SettingError on all.
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
            _wait_for_all(store, place, timeout=settings.timeout, waiting=waiting)
            store.set("verdict", json.dumps(_verdict([json.loads(store.get(str(r))) for r in range(place.size)])))
        verdict = json.loads(store.get("verdict"))
    except dist.DistError as error:
        raise _not_come(store, place, settings.timeout) from error
    if verdict["problem"]:
        raise SettingError(verdict["problem"])
    local_rank = place.local_rank if place.local_rank is not None else verdict["local_ranks"][place.rank]
    return backend, None if device_type == "cpu" else _device_index(device_type, local_rank), local_rank


def _wait_for_all(store: Any, place: Place, *, timeout: float, waiting: WaitReport) -> None:
    """Wait on rank 0 until every rank has joined; torch's DistStoreError after `timeout` seconds."""
    end = time.monotonic() + timeout
    for rank in range(place.size):
        while not store.check([str(rank)]):
            if time.monotonic() > end:
                raise torch.distributed.DistStoreError(f"rank {rank} has not joined within {timeout:g} s")
            if waiting.is_due:
                waiting.look(_missing(store, place.size))
            time.sleep(PAUSE)


def _missing(store: Any, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([str(rank)])]


def _not_come(store: Any, place: Place, timeout: float) -> DistributedError:
    dist: Any = torch.distributed
    with suppress(dist.DistError):  # the store may be gone as well
        missing = [str(rank) for rank in _missing(store, place.size)]
        return DistributedError(
            f"rank {place.rank}: not all of the {place.size} processes have joined",
            have=f"missing: rank {', '.join(missing)}" if missing else "",
            want=f"all of them within {timeout:g} s",
            fix="every process must run the same script; for a slow start DDP(timeout=...)",
        )
    return DistributedError(f"rank {place.rank}: the process that has the store at {place.address} is gone", where=True)


def _verdict(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first problem of any rank, and local ranks counted by host if the environment has none."""
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


def _backend(dist: Any, settings: Parallel, device_type: str) -> str:
    """Return the backend of a new group: that of the setting or of the device, plus gloo for host tensors."""
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
    """Return the index of this rank's device: its local rank, or 0 if the process sees one device only."""
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
    """Return a text that identifies a device among all machines: the host, and the UUID or else the index."""
    properties = torch.get_device_module(device_type).get_device_properties(index)
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', f'{device_type}:{index}')}"
