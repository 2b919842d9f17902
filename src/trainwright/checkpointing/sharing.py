"""This process's part in checkpoints that all processes write: its pieces, their copies, and its thread."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from trainwright.checkpointing import commits
from trainwright.checkpointing.background import Background
from trainwright.checkpointing.checksums import Checksum
from trainwright.checkpointing.files import Content
from trainwright.checkpointing.manager import Shared
from trainwright.checkpointing.rank0 import here
from trainwright.checkpointing.sharded_save import HURRY, Contribution, Joining, Meeting, Patience, shard_file
from trainwright.checkpointing.staging import Arena, needs
from trainwright.checkpointing.tensorfile import Contents
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.distributed.resharding import Split
    from trainwright.distributed.world import World


class Sharing:
    """How one process takes part: the first hands its pieces to the keeper that commits, each other writes its own.

    The directory where they meet has a name that follows from a token and from how many saves there have been, which
    all know: so nothing is asked of another process.
    """

    def __init__(self, world: World, *, checksum: Checksum) -> None:
        self.world = world
        self._checksum: Checksum = checksum
        self._token, self._saves = (0, ""), 0
        self._patience = Patience()
        self._arena = Arena()
        self._background: Background[None] | None = None

    def begin(self, token: tuple[int, str]) -> None:
        """Begin with the token that all processes have."""
        self._token, self._saves = token, 0
        if not self.world.is_main:
            self._background = Background("trainwright shards")

    def split(self, tree: Mapping[str, Tree]) -> Split:
        """The tree without its sharded tensors, and this process's pieces of them. CheckpointError as `encode`."""
        from trainwright.distributed.resharding import split

        return split(tree, file=shard_file(self.world.rank))

    def files(self, parts: Split) -> dict[str, Content]:
        """The file that this process writes; nothing is copied."""
        return {shard_file(self.world.rank): Contents(parts.tensors, {})}

    def lead(self, parts: Split, update: int) -> Shared:
        """What the keeper of the first process needs."""
        return Shared(self.files(parts), Joining(self._meet(update), parts.wholes, self._checksum))

    def contribute(self, parts: Split, update: int, *, directory: Path, copies: bool) -> None:
        """Have this process's pieces written by its thread; with `copies` they may be changed when this returns.

        Else, and where there is no memory for copies, `wait` before that. The last save must be known to be over.
        """
        background = self._background
        assert background is not None, "begin() comes first"
        background.wait()
        background.done()
        files = self.files(parts)
        copied = self._copied(files) if copies else None
        contents = (copied or files)[shard_file(self.world.rank)]
        assert isinstance(contents, Contents)
        background.hand(Contribution(self._meet(update), directory, contents, parts.wholes, self._checksum))
        if copies and copied is None:
            self.wait()
        elif self._arena.wanted > self._arena.size:
            background.prepare(partial(_reserve, self._arena, needs(files)))

    def expect(self, parts: Split) -> None:
        """Have room made for a copy of pieces like these."""
        if self._background is not None:
            self._background.prepare(partial(_reserve, self._arena, needs(self.files(parts))))

    def wait(self) -> None:
        """Wait until this process has written its part, or has failed to."""
        if self._background is not None:
            self._background.wait()

    def settle(self) -> None:
        """Have nobody wait any longer: what came of the save is known."""
        self._patience.seconds = 0.0

    def hurry(self) -> None:
        """Have others be waited for only as long as they are seen to write: the run ends in an error."""
        self._patience.seconds = min(self._patience.seconds, HURRY)

    def close(self, *, wait: bool) -> None:
        """End the thread, after what is in flight; without `wait` it ends by itself."""
        background, self._background = self._background, None
        if background is not None:
            background.close(self._arena.free, wait=wait)

    def _meet(self, update: int) -> Meeting:
        """Where the save of an update is written; a name that no other save of this run has."""
        self._saves += 1
        pid, secret = self._token
        token = f"{(int(secret, 16) + self._saves) % (1 << 32):08x}"
        self._patience = Patience()
        name = commits.temporary_name(update, pid=pid, token=token)
        return Meeting(name, self.world.rank, self.world.size, self._patience)

    def _copied(self, files: dict[str, Content]) -> dict[str, Content] | None:
        try:
            return self._arena.copy(files)
        except OSError as error:
            size = needs(files)[0] / 2**30
            what = f"{here(self.world)} has no memory for a copy of its part of the state ({size:.1f} GiB"
            warn(f"{what}: {error.strerror}): training waits while it is written", stacklevel=4)
            return None


def new_token(pid: int) -> tuple[int, str]:
    """What the names of temporary directories are made of, for the first process to tell the others."""
    return pid, secrets.token_hex(4)


def _reserve(arena: Arena, needed: tuple[int, Any]) -> None:
    with suppress(OSError):  # what the system has no room for is said when it is needed
        arena.reserve(*needed)
