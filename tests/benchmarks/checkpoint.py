"""What a checkpoint costs: saving, loading and saving in the background, against raw writes and reads and the peers.

    python tests/benchmarks/checkpoint.py [--mb 500] [--rounds 9] [--dir .]

The state is a model's weights and Adam's two moments in 42 tensors of mixed sizes, with a counter for each weight. All
contestants run in one process, in alternating order, on the same directory; before each one the drive is given time to
finish (`sync`). Each ratio is taken within a round; medians over the rounds. Raw: the same bytes with `os.write` and
`os.fsync` into as many files, and `readinto` of those files into fresh memory (they are in the page cache, as are all
files that are read here). Extra memory is what the process held at its peak over what it held before (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainwright import Checkpoint
from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.format import encode, load_tree
from trainwright.checkpointing.tensorfile import Contents

MANIFEST = {"run": "benchmark", "update": 1, "epoch": 0, "metrics": {}}
SHARES = (300, 200, 100, 100, 80, 60, 60, 40, 30, 20, 6, 3, 1, 0.01)
"""How large the tensors of the model are, relative to each other."""
Case = Callable[[Path], object]


def state(megabytes: int) -> dict[str, Any]:
    """Weights and two moments of that size together."""
    sizes = [max(1, int(share / sum(SHARES) * megabytes * 2**20 / 12 / 8)) for share in SHARES]
    weights = {f"layers.{i}.weight": torch.randn(size, 8) for i, size in enumerate(sizes)}
    moments = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.randn_like(weight)}
        for i, weight in enumerate(weights.values())
    }
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}}


def flat(tree: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state under one name each."""
    moments = tree["optimizer"]["state"]
    return tree["model"] | {f"{i}.{name}": value for i, held in moments.items() for name, value in held.items()}


# Saving


def save_raw(tree: dict[str, Any]) -> Case:
    """The bytes of the same files, with nothing around them."""
    groups = [
        [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in content.tensors.values()]
        for content in encode(tree).values()
        if isinstance(content, Contents)
    ]

    def save(folder: Path) -> None:
        for number, group in enumerate(groups):
            fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            for data in group:
                at = 0
                while at < len(data):
                    at += os.write(fd, data[at:])
            os.fsync(fd)
            os.close(fd)

    return save


def save_ours(tree: dict[str, Any], checksum: Any = "crc32") -> Case:
    return lambda folder: commits.commit(folder, encode(tree), manifest=MANIFEST, checksum=checksum)


def save_torch(tree: dict[str, Any], *, synced: bool) -> Case:
    def save(folder: Path) -> None:
        with open(folder / "state.pt", "wb") as file:
            torch.save(tree, file)
            if synced:
                file.flush()
                os.fsync(file.fileno())

    return save


def save_safetensors(tree: dict[str, Any], *, synced: bool) -> Case:
    def save(folder: Path) -> None:
        safetensors.torch.save_file(flat(tree), folder / "state.safetensors")
        if synced:
            fd = os.open(folder / "state.safetensors", os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    return save


def save_dcp(tree: dict[str, Any]) -> Case:
    return lambda folder: dcp.save(flat(tree), checkpoint_id=folder / "dcp", no_dist=True)


# Loading


def load_raw(folder: Path) -> list[Tensor]:
    held = []
    for path in sorted((folder / formats.update_name(1)).iterdir()):
        held.append(torch.empty(path.stat().st_size, dtype=torch.uint8))
        with open(path, "rb", buffering=0) as file:
            data, at = held[-1].numpy().data, 0
            while at < len(data):
                at += file.readinto(data[at:])
    return held


def load_ours(folder: Path) -> object:
    return load_tree(folder / formats.update_name(1))


def load_torch(folder: Path) -> object:
    return torch.load(folder / "state.pt", weights_only=True)


def load_safetensors(folder: Path) -> object:
    """Into memory of our own: what `load_file` gives is mapped, and read when it is used."""
    mapped = safetensors.torch.load_file(folder / "state.safetensors")
    return {name: tensor.clone() for name, tensor in mapped.items()}


def load_dcp(into: dict[str, Tensor]) -> Case:
    return lambda folder: dcp.load(into, checkpoint_id=folder / "dcp", no_dist=True)


# Measuring


@dataclass
class Measured:
    """Seconds and MB of extra memory, round by round."""

    seconds: list[float] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)


def measure(cases: dict[str, Case], *, rounds: int, folder: Callable[[], Path]) -> dict[str, Measured]:
    """Each case once a round, the first round left out; `folder` gives the directory of a case and prepares it."""
    found = {name: Measured() for name in cases}
    for number in range(rounds + 1):
        for name in list(cases) if number % 2 else list(cases)[::-1]:
            place = folder()
            os.sync()
            before = reset_peak()
            begun = time.perf_counter()
            kept = cases[name](place)
            seconds = time.perf_counter() - begun
            if number:
                found[name].seconds.append(seconds)
                found[name].extra.append(peak() - before)
            del kept
    return found


def reset_peak() -> float:
    """Give back what is free, and forget the peak of resident memory; MB resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak() -> float:
    """MB resident at the peak."""
    return resident("VmHWM")


def resident(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) / 1024


def table(title: str, found: dict[str, Measured], *, base: str) -> None:
    print(f"\n| {title} | seconds | / {base} | quartiles | extra memory, MB |\n|---|--:|--:|--:|--:|")
    for name, measured in found.items():
        ratios = [a / b for a, b in zip(measured.seconds, found[base].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds, extra = statistics.median(measured.seconds), statistics.median(measured.extra)
        print(f"| {name} | {seconds:.3f} | {middle:.2f} | {low:.2f} to {high:.2f} | {extra:.0f} |", flush=True)


def saving(tree: dict[str, Any], root: Path, rounds: int) -> None:
    cases = {
        "raw write + fsync": save_raw(tree),
        "trainwright": save_ours(tree),
        "trainwright, sha256": save_ours(tree, "sha256"),
        "torch.save + fsync": save_torch(tree, synced=True),
        "torch.save, no fsync": save_torch(tree, synced=False),
        "safetensors + fsync": save_safetensors(tree, synced=True),
        "safetensors, no fsync": save_safetensors(tree, synced=False),
        "DCP (it syncs its files)": save_dcp(tree),
    }

    def anew() -> Path:
        shutil.rmtree(root / "save", ignore_errors=True)
        (root / "save").mkdir()
        return root / "save"

    table("save", measure(cases, rounds=rounds, folder=anew), base="raw write + fsync")
    shutil.rmtree(root / "save")


def loading(tree: dict[str, Any], root: Path, rounds: int) -> None:
    folder = root / "load"
    folder.mkdir()
    for save in (save_ours(tree), save_torch(tree, synced=True), save_safetensors(tree, synced=True), save_dcp(tree)):
        save(folder)
    into = {name: torch.zeros_like(tensor) for name, tensor in flat(tree).items()}
    cases: dict[str, Case] = {
        "raw read": load_raw,
        "trainwright": load_ours,
        "torch.load": load_torch,
        "safetensors": load_safetensors,
        "DCP, into tensors that are there": load_dcp(into),
    }
    table("load", measure(cases, rounds=rounds, folder=lambda: folder), base="raw read")
    shutil.rmtree(folder)


# Saving in the background


def background(tree: dict[str, Any], root: Path, rounds: int) -> None:
    """How long a background save keeps training waiting: the first of a run, and those after it."""
    tensors = list(flat(tree).values())
    places = [tensor.clone() for tensor in tensors]
    found: dict[str, list[float]] = {"copy": [], "first": [], "later": [], "whole": [], "extra": []}
    for number in range(rounds + 1):
        shutil.rmtree(root / "background", ignore_errors=True)
        manager = Checkpoint(root / "background", keep=1).bind("benchmark")
        manager.prepare(resuming=False)
        before = reset_peak()
        manager.reserve(tree)
        time.sleep(1.0)  # what `fit` does before its first save takes longer
        seconds = dict.fromkeys(found, 0.0)
        for update, name in ((1, "first"), (2, "later")):
            os.sync()
            begun = time.perf_counter()
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
            seconds["copy"] += (time.perf_counter() - begun) / 2
            blocked = manager.blocked
            manager.save(tree, update=update, epoch=0)
            seconds[name] = manager.blocked - blocked
            seconds["whole"] += manager.completed(wait=True)[0].seconds / 2
        seconds["extra"] = peak() - before
        manager.release()
        for name in found if number else ():
            found[name].append(seconds[name])
    copy = statistics.median(found["copy"])
    print(
        f"\n| background | seconds | / one copy ({copy:.3f} s) | quartiles | / its whole save |\n|---|--:|--:|--:|--:|"
    )
    for name, title in (("first", "blocked, first save"), ("later", "blocked, later save")):
        low, middle, high = statistics.quantiles([a / b for a, b in zip(found[name], found["copy"], strict=True)], n=4)
        share = statistics.median(a / b for a, b in zip(found[name], found["whole"], strict=True))
        print(
            f"| {title} | {statistics.median(found[name]):.3f} | {middle:.2f} | {low:.2f} to {high:.2f} | {share:.2f} |"
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20
    extra = statistics.median(found["extra"])
    print(f"\nExtra memory of two saves in the background: {extra:.0f} MB, {extra / size:.2f} x state.")
    shutil.rmtree(root / "background")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--only", choices=["save", "load", "background"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    tree = state(args.mb)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {args.mb} MB in {len(flat(tree))} tensors"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {machine}, {args.rounds} rounds")
    for name, section in (("save", saving), ("load", loading), ("background", background)):
        if args.only in (None, name):
            with tempfile.TemporaryDirectory(dir=args.dir) as root:
                section(tree, Path(root), args.rounds)


if __name__ == "__main__":
    main()
