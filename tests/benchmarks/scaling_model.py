"""What happens at 8, 64, 1,024 and 16,384 GPUs: the tables of docs/development/scaling.md, from stated formulas.

    python tests/benchmarks/scaling_model.py            # the tables
    python tests/benchmarks/scaling_model.py --check    # the formulas against 2 processes on this machine

No figure of the tables is measured on such machines. Every number that is put in stands in `ASSUMED`; the formulas are
the functions below, each with its source:

[T] R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19, 2005
[P] P. Patarasuk, X. Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 69, 2009
[L] S. Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 13, 2020
[R] S. Rajbhandari et al.: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020
[Y] J. W. Young: A First Order Approximation to the Optimum Checkpoint Interval, CACM 17, 1974
[D] J. T. Daly: A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps, FGCS 22, 2006
[G] A. Grattafiori et al.: The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

GPUS = (8, 64, 1024, 16384)
GB, MB, KB = 1e9, 1e6, 1e3
HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True)
class Link:
    """The alpha-beta model of [T]: a message of m bytes takes `alpha + m / bandwidth` seconds."""

    alpha: float
    bandwidth: float


@dataclass(frozen=True)
class Assumed:
    """Everything that is put in. Bandwidths are per GPU and direction, at 80 % of what the data sheets say."""

    node: int = 8
    nvlink: Link = Link(3e-6, 0.8 * 450 * GB)
    """NVLink 4, 900 GB/s in both directions together."""
    network: Link = Link(10e-6, 0.8 * 50 * GB)
    """400 Gbit/s for each GPU."""
    host: Link = Link(30e-6, 1 * GB)
    """What a process gets of the host's own network over TCP, for gloo and the store."""
    bucket: float = 25 * MB
    """DDP's `bucket_cap_mb`."""
    flops: float = 0.4 * 989e12
    """What a GPU does: 40 % of an H100's dense bf16."""
    tokens: int = 16384
    """Tokens of one GPU in one update."""
    mtbf: float = 16384 * 54 * DAY / 419
    """Seconds between failures of one GPU and its share of the machine: 419 in 54 days on 16,384 [G]."""
    drive: float = 2 * GB
    """What one process writes to the shared file system in a second."""
    store: float = 100 * GB
    """What the shared file system takes and gives in a second, all together."""
    reader: float = 5 * GB
    """What one machine reads from it in a second; its processes share the pages."""
    to_host: float = 10 * GB
    """What one GPU copies to the host in a second: how long a save in the background stops training."""
    start: float = 120.0
    """Seconds to place the job anew, import, and make the process groups."""
    rows: float = 1e9
    """Rows of the data set."""
    requests: float = 20e3
    """Requests that a TCP store answers in a second."""
    unpickle: float = 10e-6
    """Seconds to unpickle one small object."""


@dataclass(frozen=True)
class Model:
    """A model: parameters in fp32 under bf16 autocast, AdamW; `blocks` are sharded one by one."""

    name: str
    parameters: float
    blocks: int

    @property
    def state(self) -> float:
        """Bytes of a checkpoint: weights and the two moments of AdamW, fp32."""
        return 12 * self.parameters


ASSUMED = Assumed()
SMALL, LARGE = Model("124 M", 124e6, 12), Model("8 B", 8e9, 32)
OWN_STATE = 12.0 * KB
"""What each process adds to a checkpoint: its random states; more with BatchNorm and loader workers."""
WORD, AGREED, ROW = 300.0, 100.0, 1.0 * KB
"""Bytes of one beat, of what one process says at an agree point, and of its numbers of one row of the history."""


# Collectives.


def ring(n: int, size: float, link: Link) -> float:
    """All-reduce in a ring: 2 (n - 1) steps, 2 (n - 1) / n of the bytes [T, 4.4]; no algorithm sends fewer [P]."""
    return 2 * (n - 1) * link.alpha + 2 * (n - 1) / n * size / link.bandwidth


def tree(n: int, size: float, link: Link) -> float:
    """All-reduce by recursive halving and doubling: 2 log2(n) steps, as many bytes as the ring [T, 4.4]."""
    return 2 * math.ceil(math.log2(n)) * link.alpha + 2 * (n - 1) / n * size / link.bandwidth


def by_levels(n: int, size: float, between: Callable[[int, float, Link], float]) -> float:
    """All-reduce within each node and, each GPU with its part of the bytes, between the nodes."""
    inside = ASSUMED.node
    within = ring(inside, size, ASSUMED.nvlink)
    nodes = n // inside
    return within if nodes == 1 else within + between(nodes, size / inside, ASSUMED.network)


def gathered(n: int, size: float, link: Link) -> float:
    """All-gather of `size` bytes from each in a ring: n - 1 steps, and every one receives all [T, 4.1]."""
    return (n - 1) * (link.alpha + size / link.bandwidth)


# Updates.


def compute(model: Model) -> float:
    """Seconds of forward and backward: 6 FLOP per parameter and token."""
    return 6 * model.parameters * ASSUMED.tokens / ASSUMED.flops


def ddp(n: int, model: Model, between: Callable[[int, float, Link], float]) -> tuple[float, float]:
    """Seconds of all all-reduces of an update, and those that backward does not hide.

    Backward is two thirds of the time; all but the last bucket travel during it [L, 3.2.3].
    """
    size = 4 * model.parameters
    buckets = math.ceil(size / ASSUMED.bucket)
    each = by_levels(n, size / buckets, between)
    return buckets * each, exposed(buckets * each, each, compute(model) * 2 / 3)


def exposed(communication: float, last: float, backward: float) -> float:
    """What of the communication is not hidden behind backward: at least the last bucket."""
    return max(communication - backward, last)


def fsdp(n: int, model: Model, group: int) -> tuple[float, float]:
    """Seconds of the collectives of an update sharded over groups of `group`, and those that are not hidden.

    Two all-gathers of bf16 weights and one reduce-scatter of fp32 gradients for each block: (2 + 2 + 4) bytes per
    parameter [R, 7.2], in rings; with several groups an all-reduce of each one's part of the gradients between them.
    """
    link = ASSUMED.nvlink if group <= ASSUMED.node else ASSUMED.network
    part = (group - 1) / group * model.parameters / link.bandwidth
    within = 3 * model.blocks * (group - 1) * link.alpha + 8 * part
    others = n // group
    between = tree(others, 4 * model.parameters / group, ASSUMED.network) if others > 1 else 0.0
    total = within + between
    return total, max(total - compute(model), within / model.blocks / 3)


# Failures and checkpoints.


def failures_per_day(n: int) -> float:
    """A failure of any GPU ends the job."""
    return n * DAY / ASSUMED.mtbf


def written(n: int, model: Model, *, sharded: bool) -> float:
    """Seconds to write a checkpoint: by the first process alone, or by all of them."""
    return max(model.state / (n if sharded else 1) / ASSUMED.drive, model.state / ASSUMED.store)


def read(n: int, model: Model, *, sharded: bool) -> float:
    """Seconds to load it: every process its part; without sharding every machine reads the whole file once."""
    nodes = n / ASSUMED.node
    each = model.state / nodes if sharded else model.state
    return max(each / ASSUMED.reader, each * nodes / ASSUMED.store)


def blocked(n: int, model: Model, *, sharded: bool) -> float:
    """Seconds for which a save in the background stops training: one copy to the host."""
    return model.state / (n if sharded else 1) / ASSUMED.to_host


def interval(n: int, model: Model, *, sharded: bool) -> float:
    """Seconds between saves that cost least: sqrt(2 x blocked x time between failures) [Y]; no save overtakes one."""
    best = math.sqrt(2 * blocked(n, model, sharded=sharded) * ASSUMED.mtbf / n)
    return max(best, written(n, model, sharded=sharded))


def restart(n: int, model: Model, *, sharded: bool) -> float:
    """Seconds from a failure until training goes on: it is noticed, the job starts anew, everything is loaded."""
    return noticed(n) + ASSUMED.start + read(n, model, sharded=sharded)


def lost(n: int, model: Model, *, sharded: bool) -> float:
    """The share of the time that saves, restarts and work done twice take, to first order [D, 2]."""
    every, between = interval(n, model, sharded=sharded), ASSUMED.mtbf / n
    twice = every / 2 + written(n, model, sharded=sharded)  # a save that is not whole yet does not count
    return blocked(n, model, sharded=sharded) / every + (twice + restart(n, model, sharded=sharded)) / between


# What this library adds.


def pause(n: int) -> float:
    """Seconds between two words of a process under watch (distributed/peer_watch.py)."""
    return max(0.5, n / 500)


def noticed(n: int) -> float:
    """Seconds until the others know of a process that has failed with an error."""
    return 2 * pause(n)


def objects(n: int, size: float, link: Link) -> float:
    """`World.all_gather`, torch's `all_gather_object`: the sizes, then the values; each rank unpickles all."""
    return gathered(n, 8, link) + gathered(n, size, link) + n * ASSUMED.unpickle


def agreed(n: int) -> float:
    """Seconds of one agree point, once a second, at which all processes wait."""
    return objects(n, AGREED, ASSUMED.host)


def counted(n: int) -> float:
    """Seconds in which the processes tell the rows of a window, where the data are streams: n + 1 numbers over gloo."""
    return ring(n, 8 * (n + 1), ASSUMED.host)


def beats(n: int) -> float:
    """The share of the store's time that the watch takes: four requests of each process a round."""
    return 4 * n / pause(n) / ASSUMED.requests


def searched(n: int) -> float:
    """Seconds of the store when every process looks for the one that failed: two words of each, for each."""
    return 2 * n * n * WORD / ASSUMED.host.bandwidth


# Tables.


def seconds(value: float) -> str:
    """A time in two digits."""
    for unit, size in (("d", DAY), ("h", HOUR), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size * (2 if unit in ("d", "h", "min") else 1):
            return f"{_digits(value / size)} {unit}"
    return "0"


def size(value: float) -> str:
    """Bytes in two digits."""
    for unit, one in (("TB", 1e12), ("GB", GB), ("MB", MB), ("KB", KB)):
        if value >= 0.9995 * one:
            return f"{_digits(value / one)} {unit}"
    return f"{value:.0f} B"


def share(value: float) -> str:
    """A share of the time in percent; from 1 on there is no time left."""
    return "all" if value >= 1 else f"{_digits(100 * value)} %"


def _digits(value: float) -> str:
    if value >= 99.5:
        return f"{value:,.0f}"
    places = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{places}f}"


def table(title: str, lines: Iterable[tuple[str, Callable[[int], str]]]) -> str:
    """A table of Markdown with a column for each number of GPUs."""
    head = f"| {title} | " + " | ".join(f"{n:,}" for n in GPUS) + " |"
    rule = "|---|" + "--:|" * len(GPUS)
    body = (f"| {name} | " + " | ".join(cell(n) for n in GPUS) + " |" for name, cell in lines)
    return "\n".join((head, rule, *body))


def updates() -> str:
    """What an update of each model exchanges."""
    small, large = compute(SMALL), compute(LARGE)
    return table(
        "GPUs: an update",
        [
            (f"{SMALL.name}, DDP: bytes that each GPU sends", lambda n: size(8 * (n - 1) / n * SMALL.parameters)),
            ("all-reduces, ring between nodes", lambda n: seconds(ddp(n, SMALL, ring)[0])),
            ("all-reduces, tree between nodes", lambda n: seconds(ddp(n, SMALL, tree)[0])),
            (f"not hidden, ring, beside {seconds(small)} of computing", lambda n: seconds(ddp(n, SMALL, ring)[1])),
            ("not hidden, tree", lambda n: seconds(ddp(n, SMALL, tree)[1])),
            (f"{LARGE.name}, FSDP over all: collectives", lambda n: seconds(fsdp(n, LARGE, n)[0])),
            (f"not hidden, beside {seconds(large)} of computing", lambda n: seconds(fsdp(n, LARGE, n)[1])),
            ("FSDP in groups of 64: collectives", lambda n: seconds(fsdp(n, LARGE, min(n, 64))[0])),
            ("not hidden", lambda n: seconds(fsdp(n, LARGE, min(n, 64))[1])),
        ],
    )


def checkpoints() -> str:
    """What failures and checkpoints cost."""
    lines: list[tuple[str, Callable[[int], str]]] = [("failures a day", lambda n: _digits(failures_per_day(n)))]
    for model, sharded in ((SMALL, False), (LARGE, False), (LARGE, True)):
        how = "sharded" if sharded else "the first process writes"

        def cell(cost: Callable[..., float], model: Model = model, sharded: bool = sharded) -> Callable[[int], str]:
            return lambda n: (share if cost is lost else seconds)(cost(n, model, sharded=sharded))

        lines += [
            (f"{model.name}, {size(model.state)}, {how}: writing", cell(written)),
            ("training waits for a save", cell(blocked)),
            ("best interval of saves", cell(interval)),
            ("a restart", cell(restart)),
            ("lost to saves and failures", cell(lost)),
        ]
    return table("GPUs: failures", lines)


def own_costs() -> str:
    """What this library adds."""
    return table(
        "GPUs: our own",
        [
            ("agree point, once a second", lambda n: seconds(agreed(n))),
            ("a count that only the devices know, each update", lambda n: seconds(by_levels(n, 8, tree))),
            ("rows of a window of streams, each update", lambda n: seconds(counted(n))),
            ("connections of gloo, of one process", lambda n: f"{n - 1:,}"),
            ("watch: seconds between words", lambda n: seconds(pause(n))),
            ("watch: share of the store's time", lambda n: share(beats(n))),
            ("looking for who failed, through one store", lambda n: seconds(searched(n))),
            ("numbers of one row, on each process", lambda n: size(n * ROW)),
            ("numbers of one row, over the network", lambda n: size(n * (n - 1) * ROW)),
            ("random states of a save, on each process", lambda n: size(n * OWN_STATE)),
            ("random states of a save, over the network", lambda n: size(n * (n - 1) * OWN_STATE)),
            ("gathering them", lambda n: seconds(objects(n, OWN_STATE, ASSUMED.host))),
            ("order of 10^9 rows, on each process", lambda n: size(8 * ASSUMED.rows)),
            ("order of 10^9 rows, in all", lambda n: size(8 * ASSUMED.rows * n)),
        ],
    )


TABLES = (updates, checkpoints, own_costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the formulas with 2 processes on this machine")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if args.check:
        from scaling_measured import check

        check(args.rounds)
    else:
        print("\n\n".join(make() for make in TABLES))


if __name__ == "__main__":
    main()
