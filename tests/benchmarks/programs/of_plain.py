"""The plain loop, as torch's own tutorials and notes write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from programs import common

PACKAGE = None
SCRIPT_IMPORTS = "pass"


def killed(folder: Path, every: int | None, log: common.Log) -> None:
    """Tutorial "Saving and loading a general checkpoint": model, optimizer and epoch, by `torch.save` in one file."""
    assert every is None, "the tutorial saves the epoch"
    torch.manual_seed(common.SEED)
    model = common.noisy_model()
    optimizer, begun, path = common.adam(model), 0, folder / "checkpoint.tar"
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        begun = checkpoint["epoch"] + 1
    folder.mkdir(exist_ok=True)
    model.train()
    loader = common.loader(common.killed_data(), common.SIZE, shuffle=True)
    for epoch in range(begun, common.EPOCHS):
        log.epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
                "loss": loss,
            },
            path,
        )
    log.ended(model)


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, accumulate: int) -> None:
    """Torch's note on automatic mixed precision, "Gradient accumulation", without the scaler."""
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def window() -> dict[str, nn.Module]:
    """Three micro-batches per update, the last window of two."""
    model = common.digits_model().double()
    accumulated(model, common.sgd(model), common.loader(common.exact_digits()), common.ACCUMULATE_ROWS)
    return {"default": model}


def tokens() -> dict[str, nn.Module]:
    """Four micro-batches per update, with unequal numbers of tokens; cross entropy ignores targets of -100."""
    model = common.tagger()
    accumulated(model, common.sgd(model, 1.0), common.loader(common.sentences(), 8), common.ACCUMULATE_TOKENS)
    return {"default": model}


def validation() -> dict[str, dict[str, float]]:
    """`DistributedSampler` for the data, sums over the ranks by `all_reduce`."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Subset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    model, data = nn.parallel.DistributedDataParallel(common.trained_digits()).eval(), common.digits()[1]

    def summed(loader: DataLoader[Any]) -> torch.Tensor:
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for x, y in loader:
                output = model(x)
                loss = nn.functional.cross_entropy(output, y, reduction="sum")
                sums += torch.tensor([loss.item(), (output.argmax(1) == y).sum().item(), len(y)])
        return sums

    def numbers(sums: torch.Tensor) -> dict[str, float]:
        return {"loss": (sums[0] / sums[2]).item(), "accuracy": (sums[1] / sums[2]).item()}

    padded = summed(DataLoader(data, 32, sampler=DistributedSampler(data, shuffle=False)))
    dist.all_reduce(padded)
    even = DistributedSampler(data, shuffle=False, drop_last=True)
    exact = summed(DataLoader(data, 32, sampler=even))
    dist.all_reduce(exact)
    rest = range(len(even) * dist.get_world_size(), len(data))
    exact += summed(DataLoader(Subset(data, rest), 32))
    dist.destroy_process_group()
    return {"default": numbers(padded), "with a second pass": numbers(exact)}


def nan() -> dict[str, Any]:
    """One epoch with a NaN in one batch."""
    model, found = common.digits_model(), dict[str, Any]()
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        for x, y in common.loader(common.with_a_nan()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return found


def monitor() -> dict[str, Any]:
    """Early stopping by hand; the name is looked up after each epoch's validation."""
    model, found = common.digits_model(), dict[str, Any]()
    train, held_out = (common.loader(data) for data in common.digits())
    optimizer = common.adam(model)
    watched = common.Watched(model, optimizer)
    with watched.outcome(found):
        best, waited = 0.0, 0
        for _ in range(3):
            for x, y in train:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                right = sum((model(x).argmax(1) == y).sum().item() for x, y in held_out)
            numbers = {"val_accuracy": right / 397}
            best, waited = max(best, numbers[common.MONITOR]), waited + (numbers[common.MONITOR] <= best)
            if waited == 3:
                break
    return found | {"note": "user's code"}
