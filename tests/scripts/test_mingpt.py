"""A small GPT that returns its own loss: groups without decay, a rate of its own, clipping, text to continue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from plain_scripts import (
    assert_near_history,
    assert_near_weights,
    assert_no_longer,
    assert_same_history,
    assert_same_weights,
    made,
)
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Trainer, accuracy, adamw, batches
from trainwright.metrics import Derived

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
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    assert row["val_perplexity"] < 0.75 * len(LETTERS)  # the text is Python's own, another one in each version


class Classes(nn.Module):
    """As the models of the transformers library: keywords in, an object with `loss` and `logits` out."""

    def __init__(self):
        super().__init__()
        self.letters, self.head = nn.EmbeddingBag(len(LETTERS), 8), nn.Linear(8, 3)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.letters(input_ids))
        return Found(None if labels is None else F.cross_entropy(logits, labels), logits)


@dataclass
class Found:
    loss: Tensor | None
    logits: Tensor


def classes_by_trainer(model, data, accumulate):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Trainer(model, optimizer, accumulate=accumulate, metrics={"accuracy": accuracy}, console=False)
    row = trainer.fit(data, epochs=2).history[-1]
    return row, trainer.predict(data), trainer.report(data)


def classes_by_hand(model, data, accumulate):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        total = hits = counted = 0
        epoch_batches = list(data)
        for start in range(0, len(epoch_batches), accumulate):
            window = epoch_batches[start : start + accumulate]
            whole = sum((batch["labels"] != -100).sum().item() for batch in window)
            optimizer.zero_grad()
            for batch in window:
                output, count = model(**batch), (batch["labels"] != -100).sum().item()
                (output.loss * (count / whole)).backward()
                total += output.loss.item() * count
                hits += (output.logits.argmax(1) == batch["labels"]).sum().item()
                counted += count
            optimizer.step()
    return {"loss": total / counted, "accuracy": hits / counted}, torch.cat([model(**b).logits for b in data])


def test_a_loss_of_the_model_over_labels_that_count_is_weighed_by_them():
    tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT[:600]]).view(60, 10)
    labels = torch.where(3 * torch.arange(60) % 7 < torch.arange(60) // 12, -100, tokens[:, 0] % 3)
    data = batches({"input_ids": tokens, "labels": labels}, 8)
    ours, theirs = made(Classes, dtype=torch.float64), made(Classes, dtype=torch.float64)
    row, predicted, report = classes_by_trainer(ours, data, 3)
    plain, logits = classes_by_hand(theirs, data, 3)
    # The Trainer learns the counts of a window as its steps tell them, and corrects the gradients afterwards.
    assert_near_history([row], [plain])
    assert_near_weights(ours, theirs)
    torch.testing.assert_close(predicted.logits, logits, rtol=1e-12, atol=1e-12)
    assert predicted.loss is None
    assert report.kind == "classes" and torch.equal(report.output, predicted.logits)


def test_a_gpt_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
    assert_no_longer([classes_by_trainer], [classes_by_hand])
