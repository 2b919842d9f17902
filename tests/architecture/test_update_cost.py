"""What one update costs in frames and Python calls, counted, so that it holds on any machine."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright
from trainwright import Observer, Trainer

PACKAGE = str(Path(trainwright.__file__).parent)
MOST_FRAMES, MOST_EXTRA_CALLS, MOST_OWN_CALLS = 3, 25, 30
Batches = list[tuple[Tensor, Tensor]]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def ready(batches: int) -> Batches:
    return [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(batches)]


def plain(data: Batches) -> Counter[str]:
    """Calls of the loop of the textbooks."""
    model, optimizer = model_and_optimizer()
    criterion = nn.CrossEntropyLoss()

    def loop() -> None:
        for inputs, target in data:
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            optimizer.step()

    return calls(loop)


def trained(data: Batches, **settings: Any) -> Counter[str]:
    """Calls of a `fit` with the default settings and these."""
    trainer = Trainer(*model_and_optimizer(), nn.CrossEntropyLoss(), console=False, **settings)
    return calls(lambda: trainer.fit(data, epochs=1))


def calls(function: Callable[[], Any]) -> Counter[str]:
    """Python functions called while `function` runs, by file and name; none by the garbage that others have left."""
    counted: Counter[str] = Counter()
    gc.collect()
    gc.disable()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counted[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return counted


def per_update(run: Callable[[Batches], Counter[str]]) -> Counter[str]:
    """Calls that one more update costs; what a run costs once cancels out."""
    run(ready(2))  # what torch and Python do at first use is done
    few, many = run(ready(10)), run(ready(20))
    return Counter({name: n for name in many if (n := (many[name] - few[name]) / 10)})


def test_three_frames_lie_between_fit_and_the_training_step() -> None:
    seen: list[list[str]] = []

    class Looking(Trainer[nn.Module]):
        def training_step(self, batch: Any) -> Tensor:
            names, frame = [], inspect.currentframe()
            while frame is not None and "fit" not in names:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            seen.append(names)
            inputs, target = batch
            return nn.functional.cross_entropy(self.model(inputs), target)

    Looking(*model_and_optimizer(), console=False, precision="bf16").fit(ready(3), epochs=1)
    assert seen == [["training_step", "compute_gradients", "update", "fit"]] * 3
    assert len(seen[0]) - 1 <= MOST_FRAMES


def test_an_update_calls_few_python_functions_more_than_the_plain_loop() -> None:
    loop, fit = per_update(plain), per_update(trained)
    assert fit.total() - loop.total() <= MOST_EXTRA_CALLS, (fit - loop).most_common()
    own = Counter({name: n for name, n in fit.items() if name.startswith(PACKAGE)})
    assert 0 < own.total() <= MOST_OWN_CALLS, own.most_common()


@pytest.mark.slow
def test_ten_idle_observers_add_no_call() -> None:
    class Idle(Observer):
        """Watches nothing."""

    def watched(data: Batches) -> Counter[str]:
        return trained(data, observers=[Idle() for _ in range(10)])

    assert per_update(watched) == per_update(trained)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [26, 40])
def test_a_call_too_many_would_be_counted(extra: int) -> None:
    def burdened(data: Batches) -> Counter[str]:
        class Burdened(Trainer[nn.Module]):
            def training_step(self, batch: Any) -> Any:
                for _ in range(extra):
                    nothing()
                return super().training_step(batch)

        trainer = Burdened(*model_and_optimizer(), nn.CrossEntropyLoss(), console=False)
        return calls(lambda: trainer.fit(data, epochs=1))

    assert per_update(burdened).total() >= per_update(trained).total() + extra


def nothing() -> None:
    """Cost one call."""
