"""K-fold on breast cancer: a new Trainer for each fold, early stopping and the best weights in each."""

from __future__ import annotations

import copy
import math

import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainwright import EarlyStopping, Trainer, accuracy

EPOCHS, PATIENCE, FOLDS = 12, 2, 3


def network():
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1), nn.Flatten(0))


def fold_trainer(fold):
    torch.manual_seed(fold)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    early = EarlyStopping("val_loss", patience=PATIENCE)
    settings = {"metrics": {"accuracy": accuracy}, "early_stopping": early, "console": False}
    return Trainer(model, optimizer, nn.BCEWithLogitsLoss(), **settings)


def by_trainer(folds):
    scores = []
    for fold, (train, val) in enumerate(folds):
        trainer = fold_trainer(fold)
        trainer.fit(train, val, epochs=EPOCHS)
        scores.append(trainer.evaluate(val))
    return scores, trainer.model


def score(model, data):
    model.eval()
    total = hits = rows = 0
    with torch.no_grad(), torch.random.fork_rng():
        for x, y in data:
            output = model(x)
            total += F.binary_cross_entropy_with_logits(output, y, reduction="sum").item()
            hits += ((output > 0) == (y > 0.5)).sum().item()
            rows += len(y)
    return {"val_loss": total / rows, "val_accuracy": hits / rows}


def by_hand(folds):
    scores = []
    for fold, (train, val) in enumerate(folds):
        torch.manual_seed(fold)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        best, waited = math.inf, 0
        for _ in range(EPOCHS):
            model.train()
            for x, y in train:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(model(x), y).backward()
                optimizer.step()
            loss = score(model, val)["val_loss"]
            waited += 1
            if loss < best:
                best, waited, weights = loss, 0, copy.deepcopy(model.state_dict())
            if waited == PATIENCE:
                break
        model.load_state_dict(weights)
        scores.append(score(model, val))
    return scores, model


def data():
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    rows = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
    splits = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y)
    for train, val in splits:
        yield DataLoader(Subset(rows, train), 32, shuffle=True), DataLoader(Subset(rows, val), 64)


def test_k_folds_are_their_plain_loop():
    ours, model = by_trainer(data())
    theirs, plain = by_hand(data())
    assert_same_history(ours, theirs)
    assert_same_weights(model, plain)
    assert sum(score["val_accuracy"] for score in ours) / FOLDS > 0.95


def test_two_trainers_one_inside_the_other_do_not_disturb_each_other():
    # The generator is put back after the inner fit, which draws from it as the plain loop would.
    (first, first_val), (second, second_val), *_ = data()
    alone = []
    for fold, (train, val) in enumerate(((first, first_val), (second, second_val))):
        trainer = fold_trainer(fold)
        alone.append((trainer.fit(train, val, epochs=3).history, trainer.model))

    class Outer(Trainer):
        def end_epoch(self, metrics):
            with torch.random.fork_rng():
                inner = fold_trainer(1)
                inner_runs.append((inner.fit(second, second_val, epochs=3).history, inner.model))

    inner_runs = []
    torch.manual_seed(0)
    model = network()
    settings = {"metrics": {"accuracy": accuracy}, "early_stopping": EarlyStopping("val_loss", patience=PATIENCE)}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    outer = Outer(model, optimizer, nn.BCEWithLogitsLoss(), **settings, console=False)
    assert outer.fit(first, first_val, epochs=3).history == alone[0][0]
    assert_same_weights(outer.model, alone[0][1])
    assert len(inner_runs) == 3
    for history, inner in inner_runs:
        assert history == alone[1][0]
        assert_same_weights(inner, alone[1][1])


def test_k_folds_are_no_longer_than_their_plain_loop():
    assert_no_longer([fold_trainer, by_trainer], [by_hand, score])
