"""The tasks of B1 to B8: a model, an epoch's batches on the device, an optimizer, a precision. Data are synthetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gpu_cases.entry import Batch, Bench, Task
from gpu_cases.models import GPT, IGNORED, GivenGradients, gpt2, mlp, resnet

FLOAT, HALF, OTHER_SHAPES = 1e-2, 0.1, 0.3
"""How far weights may be on CUDA, where sums of one run differ in their order from those of the next: in float32, in
bf16 or fp16, and where the same rows are computed in other shapes. AdamW makes a difference of roundings in a small
gradient one of a whole step."""
ON_CPU = 1e-3
"""How far on a CPU, where the same kernels give the same sums."""


def adamw(parameters: Iterable[nn.Parameter], *, fused: bool, capturable: bool = False) -> Optimizer:
    return AdamW(parameters, lr=3e-4, fused=fused or None, capturable=capturable)


def sgd(parameters: Iterable[nn.Parameter], *, fused: bool, capturable: bool = False) -> Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, fused=fused or None)


def perceptron(bench: Bench) -> Task:
    inputs = torch.randn(16, 128, 784, generator=_drawn(bench), device=bench.device)
    targets = torch.randint(10, (16, 128), generator=_drawn(bench), device=bench.device)
    return Task(
        "MLP 784-256-128-10, batch 128, float32, AdamW",
        bench,
        make=mlp,
        data=_repeated(list(zip(inputs, targets, strict=True)), bench.size(100, 4)),
        epochs=bench.size(4, 1),
        optimizer=adamw,
        tolerance=_tolerance(bench, FLOAT),
        criterion=nn.CrossEntropyLoss(),
    )


def small_images(bench: Bench) -> Task:
    depths, width = ((2, 2, 2, 2), 64) if not bench.tiny else ((1, 1), 4)
    rows, side = bench.size(1024, 8), bench.size(32, 8)
    return Task(
        f"ResNet-18 for {side} x {side} images, batch {rows}, bf16, channels-last, SGD",
        bench,
        make=partial(resnet, depths, width=width, for_cifar=True, classes=10),
        data=_repeated(_images(bench, 4, rows=rows, side=side, classes=10), bench.size(16, 4)),
        epochs=1,
        optimizer=sgd,
        tolerance=_tolerance(bench, HALF),
        criterion=nn.CrossEntropyLoss(),
        precision="bf16",
        channels_last=True,
    )


def large_images(bench: Bench) -> Task:
    depths, width = ((3, 4, 6, 3), 64) if not bench.tiny else ((1, 1), 4)
    rows, side = bench.size(256, 4), bench.size(224, 32)
    return Task(
        f"ResNet-50, batch {rows}, {side} x {side}, bf16, channels-last, SGD",
        bench,
        make=partial(resnet, depths, width=width, bottleneck=True),
        data=_repeated(_images(bench, 2, rows=rows, side=side, classes=1000), bench.size(6, 4)),
        epochs=1,
        optimizer=sgd,
        tolerance=_tolerance(bench, HALF),
        criterion=nn.CrossEntropyLoss(),
        precision="bf16",
        channels_last=True,
    )


def language(bench: Bench, *, rows: int = 32, precision: str = "bf16", clip: float | None = None) -> Task:
    from trainwright.modules import count_flops

    rows, model = bench.size(rows, 2), gpt2(tiny=bench.tiny)
    vocabulary, length = model.tokens.num_embeddings, model.length
    data = _tokens(bench, 2, vocabulary=vocabulary, rows=rows, length=length)
    with torch.device("meta"):
        row = torch.zeros(1, length, dtype=torch.long)
    name = "GPT-2 of 124 million parameters" if not bench.tiny else "GPT, tiny"
    return Task(
        f"{name}, {rows} x {length} random tokens, {precision}, AdamW" + (f", clip {clip}" if clip else ""),
        bench,
        make=partial(gpt2, tiny=bench.tiny),
        data=_repeated(data, bench.size(6, 4)),
        epochs=1,
        optimizer=adamw,
        tolerance=_tolerance(bench, HALF),
        precision=precision,
        clip=clip,
        flops=float(rows * count_flops(model, row, row)),
    )


def small_language(bench: Bench) -> Task:
    sizes = {"vocabulary": 1024, "length": 128, "width": 256, "layers": 6, "heads": 4}
    if bench.tiny:
        sizes |= {"length": 16, "width": 16, "layers": 2, "heads": 2}
    data = _tokens(bench, 8, vocabulary=1024, rows=4, length=sizes["length"])
    return Task(
        f"GPT of {sizes['layers']} x {sizes['width']}, 4 x {sizes['length']} random tokens, bf16, AdamW",
        bench,
        make=partial(GPT, **sizes),
        data=_repeated(data, bench.size(40, 4)),
        epochs=bench.size(2, 1),
        optimizer=adamw,
        tolerance=_tolerance(bench, HALF),
        precision="bf16",
    )


def varied_lengths(bench: Bench) -> Task:
    """Rows of one batch have lengths of one bucket; padded to the bucket, to the longest of all, or packed."""
    buckets = (64, 128, 256, 512) if not bench.tiny else (4, 6, 8, 10)
    rows, longest = bench.size(32, 3), buckets[-1]
    sizes = {"vocabulary": 8192, "length": longest, "width": 512, "layers": 8, "heads": 8}
    if bench.tiny:
        sizes |= {"vocabulary": 32, "width": 16, "layers": 3, "heads": 2}
    drawn = torch.Generator().manual_seed(3)
    ragged, padded, packed = [], [], []
    for _ in range(bench.size(6, 1)):
        for bucket in (buckets[i] for i in torch.randperm(len(buckets), generator=drawn).tolist()):
            lengths = torch.randint(bucket // 2 + 1, bucket + 1, (rows,), generator=drawn).tolist()
            lines = [torch.randint(sizes["vocabulary"], (length + 1,), generator=drawn) for length in lengths]
            ragged.append(_on(bench, _padded(lines, bucket)))
            padded.append(_on(bench, _padded(lines, longest)))
            packed.append(_on(bench, _packed(lines)))
    return Task(
        f"GPT of {sizes['layers']} x {sizes['width']}, {rows} rows of {len(buckets)} buckets up to {longest}, "
        f"{'bf16' if bench.on_cuda else 'float32'}, AdamW",
        bench,
        make=partial(GPT, **sizes),
        data=ragged,
        epochs=bench.size(2, 1),
        optimizer=adamw,
        tolerance=_tolerance(bench, OTHER_SHAPES),
        counts=_valid,
        precision="bf16" if bench.on_cuda else None,
        variants={"padded": padded, "packed": packed},
    )


def from_host(bench: Bench) -> Task:
    """Images of ImageNet's shape on the host, as uint8."""
    depths, width = ((2, 2, 2, 2), 64) if not bench.tiny else ((1, 1), 4)
    rows, side, many = bench.size(256, 4), bench.size(224, 32), bench.size(8, 4)
    drawn = torch.Generator().manual_seed(4)
    images = torch.randint(256, (many * rows, 3, side, side), dtype=torch.uint8, generator=drawn)
    labels = torch.randint(1000, (many * rows,), generator=drawn)
    return Task(
        f"ResNet-18, batch {rows} of uint8 {side} x {side} from the host, bf16, channels-last, SGD",
        bench,
        make=partial(resnet, depths, width=width),
        data=[()] * many,
        epochs=bench.size(2, 1),
        optimizer=sgd,
        tolerance=_tolerance(bench, HALF),
        criterion=nn.CrossEntropyLoss(),
        precision="bf16",
        channels_last=True,
        rows=(images, labels),
        batch_size=rows,
    )


def update_alone(bench: Bench) -> Task:
    """The update of GPT-2: gradients of the shapes of its parameters are given, larger and smaller than the clip."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in gpt2(tiny=bench.tiny).parameters()]
    factors = torch.tensor([[0.3], [1.7], [0.9], [3.1], [0.1]], device=bench.device)
    return Task(
        f"{sum(map(torch.Size.numel, shapes)):,} parameters of GPT-2's shapes, gradients given, fp16 scaler, clip 1.0",
        bench,
        make=partial(GivenGradients, shapes, norm=1.0),
        data=_repeated([(factor,) for factor in factors], bench.size(40, 5)),
        epochs=bench.size(2, 1),
        optimizer=adamw,
        tolerance=_tolerance(bench, ON_CPU),
        counts=lambda _: 1,
        precision="fp16",
        clip=1.0,
    )


def with_fp16(bench: Bench) -> Task:
    """GPT-2 with a loss scale and clipping."""
    return language(bench, rows=16, precision="fp16", clip=1.0)


def _tolerance(bench: Bench, on_cuda: float) -> float:
    return on_cuda if bench.on_cuda else ON_CPU


def _drawn(bench: Bench) -> torch.Generator:
    return torch.Generator(bench.device).manual_seed(1)


def _repeated(batches: Sequence[Batch], many: int) -> list[Batch]:
    return [batches[i % len(batches)] for i in range(many)]


def _images(bench: Bench, many: int, *, rows: int, side: int, classes: int) -> list[Batch]:
    at: dict[str, Any] = {"generator": _drawn(bench), "device": bench.device}
    return [
        (
            torch.randn(rows, 3, side, side, **at).to(memory_format=torch.channels_last),
            torch.randint(classes, (rows,), **at),
        )
        for _ in range(many)
    ]


def _tokens(bench: Bench, many: int, *, vocabulary: int, rows: int, length: int) -> list[Batch]:
    drawn = _drawn(bench)
    lines = [torch.randint(vocabulary, (rows, length + 1), generator=drawn, device=bench.device) for _ in range(many)]
    return [(line[:, :-1].contiguous(), line[:, 1:].contiguous()) for line in lines]


def _padded(lines: Sequence[Tensor], length: int) -> Batch:
    tokens = torch.zeros(len(lines), length, dtype=torch.long)
    targets = torch.full((len(lines), length), IGNORED)
    for number, line in enumerate(lines):
        tokens[number, : len(line) - 1], targets[number, : len(line) - 1] = line[:-1], line[1:]
    return tokens, targets


def _packed(lines: Sequence[Tensor]) -> Batch:
    lengths = torch.tensor([len(line) - 1 for line in lines])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    return torch.cat([line[:-1] for line in lines]), torch.cat([line[1:] for line in lines]), positions, starts


def _valid(batch: Batch) -> Tensor:
    return (batch[1] != IGNORED).sum()


def _on(bench: Bench, batch: Batch) -> Batch:
    return tuple(one.to(bench.device) for one in batch)
