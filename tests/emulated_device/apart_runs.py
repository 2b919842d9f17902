"""What is true of the emulated device, and of runs on it: fails by an AssertionError. Run by on_apart.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainwright import EMA, ClipNorm, OneCycle, Trainer, accuracy, batches, summary

APART = torch.device("apart", 0)


def refuses(work: Callable[[], Any], text: str) -> None:
    try:
        work()
    except (RuntimeError, TypeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was refused: {text}")


def check_device() -> None:
    """Nothing is read or mixed in passing, and what has no dimension may lie on the host."""
    there, here = torch.ones(4, 3, device=APART), torch.ones(4, 3)
    both = "to be on the same device"
    for work in (
        lambda: there + here,
        lambda: there @ here.T,
        lambda: torch.cat([there, here]),
        lambda: there.add_(here),
    ):
        refuses(work, both)
    refuses(lambda: nn.functional.conv1d(there[None], torch.ones(2, 4, 1)), both)
    refuses(there.numpy, "Tensor.cpu()")
    assert (there * torch.tensor(2.0) + 1).tolist() == (here * 2 + 1).tolist()
    assert there[torch.tensor([0, 2])].shape == (2, 3)
    assert there.to(APART) is there and there.cpu().is_cpu


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 3)]
    return nn.Sequential(*layers)


def trained(device: str, precision: str | None, **settings: Any) -> tuple[Trainer[nn.Module], list[dict[str, Any]]]:
    x = torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(90) % 3
    train, val = batches((x[:60], y[:60]), 7, shuffle=True, seed=0), batches((x[60:], y[60:]), 8)
    model = network()
    given = {"precision": precision, "metrics": {"accuracy": accuracy}, "device": device, "console": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), **given, **settings)
    history = trainer.fit(train, val, epochs=3).history
    return trainer, [{k: v for k, v in row.items() if "seconds" not in k} for row in history]


def check_runs() -> None:
    """Weights, buffers and all numbers of a run are bit for bit those of the CPU; in bf16 each casts what it will."""
    every = {"accumulate": 2, "clip": ClipNorm(0.5), "schedule": OneCycle(1e-2), "average": EMA(0.9)}
    for precision, settings in ((None, {}), (None, every), ("bf16", every)):
        (there, reported), (here, wanted) = (trained(device, precision, **settings) for device in ("auto", "cpu"))
        assert {tensor.device for tensor in there.model.state_dict().values()} == {APART}
        near = {"rtol": 0, "atol": 0} if precision is None else {"rtol": 0.05, "atol": 0.05}
        for name, tensor in there.model.state_dict().items():
            torch.testing.assert_close(tensor.cpu(), here.model.state_dict()[name], **near)
        for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
            numbers, others = ([row[name] for row in rows] for rows in (reported, wanted))
            torch.testing.assert_close(torch.tensor(numbers), torch.tensor(others), **near)


def check_tools() -> None:
    """A batch of the host is taken to where the model lies, and a part that was left on the host is named."""
    model, images = network().to(APART), torch.randn(6, 1, 8, 8)
    assert summary(model, images, on="device")[""].flops == summary(model, images)[""].flops > 0
    model[5] = nn.Linear(144, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), console=False)
    try:
        trainer.fit((images, torch.arange(6) % 3), epochs=1, batch_size=3)
    except RuntimeError as error:
        reported = "".join(error.__notes__)
        assert "5.weight was left on the cpu" in reported and "model.to('apart:0') before Trainer(...)" in reported, (
            reported
        )
    else:
        raise AssertionError("a model with a part elsewhere was trained")


if __name__ == "__main__":
    check_device()
    check_runs()
    check_tools()
