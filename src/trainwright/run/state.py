"""The parts of a run as one tree: gathered for a checkpoint, and given back strictly both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.base.contracts import Part, Tree
from trainwright.base.errors import CheckpointError, DataError, listed, message
from trainwright.runtime.device import keep_dtypes
from trainwright.runtime.randomness import random_state, set_random_state


class Random:
    """Part `random`: the states at the start of the epoch in hand, and at the boundary where it was saved."""

    def __init__(self) -> None:
        self.epoch_start: dict[str, Any] = {}
        """Empty until the iterator of the epoch in hand is about to be made: a run may stop before."""
        self.loaded: dict[str, Any] | None = None
        """The state of the boundary, until it has been put back."""
        self.stands = False
        """Whether the process draws from there already, though the iterator of the epoch is still to be made."""
        self.kept: dict[str, Any] | None = None
        """The state before the window in hand was fetched, where a run can end inside one."""
        self.uses_kept = False
        """Whether that is the state of the boundary: the run has ended inside a window."""

    def state_dict(self) -> Tree:
        """Both states."""
        kept = self.kept if self.uses_kept else None if self.stands else self.loaded
        return {"epoch_start": self.epoch_start, "now": random_state() if kept is None else kept}

    def load_state_dict(self, tree: Tree) -> None:
        """Keep both states; the iterator of the epoch is made between setting the one and the other."""
        self.epoch_start, self.loaded = tree["epoch_start"], tree["now"]

    def stand(self) -> None:
        """Have the process draw what followed the boundary, for a pause that comes before the epoch goes on."""
        if self.loaded is not None:
            set_random_state(self.loaded)
            self.stands = True

    def put_back(self) -> None:
        """Have the process draw what followed the boundary; for one between two epochs, or where nothing is left."""
        if self.loaded is not None:
            set_random_state(self.loaded)
            self.epoch_start, self.loaded = {}, None


class Held:
    """A part made of two functions, for state that no object of its own holds."""

    def __init__(self, give: Callable[[], Tree], take: Callable[[Tree], None]) -> None:
        self.state_dict = give
        self.load_state_dict = take


def gather(parts: Mapping[str, Part]) -> dict[str, Tree]:
    """Collect every part's state."""
    return {name: part.state_dict() for name, part in parts.items()}


def restore(parts: Mapping[str, Part], tree: Mapping[str, Tree], *, origin: str) -> list[str]:
    """Give every part its state, model first and random last; strict both ways. Returns what the parts report.

    Raises CheckpointError where a part is missing, not used, or of another form.
    """
    missing, unused = sorted(set(parts) - set(tree)), sorted(set(tree) - set(parts))
    if missing or unused:
        raise CheckpointError(
            message(
                f"{origin} does not fit this Trainer",
                have=f"missing {missing}, not used {unused}",
                want=f"the parts {sorted(parts)}",
                fix="build the Trainer as when it was saved",
                where=False,
            )
        )
    reports = []
    for name in sorted(parts, key=lambda name: (name != "model", name == "random")):
        part = parts[name]
        if isinstance(part, nn.Module):
            _check_tensors(name, part, tree[name], origin=origin)
        try:
            said = part.load_state_dict(tree[name])
        except DataError:
            raise  # it says what differs, and what to do
        except (KeyError, ValueError) as error:
            raise CheckpointError(message(f"{origin}: part {name!r} cannot be loaded: {error}", where=False)) from error
        if name == "optimizer" and _are_of_their_dtypes(parts, tree):
            for optimizer, saved in _optimizers(part, tree[name]):
                keep_dtypes(optimizer, saved)
        if isinstance(said, str):
            reports.append(said)
    return reports


def _are_of_their_dtypes(parts: Mapping[str, Part], tree: Mapping[str, Tree]) -> bool:
    """Whether all weights have the dtypes that they were saved with."""
    roots = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    named = [(tree[name].get(key), own) for name, root in roots.items() for key, own in root.named_parameters()]
    return all(saved.dtype == own.dtype for saved, own in named if isinstance(saved, Tensor))


def _optimizers(part: Any, tree: Any) -> Iterator[tuple[Optimizer, Mapping[str, Any]]]:
    """The optimizers of a part, each with what was saved of it."""
    if isinstance(part, Optimizer):
        yield part, tree
    for name, one in getattr(part, "parts", {}).items():
        yield from _optimizers(one, tree[name])


def _check_tensors(name: str, module: nn.Module, saved: Mapping[str, Any], *, origin: str) -> None:
    own = module.state_dict()
    wrong = [
        f"{key} checkpoint {tuple(saved[key].shape)} model {tuple(value.shape)}"
        for key, value in own.items()
        if key in saved and hasattr(value, "shape") and saved[key].shape != value.shape
    ]
    missing, unexpected = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    found = {"of another shape": wrong, "missing in the checkpoint": missing, f"not in the {name}": unexpected}
    if wrong or missing or unexpected:
        raise CheckpointError(
            message(
                f"{origin} is from another {name}: {len(wrong)} tensors differ in shape, "
                f"{len(missing)} are missing, {len(unexpected)} are not in the model",
                have="; ".join(f"{what}: {listed(keys, 5)}" for what, keys in found.items() if keys),
                want="the model as it was saved",
                fix=f"build the {name} as when it was saved, or leave resume out and give Checkpoint() a new directory",
            )
        )
