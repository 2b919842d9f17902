"""The models: perceptron, residual networks, GPT (with rows padded or packed), and one whose gradients are given."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""The target of padding."""


def mlp(sizes: Sequence[int] = (784, 256, 128, 10)) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """Two convolutions of 3 x 3 (`narrow` 0), or one between two of 1 x 1, beside a shortcut."""

    def __init__(self, channels: int, out: int, *, stride: int, narrow: int = 0) -> None:
        super().__init__()
        if narrow:
            shapes = [(channels, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, out, 1, 1)]
        else:
            shapes = [(channels, out, 3, stride), (out, out, 3, 1)]
        layers: list[nn.Module] = []
        for a, b, size, step in shapes:
            layers += [nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(
    depths: Sequence[int], *, width: int = 64, bottleneck: bool = False, for_cifar: bool = False, classes: int = 1000
) -> nn.Module:
    """ResNet-18 is (2, 2, 2, 2), ResNet-50 (3, 4, 6, 3) with bottlenecks; `for_cifar`: a stem without strides."""
    size, stride = (3, 1) if for_cifar else (7, 2)
    layers: list[nn.Module] = [nn.Conv2d(3, width, size, stride, size // 2, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.ReLU(inplace=True)] + ([] if for_cifar else [nn.MaxPool2d(3, 2, 1)])
    channels = width
    for stage, depth in enumerate(depths):
        narrow = width * 2**stage
        out = narrow * 4 if bottleneck else narrow
        for number in range(depth):
            step = 2 if stage and not number else 1
            layers.append(Residual(channels, out, stride=step, narrow=narrow if bottleneck else 0))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Block(nn.Module):
    """A layer of a GPT, its normalizations first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, starts: Tensor | None, longest: int) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        if starts is None:
            q, k, v = (one.transpose(1, 2) for one in qkv.unbind(-3))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            attended = packed_attention(*qkv.unbind(-3), starts=starts, longest=longest)
        x = x + self.out(attended.flatten(-2))
        return x + self.mlp(self.norm_2(x))


def packed_attention(q: Tensor, k: Tensor, v: Tensor, *, starts: Tensor, longest: int) -> Tensor:
    """Causal attention inside each of the rows that lie one after the other; (tokens, heads, width).

    On a CPU, which has no kernel for it, row by row.
    """
    if not q.is_cuda:
        cuts = starts.diff().tolist()
        rows = zip(*(one.transpose(0, 1).split(cuts, 1) for one in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True) for row in rows], 1).transpose(0, 1)
    from torch.nn.attention.varlen import varlen_attn

    attended: Tensor = varlen_attn(q, k, v, starts, starts, longest, longest, **_causal())
    return attended


@cache
def _causal() -> dict[str, Any]:
    """How `varlen_attn` is made causal: by a flag in torch 2.10, by a window in later ones."""
    from torch.nn.attention.varlen import varlen_attn

    windowed = "window_size" in inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if windowed else {"is_causal": True}


class GPT(nn.Module):
    """GPT-2, its head being its embedding; returns the mean loss over all targets that are not padding.

    Tokens and targets are (rows, length). Packed, they are (tokens,), with the position of each in its row and
    where rows start, the end being the last start.
    """

    def __init__(self, *, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, starts, self.length)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def gpt2(*, tiny: bool) -> GPT:
    """GPT-2 of 124 million parameters, with a vocabulary of a round number."""
    if tiny:
        return GPT(vocabulary=64, length=16, width=16, layers=2, heads=2)
    return GPT(vocabulary=50304, length=1024, width=768, layers=12, heads=12)


class _Given(torch.autograd.Function):
    """A loss of zero, whose gradients are given ones times a factor: nothing is computed but the product."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, given: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.factor, ctx.given = factor, given
        return torch.zeros((), device=factor.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *torch._foreach_mul(ctx.given, gradient * ctx.factor.reshape(()))


class GivenGradients(nn.Module):
    """Parameters of another model's shapes, whose gradients cost one pass over them."""

    def __init__(self, shapes: Sequence[torch.Size], norm: float) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes)
        numbers = sum(parameter.numel() for parameter in self.all)
        self.given = [torch.randn_like(parameter) * (norm / numbers**0.5) for parameter in self.all]

    def forward(self, factor: Tensor) -> Tensor:
        loss: Tensor = _Given.apply(factor, self.given, *self.all)
        return loss
