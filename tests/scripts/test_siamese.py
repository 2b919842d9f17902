"""Siamese networks: triplets by an overridden step, pairs by a loss of two embeddings alone."""

from __future__ import annotations

import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F

from trainwright import Trainer, batches

EPOCHS = 3
ROWS, HELD_OUT = 300, 90


def embedding():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def ordered(anchor, positive, negative):
    """The share of anchors that lie nearer to their positive."""
    return (F.pairwise_distance(anchor, positive) < F.pairwise_distance(anchor, negative)).float().mean()


class TripletTrainer(Trainer):
    def training_step(self, batch):
        embedded = [self.model(x) for x in batch]
        self.log("ordered", ordered(*embedded))
        return self.loss(*embedded)


def triplets_by_trainer(model, train, val):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = TripletTrainer(model, optimizer, nn.TripletMarginLoss(), console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def triplets_by_hand(model, train, val):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of, history = nn.TripletMarginLoss(), []
    for epoch in range(EPOCHS):
        model.train()
        total = right = rows = 0
        for batch in train.epoch(epoch):
            optimizer.zero_grad()
            embedded = [model(x) for x in batch]
            loss = loss_of(*embedded)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch[0])
            right += ordered(*embedded).item() * len(batch[0])
            rows += len(batch[0])
        row = {"loss": total / rows, "ordered": right / rows}
        model.eval()
        total = right = rows = 0
        with torch.no_grad():
            for batch in val:
                embedded = [model(x) for x in batch]
                total += loss_of(*embedded).item() * len(batch[0])
                right += ordered(*embedded).item() * len(batch[0])
                rows += len(batch[0])
        history.append(row | {"val_loss": total / rows, "val_ordered": right / rows})
    return history


class Pair(nn.Module):
    """Two pictures through one network."""

    def __init__(self):
        super().__init__()
        self.embed = embedding()

    def forward(self, left, right):
        return self.embed(left), self.embed(right)


def same(output, target):
    return ((F.cosine_similarity(*output) > 0.5) == (target > 0)).float().mean()


def pairs_by_trainer(model, train, val):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, cosine_loss, metrics={"same": same}, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def cosine_loss(output, target):
    return F.cosine_embedding_loss(*output, target)


def pairs_by_hand(model, train, val):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for epoch in range(EPOCHS):
        model.train()
        for left, right, target in train.epoch(epoch):
            optimizer.zero_grad()
            cosine_loss(model(left, right), target).backward()
            optimizer.step()
        model.eval()
        total = hits = rows = 0
        with torch.no_grad():
            for left, right, target in val:
                output = model(left, right)
                total += cosine_loss(output, target).item() * len(target)
                hits += same(output, target).item() * len(target)
                rows += len(target)
        history.append({"val_loss": total / rows, "val_same": hits / rows})
    return history


def rows_of_class(classes, wanted, generator):
    """For each wanted class the number of a row of it."""
    noise = torch.rand(len(wanted), len(classes), generator=generator)
    return (noise * (classes == wanted[:, None])).argmax(1)


def data(kind):
    x, classes = digits(ROWS)
    generator = torch.Generator().manual_seed(1)
    other = (classes + torch.randint(1, 10, (ROWS,), generator=generator)) % 10
    positive, negative = (x[rows_of_class(classes, wanted, generator)] for wanted in (classes, other))
    columns = (x, positive, negative)
    if kind == "pairs":
        target = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0)
        columns = (x, torch.where(target[:, None] > 0, positive, negative), target)
    train, val = (tuple(column[part] for column in columns) for part in (slice(HELD_OUT, None), slice(HELD_OUT)))
    return batches(train, 32, shuffle=True, seed=0), batches(val, 40)


def test_triplets_are_their_plain_loop():
    ours, theirs = made(embedding), made(embedding)
    history = triplets_by_trainer(ours, *data("triplets"))
    assert_same_history(history, triplets_by_hand(theirs, *data("triplets")))
    assert_same_weights(ours, theirs)
    assert history[-1]["val_ordered"] > 0.8


def test_pairs_are_their_plain_loop():
    ours, theirs = made(Pair), made(Pair)
    history = pairs_by_trainer(ours, *data("pairs"))
    assert_same_history(history, pairs_by_hand(theirs, *data("pairs")))
    assert_same_weights(ours, theirs)


def test_siamese_scripts_are_no_longer_than_their_plain_loops():
    assert_no_longer([TripletTrainer, triplets_by_trainer], [triplets_by_hand])
    assert_no_longer([pairs_by_trainer], [pairs_by_hand])
