"""Gradients in shards of several processes: what is not finite on one is reported on all, norms are of the whole."""

from __future__ import annotations

from math import inf, isnan, nan

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import ClipNorm, ClipValue
from trainwright.core import host_reads
from trainwright.modules.dtensors import copy_into, full_tensor, is_sharded, local_shards, on_all_ranks
from trainwright.optim import Gradients

SHAPES = [(5, 2), (1, 3), (4,)]


def spread(*, dtype: torch.dtype = torch.float64, plain: bool = False) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Parameters with gradients, in shards, and the whole gradients; with `plain` one more that all processes have."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    grads = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    parameters = []
    for gradient in grads:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)])
        parameters.append(parameter)
    if plain:
        parameters.append(nn.Parameter(torch.zeros(2, dtype=dtype)))
        parameters[-1].grad = torch.full((2,), 3.0, dtype=dtype)
        grads.append(parameters[-1].grad.clone())
    return parameters, grads


def made(parameters: list[nn.Parameter]) -> Gradients:
    return Gradients(torch.optim.SGD(parameters, lr=0.1))


def flags(element: int, value: float) -> list[float]:
    """The flag after one element of one gradient was spoilt, and after it was lowered."""
    parameters, _ = spread()
    for index, place in enumerate(local_shards([parameters[0].grad])[0].reshape(-1)):
        first = 0 if torch.distributed.get_rank() == 0 else 6
        if first + index == element:
            place.fill_(value)
    gradients = made(parameters)
    reported = float(gradients.multiply_and_check(2.0))
    gradients.lower_flags()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter.grad)
    return [reported, float(gradients.multiply_and_check())]


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("element", [0, 9])
def test_what_is_not_finite_on_one_process_is_reported_on_all(element: int, value: float) -> None:
    assert pool(2).run(flags, element, value) == [[1.0, 0.0]] * 2


def test_finite_gradients_raise_no_flag() -> None:
    assert pool(2).run(flags, -1, nan) == [[0.0, 0.0]] * 2


def multiplied(plain: bool) -> float:
    parameters, grads = spread(plain=plain)
    gradients = made(parameters)
    gradients.multiply(torch.tensor(0.5))
    gradients.multiply_and_check(torch.tensor(3.0))
    found = [full_tensor(parameter.grad) for parameter in parameters]
    gradients.zero()
    assert all(parameter.grad is None for parameter in parameters)
    return max(float((one - 1.5 * other).abs().max()) for one, other in zip(found, grads, strict=True))


@pytest.mark.parametrize("plain", [False, True])
def test_every_shard_is_multiplied_once(plain: bool) -> None:
    assert max(pool(2).run(multiplied, plain)) < 1e-15


def norms(plain: bool, spoilt: bool) -> list[float]:
    parameters, grads = spread(plain=plain)
    if spoilt and torch.distributed.get_rank() == 1:
        local_shards([parameters[0].grad])[0][0, 0] = nan
    gradients = made(parameters)
    found = [float(gradients.norm())]
    for norm_type in (1.0, 3.0, inf):
        norm = gradients.parameters.norm(norm_type)
        assert type(norm) is torch.Tensor and norm.dtype == torch.float64
        found.append(float(norm))
    plain_norms = [float(nn.utils.get_total_norm(grads, norm_type)) for norm_type in (2.0, 1.0, 3.0, inf)]
    return found if spoilt else [one / other for one, other in zip(found, plain_norms, strict=True)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("plain", [False, True])
def test_a_norm_is_that_of_the_whole_gradients(plain: bool, size: int) -> None:
    for found in pool(size).run(norms, plain, False):
        assert found == pytest.approx([1.0] * 4, rel=1e-13)


def test_a_norm_hides_no_nan_of_another_process() -> None:
    for found in pool(2).run(norms, False, True):
        assert all(map(isnan, found))


def without_gradients() -> list[float]:
    parameters, _ = spread()
    for parameter in parameters:
        parameter.grad = None
    gradients = made(parameters)
    gradients.multiply(2.0)
    return [float(gradients.norm()), float(gradients.multiply_and_check(2.0))]


def test_parameters_without_gradients_have_a_norm_of_nothing() -> None:
    assert pool(2).run(without_gradients) == [[0.0, 0.0]] * 2


def wide() -> list[float]:
    """Squares of these float32 elements overflow, their norm does not where each process has a part."""
    parameters, _ = spread(dtype=torch.float32)
    for parameter in parameters:
        local_shards([parameter.grad])[0].zero_()
    local_shards([parameters[2].grad])[0][0] = 1.5e19
    norm = made(parameters).norm()
    return [float(norm) / (1.5e19 * 2**0.5), float(norm.dtype == torch.float32)]


def test_norms_of_processes_are_joined_in_the_widest_type() -> None:
    for ratio, keeps_type in pool(2).run(wide):
        assert ratio == pytest.approx(1.0, rel=1e-6) and keeps_type


def clipped_by_hand() -> list[float]:
    """The slots without a Trainer, on a list of parameters as `model.parameters()` gives them."""
    parameters, grads = spread()
    norm = ClipNorm(0.5)(list(parameters))
    assert type(norm) is torch.Tensor  # whole, and to be read as any other number
    plain = [nn.Parameter(torch.zeros_like(gradient)) for gradient in grads]
    for parameter, gradient in zip(plain, grads, strict=True):
        parameter.grad = gradient
    expected = nn.utils.clip_grad_norm_(plain, 0.5)
    ClipValue(0.1)(list(parameters))
    nn.utils.clip_grad_value_(plain, 0.1)
    found = [float((full_tensor(p.grad) - q.grad).abs().max()) for p, q in zip(parameters, plain, strict=True)]
    return [host_reads.read([norm])[0] - float(expected), *found]


def test_the_slots_clip_shards_without_a_trainer() -> None:
    exact = 1e-13 if torch.__version__ >= "2.13" else 1e-7  # 2.8: torch multiplies shards by a float32 number
    for found in pool(2).run(clipped_by_hand):
        assert max(map(abs, found)) < exact


def helpers() -> list[bool]:
    parameters, grads = spread()
    rank, parameter = torch.distributed.get_rank(), parameters[0]
    version = parameter._version
    with torch.no_grad():
        copy_into(parameter, grads[0])
    return [
        torch.equal(full_tensor(parameter), grads[0]),
        parameter._version > version,
        is_sharded(parameter) and not is_sharded(grads[0]),
        full_tensor(grads[0]) is grads[0],
        on_all_ranks(True, [parameter]),
        not on_all_ranks(rank == 0, [parameter]),
        on_all_ranks(rank == 0, [grads[0]]) is (rank == 0),  # of plain tensors each process says its own
    ]


def test_whole_values_are_put_into_shards_and_claims_hold_on_all() -> None:
    assert pool(2).run(helpers) == [[True] * 7] * 2
