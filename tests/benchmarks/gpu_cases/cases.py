"""The cases B1 to B9: who takes part, and what is to be reached. B0, the ceilings, stands by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gpu_cases import ours, peers, special, tasks
from gpu_cases.entry import Case, Found, Runs, Target, Task, ratio, ratios
from gpu_cases.loops import COMPILED, GRAPH, PLAIN, TUNED

LARGE, LAUNCHES, GRAPHS, PEER, LIGHTNING = 1.01, 1.05, 3.0, 3.0, 8.0
"""Beside loops by hand, where kernels fill the device and where the host is slower; by what graphs would pay; peers."""
MFU, FOLDED, UNPADDED = 0.45, 0.8, 1.5
BUCKETS = 4


def large(_: Task) -> list[Target]:
    return [ratio("trainwright", "tuned", at_most=LARGE)]


def launch_bound(_: Task) -> list[Target]:
    # The package replays no CUDA graphs at present. Where the hand-written one is this much faster, they may return.
    return [ratio("trainwright", "tuned", at_most=LAUNCHES), ratio("tuned", "graph", at_least=GRAPHS)]


def language(task: Task) -> list[Target]:
    share = Target("MFU of trainwright-compile", _share_of_peak(task, "trainwright-compile"), at_least=MFU)
    return [*large(task), ratio("trainwright-compile", "compile", at_most=LARGE), share]


def varied_lengths(_: Task) -> list[Target]:
    return [
        ratio("tuned-padded", "trainwright", at_least=UNPADDED),
        ratio("trainwright", "tuned", at_most=LARGE),
        ratio("trainwright-packed", "tuned-packed", at_most=LARGE),
        ratio("tuned-padded", "trainwright-packed", at_least=UNPADDED),
        Target("memory asked of the device in timed epochs, trainwright", _allocations("trainwright"), at_most=0),
        Target("graphs compiled by trainwright-compile", _graphs("trainwright-compile"), at_most=BUCKETS),
    ]


def from_host(_: Task) -> list[Target]:
    return [ratio(name, "resident", at_most=LARGE) for name in ("trainwright", "trainwright-resident")]


def folded(_: Task) -> list[Target]:
    return [
        Target(f"update of {name} / of tuned", _update_alone(name), at_most=FOLDED)
        for name in ("trainwright", "folded")
    ]


def beside_peers(least: float | None = None, *, lightning: float | None = None) -> Callable[[Task], list[Target]]:
    """Never slower than the fastest peer, `least` times faster, and `lightning` times faster than its defaults."""

    def targets(_: Task) -> list[Target]:
        found = [Target("trainwright / fastest peer", partial(_fastest, over=True), at_most=1.0)]
        if least is not None:
            found.append(
                Target("fastest peer / trainwright", lambda found: _fastest(found, over=False), at_least=least)
            )
        if lightning is not None:
            found.append(ratio("lightning", "trainwright", at_least=lightning))
        return found

    return targets


def _share_of_peak(task: Task, name: str) -> Callable[[Found], list[float] | None]:
    """Operations per second over what the maker tells of the device; None where it is not known by its name."""

    def values(found: Found) -> list[float] | None:
        from trainwright.modules.flops import peak_of

        peak = peak_of(torch.cuda.get_device_name(task.device)) if task.bench.on_cuda else None
        runs = found.get(name, Runs())
        return None if peak is None else [task.flops / seconds / peak for seconds in runs.seconds] or None

    return values


def _allocations(name: str) -> Callable[[Found], list[float] | None]:
    return lambda found: [float(one) for one in found.get(name, Runs()).allocations] or None


def _graphs(name: str) -> Callable[[Found], list[float] | None]:
    return lambda found: None if not (runs := found.get(name, Runs())).seconds else [float(runs.graphs)]


def _update_alone(name: str) -> Callable[[Found], list[float] | None]:
    """The time of an update over that of the tuned loop's, forward and backward being taken from both."""

    def values(found: Found) -> list[float] | None:
        own, tuned, without = (found.get(one, Runs()).seconds for one in (name, "tuned", "gradients"))
        if not own or not len(own) == len(tuned) == len(without):
            return None
        return [(a - c) / (b - c) for a, b, c in zip(own, tuned, without, strict=True)]

    return values


def _fastest(found: Found, *, over: bool) -> list[float] | None:
    """Ratios beside the peer with the least median; None where no peer has times."""
    there = [one for name, one in found.items() if name in peers.NAMES and one.seconds]
    if not there:
        return None
    fastest = min(there, key=lambda runs: torch.tensor(runs.seconds).median().item())
    own = found.get("trainwright")
    return ratios(own, fastest) if over else ratios(fastest, own)


LAUNCH_BOUND = (TUNED, PLAIN, GRAPH, ours.OURS)
BESIDE_PEERS = (TUNED, PLAIN, ours.OURS, *peers.PEERS)
LENGTHS = (
    replace(TUNED, note="each batch padded to its bucket"),
    replace(TUNED, name="tuned-padded", variant="padded", note="padded to the longest of all", equals="tuned"),
    replace(TUNED, name="tuned-packed", variant="packed", note="rows packed", equals="tuned"),
    ours.OURS,
    replace(ours.OURS, name="trainwright-packed", variant="packed", note="rows packed"),
    ours.REGIONAL,
)
CASES = [
    Case("B1", tasks.perceptron, LAUNCH_BOUND, launch_bound),
    Case("B2", tasks.small_images, (TUNED, PLAIN, GRAPH, ours.OURS), large),
    Case("B3", tasks.large_images, (TUNED, ours.OURS), large),
    Case("B4", tasks.language, (TUNED, COMPILED, ours.OURS, ours.COMPILED), language),
    Case("B5", tasks.small_language, LAUNCH_BOUND, launch_bound),
    Case("B6", tasks.varied_lengths, LENGTHS, varied_lengths, counts_syncs=True),
    Case(
        "B7",
        tasks.from_host,
        (special.RESIDENT, special.RING, special.FROM_HOST, special.ON_DEVICE),
        from_host,
    ),
    Case(
        "B8",
        tasks.update_alone,
        (TUNED, special.GRADIENTS, special.FOLDED, ours.OURS),
        folded,
    ),
    Case("B8", tasks.with_fp16, (TUNED, ours.OURS), large),
    Case("B9", tasks.perceptron, BESIDE_PEERS, beside_peers(PEER, lightning=LIGHTNING), counts_syncs=True),
    Case("B9", tasks.small_language, BESIDE_PEERS, beside_peers(PEER), counts_syncs=True),
    Case("B9", partial(tasks.language, rows=16), BESIDE_PEERS, beside_peers(), counts_syncs=True),
]
NAMES = ("B0", *dict.fromkeys(case.name for case in CASES))
