"""Regression on diabetes: mean squared error, scores that are scikit-learn's, a report of values."""

from __future__ import annotations

import pytest
import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights, made
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import nn
from torch.nn import functional as F

from trainwright import MAE, R2, RMSE, Epochs, StepLR, Trainer, batches

EPOCHS = 6


def network():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


def by_trainer(model, train, val):
    settings = {"metrics": {"r2": R2(), "mae": MAE(), "rmse": RMSE()}, "schedule": StepLR(Epochs(2), gamma=0.5)}
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=0.02), nn.MSELoss(), **settings, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history, trainer.report(val)


def by_hand(model, train, val):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=0.02), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train.epoch(epoch):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            output, target = (torch.cat(parts) for parts in zip(*((model(x), y) for x, y in val), strict=True))
        history.append(
            {
                "val_loss": F.mse_loss(output.double(), target.double()).item(),
                "val_r2": r2_score(target, output),
                "val_mae": mean_absolute_error(target, output),
                "val_rmse": root_mean_squared_error(target, output),
            }
        )
    return history


def data(column=True):
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x * 20, dtype=torch.float32), torch.tensor((y - 150) / 77, dtype=torch.float32)
    y = y[:, None] if column else y
    return batches((x[:340], y[:340]), 32, shuffle=True, seed=0), batches((x[340:], y[340:]), 64)


def test_regression_is_its_plain_loop_with_the_scores_of_scikit_learn():
    ours, theirs = made(network), made(network)
    history, report = by_trainer(ours, *data())
    plain = by_hand(theirs, *data())
    assert_same_weights(ours, theirs)
    # Sums of float32 squares by batch, and scikit-learn's in float32 over all rows: equal to float32's last digits.
    assert_near_history(history, plain, within=1e-6)
    assert report.kind == "values"
    for name, key in (("R2", "val_r2"), ("MAE", "val_mae"), ("RMSE", "val_rmse")):
        assert report.to_dict()[name] == pytest.approx(history[-1][key], rel=1e-12)
    assert history[-1]["val_r2"] > 0.3


def test_targets_without_the_column_of_the_output_are_refused_with_what_to_write():
    model = made(network)
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), console=False)
    with pytest.raises(ValueError, match=r"\(32, 1\) and a target \(32,\)(.|\n)*unsqueeze\(1\)"):
        trainer.fit(data(column=False)[0], epochs=1)
    assert trainer.progress.updates == 0


def test_regression_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
