"""Drives Accelerate: `save_state` with automatic names ("limit1", "limit2"), or into one folder ("folder")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..task import Task, Tell

LIBRARY = "Accelerate"
WORDS = frozenset({"limit1", "limit2", "folder"})
WARM = ("torch._dynamo", "accelerate")


class Done:
    """The counter of updates, registered for checkpointing as the documentation says."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        """The counter."""
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.updates = state["updates"]


def train(task: Task, directory: Path, tell: Tell, *, words: frozenset[str]) -> None:
    """Train; what is there is loaded by `load_state`, and the epoch gone on with by `skip_first_batches`."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    limit = 1 if "limit1" in words else 2 if "limit2" in words else None
    folder = directory / "state" if "folder" in words else None
    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=folder is None, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    set_seed(task.seed)
    made = task.model()
    loader = DataLoader(TensorDataset(*task.data()), batch_size=task.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(made, task.optimizer(made), loader)
    done = Done()
    accelerator.register_for_checkpointing(done)
    found = checkpoints(directory)
    if found:
        accelerator.load_state(str(folder) if folder else None)
        if folder is None:
            project.iteration = int(found[0].name.rpartition("_")[2]) + 1
    tell.resumed(done.updates, accelerator.unwrap_model(model), optimizer)
    _loop(task, tell, accelerator, (model, optimizer, loader, done, folder))


def _loop(task: Task, tell: Tell, accelerator: Any, bound: Any) -> None:
    model, optimizer, loader, done, folder = bound
    plain = accelerator.unwrap_model(model)
    model.train()
    while done.updates < task.updates:
        skipped = done.updates % task.epoch
        for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            done.updates += 1
            tell.update(done.updates, plain, optimizer)
            if done.updates % task.every == 0:
                accelerator.save_state(*([str(folder)] if folder else []))
                tell.saved(done.updates)
            if done.updates == task.updates:
                break
    tell.ended(done.updates, plain, optimizer)


def checkpoints(directory: Path) -> list[Path]:
    """The folders of states, newest first."""
    if (directory / "state").is_dir():
        return [directory / "state"]
    found = (directory / "checkpoints").glob("checkpoint_*")
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]), reverse=True)
