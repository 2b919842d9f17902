"""Anomaly mode and deterministic algorithms: what they do around a fit, that nothing stays, and who heeds them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Fast, NonFiniteError, Trainer, batches
from trainwright.acceleration.switches import may_time
from trainwright.tools import anomaly, deterministic
from trainwright.tools.debug import WORKSPACE

x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(32) % 3


class Rooted(nn.Module):
    """Its gradient is NaN: the root of zero has an infinite slope, and that times zero is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(inputs)
        return hidden + (hidden * 0).sqrt()  # the line that is looked for


def made(model: nn.Module, **settings: Any) -> Trainer[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def data() -> Any:
    return batches((x, y), 8, shuffle=True, seed=0)


def switches() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    looks = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    return exact, looks, fills, cudnn.deterministic, cudnn.benchmark, os.environ.get(WORKSPACE)


def test_anomaly_names_the_line_of_the_forward_that_a_nan_comes_from() -> None:
    with pytest.raises(NonFiniteError):
        made(Rooted()).fit(data(), epochs=1)
    with (
        pytest.warns(UserWarning, match="(?s)Traceback of forward call.*the line that is looked for"),
        pytest.raises(RuntimeError, match=r"MulBackward0.* returned nan") as error,
        anomaly(),
    ):
        made(Rooted()).fit(data(), epochs=1)
    assert "backward() failed on train batch 1" in error.value.__notes__[0]


def test_without_the_check_of_nan_the_policy_of_the_trainer_holds() -> None:
    with anomaly(check_nan=False), pytest.raises(NonFiniteError):
        made(Rooted()).fit(data(), epochs=1)


@pytest.mark.parametrize("context", [anomaly, deterministic], ids=["anomaly", "deterministic"])
@pytest.mark.parametrize("before", [None, ":16:8", "of mine"])
def test_everything_is_put_back_after_an_error_too(context: Any, before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(WORKSPACE, raising=False)
    else:
        monkeypatch.setenv(WORKSPACE, before)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    kept = switches()
    with pytest.raises(OSError, match="mine"), context():
        assert switches() != kept
        raise OSError("mine")
    assert switches() == kept


def test_contexts_in_contexts_are_left_one_by_one() -> None:
    kept = switches()
    with deterministic(warn_only=True, fill=False):
        outer = switches()
        with deterministic(), anomaly():
            assert switches()[0] == (True, False) and switches()[2]
        assert switches() == outer and outer[0] == (True, True) and not outer[2]
    assert switches() == kept


def test_an_operation_that_cannot_repeat_itself_raises_inside() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.inner(inputs)
            return hidden.put(torch.zeros(1, dtype=torch.long), hidden.sum().reshape(1), accumulate=False)

    made(Pooled()).fit(data(), epochs=1)
    with deterministic(), pytest.raises(RuntimeError, match="does not have a deterministic implementation") as error:
        made(Pooled()).fit(data(), epochs=1)
    assert "failed on train batch 1" in error.value.__notes__[0]


def test_a_cublas_workspace_that_repeats_itself_is_kept_and_any_other_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, inside in ((None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8")):
        monkeypatch.delenv(WORKSPACE, raising=False)
        if before is not None:
            monkeypatch.setenv(WORKSPACE, before)
        with deterministic():
            assert os.environ[WORKSPACE] == inside


def test_the_run_inside_is_the_run_outside() -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        made(model, clip=1.0).fit(data(), data(), epochs=2)
        return list(model.state_dict().values())

    plain = trained()
    with anomaly(), deterministic():
        inside = trained()
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_cudnn_is_not_timed_inside() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    assert may_time(model)
    with deterministic():
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert not may_time(model)


def test_compiled_code_is_named_as_a_whole() -> None:
    fast = Fast(compile={"backend": "aot_eager"})
    with (
        pytest.warns(UserWarning, match="Traceback of forward call"),
        pytest.raises(RuntimeError, match=r"CompiledFunctionBackward.* returned nan"),
        anomaly(),
    ):
        made(Rooted(), fast=fast).fit(data(), epochs=1)
