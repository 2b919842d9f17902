"""What `as_world` refuses where there are several processes: on all of them, with the same words, without a wait."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from distributed.pool import Pool
from trainwright import DDP
from trainwright.core.errors import DistributedError, SettingError
from trainwright.distributed.launch import launch
from trainwright.distributed.start import as_world


def refused(device_type: str, backend: str | None, stated: str | None) -> str:
    if stated is not None:
        os.environ["WORLD_SIZE"] = stated
    try:
        as_world(DDP(timeout=60, backend=backend), device_type)
    except SettingError as error:
        return str(error)
    finally:
        os.environ.pop("WORLD_SIZE", None)
    return ""


def settings_share_a_group() -> list[float]:
    worlds = [as_world("auto"), as_world(DDP(timeout=7)), as_world("auto")]
    assert worlds[0] is worlds[2] and worlds[0].size == dist.get_world_size()
    return [world.timeout for world in worlds]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("cpu", None, "3"), "the initialized process group has 2 processes, and WORLD_SIZE is 3\n"),
        (("xpu", None, None), "the initialized process group carries no tensors of xpu\n  have  .*cpu:gloo"),
        (("cpu", "mpi", None), "backend='mpi', and the initialized process group is of another one\n  have  .*gloo"),
    ],
)
def test_an_initialized_group_that_does_not_fit_is_refused_on_all(ranks2: Pool, given, text) -> None:
    first, second = ranks2.run(refused, *given)
    assert first == second
    with pytest.raises(SettingError, match=text):
        raise SettingError(first)


def test_trainers_of_a_process_share_the_group_and_keep_their_settings(ranks2: Pool) -> None:
    assert ranks2.run(settings_share_a_group) == [[300.0, 7, 300.0]] * 2


def test_a_wrong_setting_on_one_rank_is_refused_on_all() -> None:
    """The others would wait for one that has given up."""

    def main() -> str:
        missing = "mpi" if os.environ["RANK"] == "1" else None
        with pytest.raises(SettingError) as raised:
            as_world(DDP(timeout=20, backend=missing))
        return str(raised.value)

    text = launch(main, processes=2, timeout=30)
    assert "rank 1 on " in text
    assert "this torch has no backend 'mpi' for several processes on cpu\n  have  torch" in text


def test_a_rank_that_ends_before_the_rendezvous_is_reported_as_missing() -> None:
    def main() -> str:
        if os.environ["RANK"] == "1":
            return ""
        with pytest.raises(DistributedError) as raised:
            as_world(DDP(timeout=1))
        return str(raised.value)

    text = launch(main, processes=2, timeout=30)
    assert text.startswith("rank 0: not all of the 2 processes have connected to 127.0.0.1:")
    assert "rank 1 has not joined within 1 s" in text


@pytest.mark.gpu
def test_two_ranks_on_one_device_are_refused() -> None:
    if torch.cuda.device_count() != 1:
        pytest.skip("for one device")
    with pytest.raises(DistributedError, match=r"ranks 0 and 1 on .* would both use the device"):
        launch(as_world, "auto", "cuda", processes=2, timeout=60)


@pytest.mark.gpu
def test_a_copy_is_refused_where_cuda_is_in_use() -> None:
    torch.zeros(1, device="cuda")
    with pytest.raises(SettingError, match="CUDA is in use here already"):
        launch(lambda: None, processes=2)
