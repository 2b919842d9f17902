"""Settings and models that cannot be sharded are refused before anything has changed, with what to write instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed.fsdp_cases import CPU, Block, Net, group, net
from distributed.pool import pool
from trainwright import MixedPrecision, SettingError
from trainwright.distributed.fsdp import FSDP, check_optimizers, check_precision, shard


def policy(kind: torch.dtype) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=kind)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"blocks": Block()}, r"FSDP\(blocks=Block\(\.\.\.\)\)(.|\n)*fix   FSDP\(blocks=\{Block\}\)"),
        ({"blocks": {Block()}}, r"FSDP\(blocks=Block\(\.\.\.\)\)(.|\n)*fix   FSDP\(blocks=\{Block\}\)"),
        ({"blocks": "Block"}, "want  a class of modules, or several"),
        ({"blocks": {"Block"}}, "want  a class of modules, or several"),
        ({"blocks": {int}}, "want  a class of modules, or several"),
        ({"blocks": {nn.ModuleList}}, "with the class of its items"),
        ({"blocks": None}, "want  a class of modules, or several"),
        ({"reshard_after_forward": 1}, "at least 2"),
        ({"reshard_after_forward": "yes"}, "at least 2"),
        ({"policy": torch.bfloat16}, "from torch.distributed.fsdp"),
        ({"methods": "encode"}, r"fix   methods=\('encode',\)"),
        ({"methods": (len,)}, "names of methods"),
        ({"methods": 3}, "names of methods"),
        ({"timeout": 0}, r"FSDP\(timeout="),
        ({"backend": 3}, "nccl"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_given(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        FSDP(**{"blocks": {Block}, **settings})


def test_settings_are_kept_as_what_they_mean() -> None:
    settings = FSDP([Block], methods=["encode"], reshard_after_forward=2, policy=policy(torch.bfloat16))
    assert settings.blocks == frozenset({Block}) and settings.methods == ("encode",)
    assert str(settings) == "FSDP(blocks={Block})" and settings.shards


@pytest.mark.slow
def test_the_settings_are_imported_without_torchs_own_module_of_it() -> None:
    code = "import trainwright.distributed.fsdp, sys; trainwright.distributed.fsdp.FSDP(set())"
    code += "; assert not {'torch.distributed.fsdp', 'torch.distributed.tensor'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("kind", "precision", "said"),
    [
        (torch.float16, None, "without a loss scale"),
        (torch.bfloat16, MixedPrecision("fp16"), "name two types"),
        (torch.float16, MixedPrecision("bf16"), "name two types"),
    ],
)
def test_a_policy_that_contradicts_the_precision_is_refused(kind: torch.dtype, precision: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check_precision(FSDP({Block}, policy=policy(kind)), precision)


def test_policies_that_fit_the_precision_are_taken() -> None:
    check_precision(FSDP({Block}), MixedPrecision("fp16"))
    check_precision(FSDP({Block}, policy=policy(torch.bfloat16)), None)
    check_precision(FSDP({Block}, policy=policy(torch.bfloat16)), MixedPrecision("tf32"))
    check_precision(FSDP({Block}, policy=policy(torch.float16)), MixedPrecision("fp16"))


class Other(nn.Module):
    """In no model here."""


def scalar(model: Net) -> None:
    model.scale = nn.Parameter(torch.tensor(1.0))


def strided(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.randn(3, 5).double().T)


def tied(model: Net) -> None:
    model.blocks[1].linear.weight = model.blocks[0].linear.weight


def of_two_types(model: Net) -> None:
    model.head.float()


def lazy(model: Net) -> None:
    model.more = nn.LazyLinear(3)


def on_meta(model: Net) -> None:
    model.more = Bare()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta", dtype=torch.float64))


def unchanged(model: Net) -> None:
    pass


def refused(change: Callable[[Net], None], settings: FSDP) -> str:
    model = net()
    change(model)
    before = list(model.parameters())
    try:
        shard(model, settings, group(), device=CPU)
    except SettingError as error:
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (unchanged, FSDP({Other}), ["the model has no module of this class", "Block, Net, Linear, ModuleList"]),
        (unchanged, FSDP({Block}, reshard_after_forward=3), ["a divisor of 2"]),
        (scalar, FSDP({Block}), ["scale cannot be sharded", "nn.Parameter(torch.ones(1))"]),
        (strided, FSDP({Block}), ["first.weight cannot be sharded", "contiguous_format"]),
        (tied, FSDP({Block}), ["linear.weight is shared by modules that are gathered at different times"]),
        (of_two_types, FSDP({Block}), ["of several types", "torch.float32, torch.float64"]),
        (lazy, FSDP({Block}), ["more.weight cannot be sharded", "run one batch"]),
        (on_meta, FSDP({Block}), ["more (Bare) lies on the meta device", "def reset_parameters(self) in Bare"]),
    ],
)
def test_a_model_that_cannot_be_sharded_is_left_as_it_was(change: Any, settings: FSDP, said: list[str]) -> None:
    for text in pool(2).run(refused, change, settings):
        assert all(part in text for part in said), text


def unknown_method() -> str:
    return refused(unchanged, FSDP({Block}, methods=("encod",)))


def test_a_method_that_no_module_has_is_refused() -> None:
    for text in pool(2).run(unknown_method):
        assert "methods=('encod',)" in text and "Did you mean 'encode'" in text


def optimizers(kind: str) -> str:
    model = net()
    before = torch.optim.AdamW(model.parameters())
    shard(model, FSDP({Block}), group(), device=CPU)
    extra = nn.Parameter(torch.zeros(3))
    made = {
        "before": before,
        "after": torch.optim.AdamW(model.parameters()),
        "loss": torch.optim.SGD([*model.parameters(), extra], lr=0.1),
    }[kind]
    try:
        check_optimizers(model, {"optimizer": made})
    except SettingError as error:
        return str(error)
    return ""


def test_an_optimizer_over_parameters_that_were_replaced_is_refused() -> None:
    for text in pool(2).run(optimizers, "before"):
        assert "the AdamW was built on parameters that FSDP has replaced by shards" in text
        assert "fix   optimizer=lambda model: AdamW(model.parameters(), lr=...)" in text
    for text in pool(2).run(optimizers, "loss"):
        assert "parameters outside the model are trained" in text and "of shape (3,)" in text
    assert pool(2).run(optimizers, "after") == [""] * 2


def two_of_three() -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    model, smaller = net(), net()
    fully_shard(model, mesh=mesh)
    shard(model, FSDP({Block}), group(), device=CPU)  # replicated and sharded: all processes share the data
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "rest"))["rest"]
    fully_shard(smaller, mesh=alone)
    try:
        shard(smaller, FSDP({Block}), group(), device=CPU)
    except SettingError as error:
        return str(error)
    return ""


def test_a_model_that_is_sharded_over_fewer_processes_is_refused() -> None:
    for text in pool(2).run(two_of_three):
        assert "over fewer processes than share the data" in text and "1 of 2" in text
