"""The settings of the checkpoint slot: directory, frequency, retention, and the number that ranks checkpoints."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainwright.checkpointing.files import Checksum
from trainwright.core.checks import check_flag, check_number, check_whole, local_path
from trainwright.core.durations import Duration, Epochs, Seconds, Updates
from trainwright.core.errors import SettingError
from trainwright.core.monitor import Mode, resolve_mode
from trainwright.core.suggestions import suggests

if TYPE_CHECKING:
    from trainwright.checkpointing.manager import CheckpointManager
    from trainwright.distributed.world import World


@suggests
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save checkpoints of a run into a directory; retain the last `keep` and the `top` best of them.

    If the system refuses a save (full disk, quota, input/output error), the run continues and the next save tries
    again. The save at the end must succeed, else `fit` raises. To customize: subclass it, and return a subclass of
    `CheckpointManager` from `bind`.

    Args:
        directory: The directory of the run.
        best: The number that ranks checkpoints, such as "val_accuracy".
        mode: "min" or "max". Optional for names that end in "loss": the default is "min".
        top: Number of best checkpoints to retain.
        keep: Number of last checkpoints to retain; "all" retains every checkpoint.
        every: A duration between saves. "auto": save at each validation; without validation data at each epoch.
        restore_best: Load the best weights into the model when `fit` ends.
        trainable_only: Leave out frozen weights that are in no optimizer, for adapters on a large model.
        async_save: Copy the state, and write it in a thread while training continues. False: training waits.
        on_save_error: "warn" of a refused save and continue, or "raise" and end the run.
        checksum: "crc32", or "sha256", which is slower and detects every accidental change. Neither protects against
            intentional changes: checksums are stored next to the files.
        grace: Seconds after a signal for the update in progress to end.
    """

    directory: str | Path
    _: KW_ONLY
    best: str | None = None
    mode: Mode | None = None
    top: int = 1
    keep: int | Literal["all"] = 3
    every: Duration | Literal["auto"] = "auto"
    restore_best: bool = False
    trainable_only: bool = False
    async_save: bool = True
    on_save_error: Literal["warn", "raise"] = "warn"
    checksum: Checksum = "crc32"
    grace: float = 20.0

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | PathLike) or not str(self.directory):
            raise SettingError(f"Checkpoint({self.directory!r})", want="a directory", fix='Checkpoint("runs/1")')
        local_path(self.directory, "Checkpoint({})")
        check_whole(self.top, f"Checkpoint(top={self.top!r})")
        if self.keep != "all":
            fix = 'keep="all"' if self.keep is None or self.keep in (0, -1) else ""
            check_whole(self.keep, f"Checkpoint(keep={self.keep!r})", what='"all", or a whole number', fix=fix)
        if self.every != "auto" and not isinstance(self.every, Updates | Epochs | Seconds):
            want = 'Updates(n), Epochs(n), Seconds(n) or "auto"'
            n = self.every if type(self.every) is int and self.every > 0 else 500
            raise SettingError(f"Checkpoint(every={self.every!r})", want=want, fix=f"every=Updates({n})")
        self._check_best()
        self._check_saving()

    def _check_best(self) -> None:
        if self.best is not None:
            mode = resolve_mode(self.best, self.mode, "Checkpoint(..., best={!r}, mode={!r})")
            object.__setattr__(self, "mode", mode)
            return
        if self.mode not in (None, *get_args(Mode)):
            raise SettingError(f"Checkpoint(mode={self.mode!r})", want='mode="min" or mode="max"')
        needs_best: dict[str, Any] = {}
        if self.mode is not None:
            needs_best["mode"] = self.mode
        if self.top > 1:
            needs_best["top"] = self.top
        if self.restore_best:
            needs_best["restore_best"] = self.restore_best
        for name, value in needs_best.items():
            have = f"Checkpoint({name}={value!r}) without best"
            raise SettingError(have, want="the number that ranks checkpoints", fix='best="val_loss"')

    def _check_saving(self) -> None:
        check_flag(self.restore_best, f"Checkpoint(restore_best={self.restore_best!r})")
        check_flag(self.trainable_only, f"Checkpoint(trainable_only={self.trainable_only!r})")
        check_flag(self.async_save, f"Checkpoint(async_save={self.async_save!r})")
        _check_choice("on_save_error", self.on_save_error, ("warn", "raise"))
        _check_choice("checksum", self.checksum, get_args(Checksum))
        what = "seconds that a signal waits for the end of the update under way, a number"
        check_number(self.grace, f"Checkpoint(grace={self.grace!r})", least=0, what=what, fix="grace=20")

    def bind(self, run_id: str, *, world: World | None = None) -> CheckpointManager:
        """Return the checkpoint manager of one run. It writes nothing before its `prepare`.

        `world`: the ranks of the run. Each rank binds a manager and makes the same calls in the same order.
        """
        from trainwright.distributed.world import ProcessGroupWorld

        if isinstance(world, ProcessGroupWorld):
            from trainwright.checkpointing.coordinator import DistributedCheckpointManager

            return DistributedCheckpointManager(self, run_id, world=world)
        from trainwright.checkpointing.manager import CheckpointManager  # with its thread: not for settings alone

        return CheckpointManager(self, run_id)


def _check_choice(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        want = " or ".join(f'"{value}"' for value in known)
        raise SettingError(f"Checkpoint({name}={given!r})", want=want, fix=f'{name}="{known[0]}"')
