"""Several networks in one model under FSDP, as of a GAN: what gathers their weights, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.fsdp_cases import CPU, group
from distributed.pool import pool
from trainwright import SettingError, Trainer, Window, batches
from trainwright.distributed.fsdp import FSDP, shard


class Generator(nn.Sequential):
    """Makes rows of four numbers of two."""


class Discriminator(nn.Sequential):
    """Judges rows of four numbers."""


class Nets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.G, self.D = networks()


def networks() -> tuple[Generator, Discriminator]:
    torch.manual_seed(0)
    made = Generator(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)), Discriminator(nn.Linear(4, 8), nn.Linear(8, 1))
    return made[0].double(), made[1].double()


def kept_apart(kind: str) -> nn.Module:
    G, D = networks()
    if kind == "dict":
        return nn.ModuleDict({"G": G, "D": D})
    return nn.ModuleList([G, D]) if kind == "list" else Nets()


def refused(kind: str, blocks: set[type[nn.Module]]) -> str:
    with pytest.raises(SettingError) as raised:
        shard(kept_apart(kind), FSDP(blocks), group(), device=CPU)
    return str(raised.value)


class Gan(Trainer[Nets]):
    def update(self, window: Window) -> Any:
        [batch] = list(window)
        real, noise = batch[0], batch[0][:, :2]
        self.minimize(self.model.D(self.model.G(noise).detach()).mean() - self.model.D(real).mean(), "D")
        self.minimize(-self.model.D(self.model.G(noise)).mean(), "G")


def trained(parallel: Any) -> list[list[float]]:
    optimizers: Any = {name: adam(name) for name in ("G", "D")}
    trainer = Gan(Nets(), optimizers, parallel=parallel, console=False)
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = trainer.fit(batches((rows,), 8), epochs=2)
    return [[row["loss_D"], row["loss_G"]] for row in result.history]


def adam(name: str) -> Any:
    return lambda model: torch.optim.Adam(getattr(model, name).parameters())


@pytest.mark.parametrize("blocks", [set(), {Generator, Discriminator}], ids=["no blocks", "blocks"])
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_container_of_networks_is_refused_with_what_to_write(kind: str, blocks: Any) -> None:
    for text in pool(2).run(refused, kind, blocks):
        assert text.startswith(f"the model is a Module{kind.title()}, which has no forward that gathers weights")
        assert "G: Generator, D: Discriminator" in text or kind == "list"
        assert "fix   class Nets(nn.Module) with self.G = ..., and FSDP(blocks={Generator, Discriminator})" in text


def test_networks_outside_of_all_blocks_that_nothing_gathers_are_refused() -> None:
    for text in pool(2).run(refused, "module", {Generator}):
        assert text.startswith("the Nets has no forward, so that nothing gathers weights which lie in no block\n")
        assert "have  4 parameters outside of all blocks, such as D.0.weight" in text


def test_networks_that_are_blocks_train_as_on_one_process() -> None:
    alone = trained(None)
    for found in pool(2).run(trained, FSDP({Generator, Discriminator})):
        for row, expected in zip(found, alone, strict=True):
            assert row == pytest.approx(expected, abs=1e-12)
