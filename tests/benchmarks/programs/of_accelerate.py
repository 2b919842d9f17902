"""Accelerate, as its guides write it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from programs import common

PACKAGE = "accelerate"
SCRIPT_IMPORTS = "from accelerate import Accelerator"


def killed(folder: Path, every: int | None, log: common.Log) -> None:
    """The example "checkpointing": `save_state` into `epoch_n` or `step_n`, `load_state`, `skip_first_batches`."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(common.SEED)
    original = common.noisy_model()
    loader = common.loader(common.killed_data(), common.SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(original, common.adam(original), loader)
    begun, skipped, steps = 0, 0, 0
    found = common.folders(folder, "*_*")
    if found:
        accelerator.load_state(str(found[-1]))
        kind, _, number = found[-1].name.rpartition("_")
        if kind == "epoch":
            begun = int(number) + 1
        else:
            steps = int(number)
            begun, skipped = divmod(steps, len(loader))
    for epoch in range(begun, common.EPOCHS):
        log.epoch(epoch)
        model.train()
        for x, y in accelerator.skip_first_batches(loader, skipped) if epoch == begun and skipped else loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if every is not None and steps % every == 0:
                accelerator.save_state(str(folder / f"step_{steps}"))
        if every is None:
            accelerator.save_state(str(folder / f"epoch_{epoch}"))
    log.ended(original)


def accumulated(model: nn.Module, optimizer: Any, loader: Any, accumulate: int) -> None:
    """The guide "Performing gradient accumulation"."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(prepared):
            loss = nn.functional.cross_entropy(prepared(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def weighed(model: nn.Module, optimizer: Any, loader: Any, accumulate: int) -> None:
    """The guide's section "Gradient accumulation on training samples of variable size", by the user's own loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, rest = iter(loader), len(loader)
    for _ in range(math.ceil(rest / accumulate)):
        taken = [next(batches) for _ in range(min(accumulate, rest))]
        rest -= len(taken)
        items = accelerator.gather(sum((y != -100).sum() for _, y in taken)).sum().item()
        for x, y in taken:
            loss = nn.functional.cross_entropy(prepared(x), y, reduction="sum")
            accelerator.backward(loss * accumulate * accelerator.num_processes / items)
        optimizer.step()
        optimizer.zero_grad()


BY_HAND = "with 10 more lines of its guide"


def window() -> dict[str, nn.Module]:
    """Three micro-batches per update, the last window of two."""
    found = {}
    for name, train in (("default", accumulated), (BY_HAND, weighed)):
        found[name] = model = common.digits_model().double()
        train(model, common.sgd(model), common.loader(common.exact_digits()), common.ACCUMULATE_ROWS)
    return found


def tokens() -> dict[str, nn.Module]:
    """Four micro-batches per update, with unequal numbers of tokens."""
    found = {}
    for name, train in (("default", accumulated), (BY_HAND, weighed)):
        found[name] = model = common.tagger()
        train(model, common.sgd(model, 1.0), common.loader(common.sentences(), 8), common.ACCUMULATE_TOKENS)
    return found


def validation() -> dict[str, dict[str, float]]:
    """The example "multi_process_metrics": `gather_for_metrics`; the loss as in `run_clm_no_trainer.py`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(common.trained_digits(), common.loader(common.digits()[1]))
    model.eval()
    guesses, targets, losses = [], [], []
    for x, y in loader:
        with torch.no_grad():
            output = model(x)
        guess, target = accelerator.gather_for_metrics((output.argmax(1), y))
        guesses.append(guess)
        targets.append(target)
        loss = nn.functional.cross_entropy(output, y)
        losses.append(accelerator.gather_for_metrics(loss.repeat(32)))
    right = torch.cat(guesses) == torch.cat(targets)
    numbers = {"loss": torch.cat(losses).mean().item(), "accuracy": right.double().mean().item()}
    accelerator.end_training()
    return {"default": numbers}


def nan() -> dict[str, Any]:
    """One epoch with a NaN in one batch."""
    from accelerate import Accelerator

    original, found = common.digits_model(), dict[str, Any]()
    accelerator, own = Accelerator(cpu=True), common.adam(original)
    watched = common.Watched(original, own)
    model, optimizer, loader = accelerator.prepare(original, own, common.loader(common.with_a_nan()))
    with watched.outcome(found):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return found


def monitor() -> dict[str, Any]:
    """Early stopping is not offered: no class or function of the package bears its name."""
    import accelerate

    root = Path(accelerate.__file__).parent
    named = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if "test_utils" not in path.parts
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("class ", "def ")) and ("early" in line.lower() or "monitor" in line.lower())
    ]
    return {"offered": bool(named), "classes_and_functions_named_early_or_monitor": named}
