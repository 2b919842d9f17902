"""A hand-written loop with the slots of the library: windows, fp16, clipping, a schedule, an average, early stopping.

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Time      1 to 2 seconds of training on one CPU core
Expected  at least 96 % of the held-out digits right at the best epoch, after 3 updates that overflow and are skipped
Writes    runs/own_loop.safetensors, the best weights

Every slot of the `Trainer` works without it. The updates of this loop equal those of the `Trainer` with the same
settings, bit for bit. docs/guides/loop.md explains the loop of the `Trainer` line by line. This loop cannot resume
after an interruption, and has no checks of mistakes before training.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from trainwright import (
    EMA,
    ClipNorm,
    EarlyStopping,
    MixedPrecision,
    OneCycle,
    Plan,
    accuracy,
    batches,
    load_weights,
    save_weights,
    windows,
)
from trainwright.data import Batches
from trainwright.modules import training_mode
from trainwright.optim import Gradients
from trainwright.precision import LossScaler


def digits() -> tuple[Batches, Batches]:
    pixels, targets = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = ((images[rows], classes[rows]) for rows in (order[:1400], order[1400:]))
    return batches(train, 32, shuffle=True, seed=0), batches(val, 256)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def evaluate(model: nn.Module, data: Batches, precision: MixedPrecision) -> dict[str, float]:
    loss, right, rows = 0.0, 0, 0
    with training_mode(model, False), torch.no_grad(), precision.autocast("cpu") or nullcontext():
        for images, classes in data:
            output = model(images)
            loss += F.cross_entropy(output, classes, reduction="sum").item()
            right += int(accuracy(output, classes).total.sum())
            rows += len(classes)
    return {"val_loss": loss / rows, "val_accuracy": right / rows}


def train(path: str | Path, *, epochs: int, accumulate: int = 2) -> list[dict[str, float]]:
    train_data, val_data = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = Plan(batches=len(train_data), epochs=epochs, accumulate=((0, accumulate),))  # what a schedule asks

    precision, clip, gradients = MixedPrecision("fp16", init_scale=2.0**22), ClipNorm(1.0), Gradients(optimizer)
    autocast, scaler = precision.autocast("cpu") or nullcontext(), LossScaler(precision)
    rates = OneCycle(max_lr=1e-2).bind(optimizer, plan)
    average = EMA(0.95).bind(model, plan)
    watch = EarlyStopping("val_accuracy", mode="max", patience=5).bind()
    updates, history = 0, list[dict[str, float]]()

    for epoch in range(epochs):
        loss_sum, rows_seen = 0.0, 0
        for window in windows(train_data, accumulate):  # the last of an epoch may be short
            rates.apply(updates)
            gradients.zero()
            rows = sum(window.rows)
            for images, classes in window:
                with autocast:
                    loss = F.cross_entropy(model(images), classes)
                weight = len(classes) / rows  # each row weighs 1 / rows, whatever the sizes of the micro-batches
                loss.backward(torch.full_like(loss, scaler.scale * weight))
                loss_sum += loss.item() * len(classes)
            rows_seen += rows
            overflowed = bool(
                gradients.multiply_and_check(scaler.inv_scale())
            )  # unscaled, and any NaN found, in one pass
            scaler.adapt(overflowed)
            if overflowed:  # no weight changes, and no clock advances
                gradients.lower_flags()
                continue
            clip(gradients.parameters)
            optimizer.step()
            updates += 1
            average.take(updates)

        with average.swapped():  # the averaged weights are those that count
            row = {"loss": loss_sum / rows_seen} | evaluate(model, val_data, precision)
            history.append(row)
            if watch.judge(row, epoch=epoch + 1, update=updates):
                save_weights(path, model.state_dict())
        print(f"{epoch + 1:5}  " + "  ".join(f"{name} {value:.4f}" for name, value in row.items()))
        if watch.stopped:
            break

    load_weights(path, model)
    assert watch.best is not None
    print(f"best val_accuracy {watch.best.value:.4f} in epoch {watch.best.epoch}; scale {scaler.value:g}")
    return history


def main() -> None:
    train(Path("runs/own_loop.safetensors"), epochs=12)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more
    main()
