"""All contestants, those of the targets next to what they are measured against."""

from __future__ import annotations

from contestants import hugging_face, ignite_skorch, keras_torch, lightning_family, loops, ours
from contestants.entry import Contestant

CONTESTANTS: list[Contestant] = [
    *loops.CONTESTANTS,
    *ours.CONTESTANTS,
    *ignite_skorch.CONTESTANTS,
    *lightning_family.CONTESTANTS,
    *hugging_face.CONTESTANTS,
    *keras_torch.CONTESTANTS,
]
BY_NAME = {one.name: one for one in CONTESTANTS}
