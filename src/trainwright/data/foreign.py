"""A user's own `DataLoader`, iterated exactly as the plain loop does, its random draws included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainwright.base.errors import DataError, message
from trainwright.data.position import Generators, length_of, opened, tell_epoch
from trainwright.runtime.randomness import unmoved


class LoaderBatches:
    """The batches of a `DataLoader`; raises DataError where it has none."""

    repeatable = True
    draws_global_rng = True
    _tells_epoch = True
    """Whether data set and sampler hear which epoch it is."""
    _keeps_workers: bool | None = None
    """Whether passes beside training use the loader's persistent workers; None: unless these are under way."""

    def __init__(self, loader: DataLoader[Any], role: str) -> None:
        self._loader = loader
        self._passes = 0
        self._resumed = False
        self._role = role
        sampler, batch_sampler = loader.sampler, loader.batch_sampler
        self._tellable = (sampler, batch_sampler, getattr(batch_sampler, "sampler", None), loader.dataset)
        self._generators = Generators(
            {
                "loader": loader,
                "sampler": sampler,
                "batch_sampler": batch_sampler,
                "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
            }
        )
        self.length = length_of(loader)
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        dealt = self._dealt()
        short = dealt % self.batch_size if dealt and self.batch_size and self._drops_last else 0
        self.rows = None if dealt is None else dealt - short
        if self.length == 0:
            raise self._no_batches()

    def describe(self) -> str:
        """Rows, batch size and workers."""
        rows = "" if self.rows is None else f"{self.rows:,} rows in "
        size = "batches" if self.batch_size is None else f"batches of {self.batch_size}"
        n = self._loader.num_workers
        workers = f", {n} worker{'s' if n > 1 else ''}" if n else ""
        return f"{rows}{size} from a {type(self._loader).__name__}{workers}"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """One pass over the loader; its first `skip` batches are read and dropped, so that all draws are made."""
        self._wake_workers(epoch)
        self._generators.begin(epoch)
        self._passes += 1
        if self._role == "train" and self._tells_epoch:
            tell_epoch(epoch, *self._tellable)
        return opened(self._iterator(), skip, name=self.describe(), complaint=self._no_batches)

    def set_aside(self) -> None:
        """Read beside whoever else reads the loader: data set and sampler stay in their epoch."""
        self._tells_epoch = False

    def keep_workers(self, *, keeps: bool) -> None:
        """Say whether the loader's persistent workers serve these passes, or training's alone."""
        self._keeps_workers = keeps

    @property
    def generators(self) -> list[Any]:
        """The `torch.Generator`s of its own that a pass draws from; an evaluation puts them back."""
        return self._generators.found

    def state_dict(self) -> dict[str, Any]:
        """The passes begun, and the loader's and samplers' own generators."""
        return {"passes": self._passes, "generators": self._generators.state_dict()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over saved generators; the next epoch begins with them."""
        self._generators.load_state_dict(tree["generators"])
        self._passes = tree["passes"]
        self._resumed = True

    def _iterator(self) -> Iterator[Any]:
        """A pass over the loader; one apart where its persistent workers are not to be taken from another pass."""
        loader: Any = self._loader
        if self._tells_epoch or not loader.persistent_workers:
            return iter(self._loader)
        under_way = getattr(getattr(loader, "_iterator", None), "_tasks_outstanding", 0)
        keeps = not under_way if self._keeps_workers is None else self._keeps_workers
        apart: Iterator[Any] = iter(loader) if keeps else loader._get_iterator()
        return apart

    def _wake_workers(self, epoch: int) -> None:
        """Start persistent workers where an earlier pass has done so: they draw their base seed only once."""
        if self._resumed and self._generators.epoch == epoch:
            self._passes -= 1
        if self._resumed and self._passes and self._loader.persistent_workers:
            with unmoved():
                iter(self._loader)
        self._resumed = False

    def _dealt(self) -> int | None:
        """Rows that torch's own BatchSampler deals; None where another one does, or rows come unnumbered."""
        batch_sampler = self._loader.batch_sampler
        if type(batch_sampler) is not BatchSampler or isinstance(self._loader.dataset, IterableDataset):
            return None
        return length_of(batch_sampler.sampler)

    def _no_batches(self) -> DataError:
        loader, data_set = self._loader, self._loader.dataset
        rows = self._dealt() if self._dealt() is not None else length_of(data_set)
        what, want, fix = f"an epoch of the {type(loader).__name__} had no batch", "at least one batch per epoch", ""
        if rows == 0:
            what = f"data set of 0 rows in the {type(loader).__name__}"
        elif rows is not None and self._drops_last and self.batch_size is not None and rows < self.batch_size:
            what = f"{rows} rows, batch_size {self.batch_size}, drop_last=True leaves 0 batches"
            fix = f"drop_last=False, or a batch_size of at most {rows}"
        elif isinstance(data_set, IterableDataset):
            want = f"{type(data_set).__name__}.__iter__ to give a fresh iterator with rows in each epoch"
        else:
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            want = f"at least one batch of {rows} rows from {type(sampler).__name__}"
        return DataError(message(f"{self._role} data: {what}", want=want, fix=fix))
