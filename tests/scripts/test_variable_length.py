"""Sequences of unequal length: padded by an own collate, weighed by the tokens that are there."""

from __future__ import annotations

import pytest
import torch
from plain_scripts import (
    assert_near_history,
    assert_near_weights,
    assert_no_longer,
    assert_same_history,
    assert_same_weights,
    made,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from trainwright import MeanLoss, Trainer, batches

EPOCHS = 2


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0]).squeeze(2)


def collate(rows):
    """Tokens, targets and a mask of what is there, (rows, longest)."""
    tokens, targets = ([row[place] for row in rows] for place in (0, 1))
    there = [torch.ones(len(row), dtype=torch.bool) for row in tokens]
    return tuple(pad_sequence(part, batch_first=True) for part in (tokens, targets, there))


def masked_loss(model, batch):
    tokens, targets, there = batch
    return F.mse_loss(model(tokens)[there], targets[there]), there.sum()


class TokenTrainer(Trainer):
    def training_step(self, batch):
        loss, tokens = masked_loss(self.model, batch)
        return MeanLoss(loss, tokens)


def by_trainer(model, train, val, accumulate):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = TokenTrainer(model, optimizer, accumulate=accumulate, clip=1.0, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def by_hand(model, train, val, accumulate):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=0.01), []
    for epoch in range(EPOCHS):
        model.train()
        total, tokens, epoch_batches = 0.0, 0, list(train.epoch(epoch))
        for start in range(0, len(epoch_batches), accumulate):
            window = epoch_batches[start : start + accumulate]
            whole = sum(there.sum() for _, _, there in window)
            optimizer.zero_grad()
            for batch in window:
                loss, count = masked_loss(model, batch)
                (loss * (count.double() / whole)).backward()  # whole numbers are divided in float32
                total += loss.item() * count.item()
                tokens += count.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        row = {"loss": total / tokens}
        model.eval()
        total = tokens = 0
        with torch.no_grad():
            for batch in val:
                loss, count = masked_loss(model, batch)
                total += loss.item() * count.item()
                tokens += count.item()
        history.append(row | {"val_loss": total / tokens})
    return history


def data(dtype):
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(58):
        tokens = torch.randint(20, (1 + number * 7 % 19,), generator=generator)
        rows.append((tokens, (tokens.cumsum(0) % 5).to(dtype)))
    return batches(rows[:46], 4, shuffle=True, seed=0, collate=collate), batches(rows[46:], 5, collate=collate)


def test_one_batch_of_unequal_lengths_is_its_plain_loop():
    ours, theirs = made(Tagger), made(Tagger)
    history = by_trainer(ours, *data(torch.float32), 1)
    assert_same_history(history, by_hand(theirs, *data(torch.float32), 1))
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("accumulate", [3, 5])
def test_windows_of_unequal_lengths_are_weighed_by_tokens(accumulate):
    # The plain loop counts a window before it runs it; here the steps tell, and the gradients are corrected after.
    ours, theirs = made(Tagger, dtype=torch.float64), made(Tagger, dtype=torch.float64)
    history = by_trainer(ours, *data(torch.float64), accumulate)
    plain = by_hand(theirs, *data(torch.float64), accumulate)
    assert_near_history(history, plain)
    assert_near_weights(ours, theirs)


def test_variable_length_is_no_longer_than_its_plain_loop():
    assert_no_longer([TokenTrainer, by_trainer], [by_hand])
