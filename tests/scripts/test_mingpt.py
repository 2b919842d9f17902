"""A small GPT that returns its own loss: groups without decay, a rate of its own, clipping, text to continue."""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, made
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Derived, Trainer, accuracy, adamw, batches

TEXT = "".join(topics[name] for name in sorted(topics))[:20_000]
LETTERS = sorted(set(TEXT))
LENGTH, UPDATES = 32, 40


class Output(NamedTuple):
    logits: Tensor
    loss: Tensor | None


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, 2, -1).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.think(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight

    def forward(self, tokens, targets=None):
        x = self.letters(tokens) * 0.1 + self.places.weight[: tokens.shape[1]] * 0.1
        logits = self.head(self.norm(self.blocks(x)))
        return Output(logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class Windows(torch.utils.data.Dataset):
    """Pieces of the text, each with itself moved by one letter."""

    def __init__(self, text):
        self.tokens = torch.tensor([LETTERS.index(letter) for letter in text])

    def __len__(self):
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index):
        piece = self.tokens[index * LENGTH : (index + 1) * LENGTH + 1]
        return piece[:-1], piece[1:]


def rate(update, total):
    return min((update + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * update / total))


def right(output, target):
    return accuracy(output.movedim(-1, 1), target)


def by_trainer(model, train, val):
    metrics = {"accuracy": right, "perplexity": Derived(lambda numbers: math.exp(numbers["loss"]))}
    optimizer = adamw(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    trainer = Trainer(model, optimizer, metrics=metrics, schedule=rate, clip=1.0, console=False)
    return trainer.fit(train, val, max_updates=UPDATES).history[-1]


def by_hand(model, train, val):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    still = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(update, UPDATES))
    model.train()
    update = epoch = 0
    while update < UPDATES:
        for tokens, targets in train.epoch(epoch):
            optimizer.zero_grad()
            model(tokens, targets).loss.backward()
            torch.nn.utils.clip_grad_norm_([*decay, *still], 1.0)  # the Trainer's order: norms are sums
            optimizer.step()
            schedule.step()
            if (update := update + 1) == UPDATES:
                break
        epoch += 1
    model.eval()
    total = hits = rows = 0
    with torch.no_grad():
        for tokens, targets in val:
            output = model(tokens, targets)
            total += output.loss.item() * len(targets)
            hits += (output.logits.argmax(-1) == targets).sum().item()
            rows += len(targets)
    loss = total / rows
    return {"val_loss": loss, "val_accuracy": hits / rows / LENGTH, "val_perplexity": math.exp(loss)}


def data():
    train, val = Windows(TEXT[:16_000]), Windows(TEXT[16_000:])
    return batches(train, 32, shuffle=True, seed=0), batches(val, 64)


def test_a_gpt_with_its_own_loss_is_its_plain_loop():
    row = by_trainer(ours := made(GPT), *data())
    assert_same_history([row], [by_hand(theirs := made(GPT), *data())])
    assert_same_weights(ours, theirs)
    assert row["val_perplexity"] < 0.7 * len(LETTERS)


def test_a_gpt_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
