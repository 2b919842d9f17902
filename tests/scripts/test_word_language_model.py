"""A word language model whose hidden state is carried from one stretch of text to the next."""

from __future__ import annotations

import math
import re
from pydoc_data.topics import topics

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights, made
from torch import nn
from torch.nn import functional as F

from trainwright import Plateau, Trainer, Updates
from trainwright.metrics import Derived

STRETCH = 12
"""Words that a gradient reaches back."""


def text():
    """Training and validation stretches of Python's own help: (inputs, targets), each (words, columns), in order."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(topics[name] for name in sorted(topics)[:6]))[:1500]
    numbers = {word: index for index, word in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([numbers[word] for word in words])
    return len(numbers), stretches(ids[:1200], 8), stretches(ids[1200:], 4)


def stretches(ids, columns):
    rows = ids[: len(ids) // columns * columns].view(columns, -1).T
    starts = range(0, len(rows) - 1, STRETCH)
    return [(rows[i : min(i + STRETCH, len(rows) - 1)], rows[i + 1 : i + 1 + STRETCH]) for i in starts]


class Words(nn.Module):
    """Words so far, and a hidden state, to the scores of the next words and the hidden state after them."""

    def __init__(self, words):
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(words, 16), nn.GRU(16, 16), nn.Linear(16, words)

    def forward(self, x, hidden=None):
        output, hidden = self.cell(F.dropout(self.embedding(x), 0.2, self.training), hidden)
        return self.head(output), hidden


def start():
    words, train, val = text()
    return made(lambda: Words(words), dtype=torch.float64), train, val


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=20.0)


def loss_of(scores, target):
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def by_hand(model, train, val, epochs):
    optimizer, history = sgd(model), []
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0)
    for _ in range(epochs):
        model.train()
        hidden, total, words = None, 0.0, 0
        for x, y in train:
            hidden = None if hidden is None else hidden.detach()
            scores, hidden = model(x, hidden)
            loss = loss_of(scores, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            total, words = total + loss.item() * y.numel(), words + y.numel()
        row = {"loss": total / words, "lr": optimizer.param_groups[0]["lr"]}
        model.eval()
        hidden, total, words = None, 0.0, 0
        with torch.no_grad():
            for x, y in val:
                scores, hidden = model(x, hidden)
                total, words = total + loss_of(scores, y).item() * y.numel(), words + y.numel()
        row |= {"val_loss": total / words, "val_perplexity": math.exp(total / words)}
        schedule.step(row["val_loss"])
        history.append(row)
    return history


class Carried(Trainer):
    """Carries the hidden state of training through an epoch, and that of an evaluation through it."""

    def begin_epoch(self, epoch):
        self.state.clear()

    def training_step(self, batch):
        (x, y), name = batch, "train" if self.model.training else "val"
        scores, hidden = self.model(x, self.state.get(name))
        self.state[name] = hidden.detach()
        return loss_of(scores, y)


def by_trainer(model, train, val, epochs):
    perplexity = Derived(lambda numbers: math.exp(numbers["loss"]))
    plateau = Plateau("val_loss", factor=0.25, patience=0, threshold=0.0)
    settings = {"clip": 0.25, "schedule": plateau, "metrics": {"perplexity": perplexity}, "console": False}
    return Carried(model, sgd(model), **settings).fit(train, val, epochs=epochs).history


def test_a_carried_state_gives_what_its_plain_loop_gives():
    plain, train, val = start()
    reported = by_hand(plain, train, val, 6)
    model, train, val = start()
    assert_near_history(by_trainer(model, train, val, 6), reported)
    assert_same_weights(model, plain)
    assert reported[-1]["val_loss"] < reported[0]["val_loss"] and reported[-1]["lr"] < reported[0]["lr"]


def test_evaluations_in_the_middle_of_an_epoch_leave_the_carried_state_alone():
    runs = []
    for every in (None, Updates(2)):
        model, train, val = start()
        trainer = Carried(model, sgd(model), clip=0.25, console=False)
        result = trainer.fit(train, None if every is None else val, epochs=2, **({"validate": every} if every else {}))
        assert set(trainer.state) == {"train"}
        runs.append((model, result.history[-1]["loss"]))
    assert_same_weights(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_a_carried_state_is_no_longer_than_its_plain_loop():
    assert_no_longer([Carried, by_trainer], [by_hand])
