"""`together(...)`: a zip of loaders, whose batches are combined into one dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from keyword import iskeyword
from typing import Any

import torch

from trainwright.core.errors import DataError, SettingError
from trainwright.core.rng import rng_preserved, seed
from trainwright.core.suggestions import did_you_mean
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.data.opening import open_source, takes_batch_size
from trainwright.data.row_batches import Batches
from trainwright.data.seeded import mixed_seed
from trainwright.data.source import Source, join_lines, shallow_copy
from trainwright.data.streams import Continuing
from trainwright.distributed.mesh import Shard, Slice

LENGTHS = ("longest", "shortest")


def together(*, length: str = "longest", **loaders: Any) -> Together:
    """Zip several loaders: each batch is a dict with one batch of each loader, by name.

    One loader determines the length of an epoch. The others continue across epochs where they stopped, and start their
    next pass at their end, so that all of their rows are used. The count of a batch is the number of rows of the first
    loader; if a loss is a mean over anything else, the step returns `MeanLoss` or `SumLoss` with its count.

    Args:
        length: The loader that determines the length of an epoch: "longest", "shortest", or a name.
        **loaders: Data of any form that `fit` accepts.

    Raises:
        SettingError: For fewer than two loaders, for names that are no identifiers, and for one loader under two names.
    """
    return Together(loaders, length)


class Together:
    """A zip of loaders; made by `together`."""

    def __init__(self, loaders: Mapping[str, Any], length: str) -> None:
        self.loaders = {name: copy(one) if isinstance(one, Batches) else one for name, one in loaders.items()}
        """Results of `batches` are copied, since the originals may also be used elsewhere."""
        self.length = length
        self._own_source: Source | None = None
        self._passes = 0
        _check_loaders(loaders)
        if length not in (*LENGTHS, *loaders):
            names = ", ".join(map(repr, (*LENGTHS, *loaders)))
            meant = did_you_mean(length, (*LENGTHS, *loaders)) if isinstance(length, str) else ""
            raise SettingError(f"together(length={length!r}).{meant}", want=f"one of {names}")

    def __repr__(self) -> str:
        return f"together({', '.join(self.loaders)}, length={self.length!r})"

    def __len__(self) -> int:
        length = self._opened().length
        if length is None:
            raise TypeError(f"{self!r} has no length")
        return length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._passes += 1
        return self._opened().epoch(self._passes - 1)

    def source(self, *, batch_size: int | None, shuffle: bool, role: str) -> Source:
        """Return the source of a run; `batch_size` is used for the loaders that are data sets of rows."""
        none_takes_it = not any(map(takes_batch_size, self.loaders.values()))  # then the first loader raises an error
        sources = {
            name: open_source(
                data,
                batch_size=batch_size if none_takes_it or takes_batch_size(data) else None,
                shuffle=shuffle,
                role=role,
            )
            for name, data in self.loaders.items()
        }
        return Zip(sources, length=self.length, role=role)

    def _opened(self) -> Source:
        if self._own_source is None:
            other = Together(self.loaders, self.length)  # a copy, since a run may read the loaders of this object
            self._own_source = other.source(batch_size=None, shuffle=False, role="train")
        return self._own_source


class Zip(Source):
    """The sources of several loaders, from which one batch each is read at a time.

    The leader determines the length of an epoch, and is read as without the others, which are `Continuing`. If the
    order of a pass can be drawn at its start, it is drawn from a state derived from the last one, so that the order is
    the same on any number of ranks.
    """

    kind = "together(...)"

    def __init__(self, sources: dict[str, Source], *, length: str, role: str) -> None:
        self._role = role
        self._sources = sources
        self.draws_global_rng = any(one.draws_global_rng for one in sources.values())
        self.is_own_part = all(one.is_own_part for one in sources.values())
        for name, source in sources.items():
            if not source.repeatable:
                raise DataError(
                    f"{role} data: together({name}=...) can be iterated only once",
                    have=source.describe(),
                    want="loaders that can be read again",
                    fix="a list of the batches, or a function epoch -> batches",
                )
        self._leader = self._leading(length)
        self._open_streams()
        self._measure()

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of `epoch` after its first `skip`."""
        with rng_preserved():
            drawn = int(torch.empty((), dtype=torch.int64).random_())
        iterators = {self._leader: self._streams[self._leader].epoch(epoch, skip)}
        self._measure()  # the length may change if the leader is a function of the epoch
        for index, (name, stream) in enumerate(self._streams.items()):
            if name in self._sliced:
                with rng_preserved():  # the first pass of each loader has a separate random state
                    seed(mixed_seed(drawn, index))
                    iterators[name] = stream.epoch(epoch, skip)
            elif name != self._leader:
                iterators[name] = stream.epoch(epoch, skip)
        return self._zipped(iterators)

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches.

        DataError if only some loaders are marked by `sharded`, or if a batch of one loader has rows for fewer ranks
        than that of another.
        """
        self._part = part
        for one in self._sources.values():
            one.shard(part)
        if part is not None:
            self._check_parts(part)
        self._shard_streams()
        self._measure()

    def independent_copy(self) -> Zip:
        """Return a copy for a pass besides training, which reads the loaders from their start."""
        other = shallow_copy(self)
        other._sources = {name: one.independent_copy() for name, one in self._sources.items()}
        other._open_streams()
        return other

    def inner(self) -> Mapping[str, Source]:
        """Return the sources by name; all except the leader continue across epochs."""
        return self._streams

    def position(self) -> dict[str, Any]:
        """Return the positions of all loaders."""
        positions = {name: one.position() for name, one in self._streams.items()}
        return {"kind": self.kind, "fingerprint": self.fingerprint(), "loaders": positions}

    def seek(self, position: Any, *, other_size: bool = False, ended: bool = False) -> str | None:
        """Continue at saved positions; DataError if the loaders differ from those of the save."""
        self.check_same(position)
        saved = position["loaders"]
        return join_lines(
            {name: one.seek(saved[name], other_size=other_size, ended=ended) for name, one in self._streams.items()}
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties that must be the same at a save and a resume, besides those of each loader."""
        return {"loaders": ", ".join(self._sources), "epochs of": self._leader}

    def describe(self) -> str:
        """Return a description of every loader."""
        lines = {name: f"{name}: {one.describe()}" for name, one in self._sources.items()}
        return "; ".join(line if name == self._leader else f"{line}, continuing" for name, line in lines.items())

    @property
    def note(self) -> str:
        """A line for the header of the console."""
        return f"together: {self.describe()}"

    def _leading(self, length: str) -> str:
        """Return the name of the loader that determines the length of an epoch."""
        if length not in LENGTHS:
            return length
        lengths = {name: one.length for name, one in self._sources.items()}
        for name, one in lengths.items():
            if one is None:
                raise DataError(
                    f"{self._role} data: together(length={length!r}), and {name} has no length",
                    have=self._sources[name].describe(),
                    want="loaders with a length, or the name of the one that sets the epoch",
                    fix=f"together(..., length={next((n for n in lengths if lengths[n] is not None), name)!r})",
                )
        choose = max if length == "longest" else min
        return choose(lengths, key=lambda name: lengths[name] or 0)

    def _open_streams(self) -> None:
        self._streams: dict[str, Any] = {
            name: one if name == self._leader else Continuing(one) for name, one in self._sources.items()
        }
        self._shard_streams()

    def _shard_streams(self) -> None:
        """Shard all streams but the leader over the ranks; on one rank, only those that draw a pass at its start."""
        self._sliced = set()
        """The names of the streams that yield slices."""
        for name, stream in self._streams.items():
            if name == self._leader:
                continue
            if self._part is not None:
                stream.shard(self._part)
                self._sliced.add(name)
            elif _draws_complete_passes(self._sources[name]) and _sharded_to_one_rank(stream):
                self._sliced.add(name)

    def _measure(self) -> None:
        """Set the batches per epoch, and the rows, which are known if the first loader is the leader."""
        leader, first = self._sources[self._leader], next(iter(self._sources))
        self.length = leader.length
        self.rows = leader.rows if self._leader == first else None
        self.batch_size = self._sources[first].batch_size

    def _zipped(self, iterators: dict[str, Iterator[Any]]) -> Iterator[Any]:
        """Yield one batch of each loader; after the end of the leader, none is taken from the others."""
        others = [(name, iterators[name]) for name in self._sources if name != self._leader]
        empty = dict.fromkeys(self._sources)
        for batch in iterators[self._leader]:
            given = {**empty, self._leader: batch, **{name: self._next(name, one) for name, one in others}}
            if self._part is not None:
                yield self._slice(self._part, given)
            else:
                yield {name: one.batch if name in self._sliced else one for name, one in given.items()}

    def _next(self, name: str, stream: Iterator[Any]) -> Any:
        for batch in stream:
            return batch
        what = f"{self._role} data: a pass over {name} had no batch"
        raise DataError(what, have=self._sources[name].describe(), want="at least one batch in every pass")

    def _slice(self, part: Shard, given: dict[str, Slice]) -> Slice:
        first = next(iter(given.values()))
        served = {None if one.all_rows is None else part.served(one.all_rows) for one in given.values()}
        if len(served) > 1:
            raise self._too_few({name: one.all_rows for name, one in given.items()}, part)
        return Slice({name: one.batch for name, one in given.items()}, first.rows, first.all_rows)

    def _check_parts(self, part: Shard) -> None:
        marks = {name: one.is_own_part for name, one in self._sources.items()}
        if len(set(marks.values())) > 1:
            raise DataError(
                f"{self._role} data: some of the loaders that are read together are each process's own part",
                have=", ".join(f"{name}: {'its own' if own else 'shared'}" for name, own in marks.items()),
                want="all of them shared by the processes, or all of them marked",
                fix="together(a=sharded(...), b=sharded(...))",
            )
        if len({(one.rows, one.batch_size) for one in self._sources.values()}) == 1:
            return  # their short batches coincide
        for name, one in self._sources.items():
            short = one.rows % one.batch_size if one.rows and one.batch_size else 0
            if short and part.served(short) < part.size:
                raise self._too_few({name: short}, part)

    def _too_few(self, rows: Mapping[str, int | None], part: Shard) -> DataError:
        return DataError(
            f"{self._role} data: a batch read together has rows for some of {part.size} processes only",
            have=", ".join(f"{n} rows of {name}" for name, n in rows.items() if n is not None),
            want=f"at least {part.size * part.least} rows in every batch of every loader",
            fix="drop_last=True, or another batch size",
        )


def _check_loaders(loaders: Mapping[str, Any]) -> None:
    for name, one in loaders.items():
        if not name.isidentifier() or iskeyword(name) or name in LENGTHS:
            want, fix = "names that are identifiers, and no length", "together(clean=..., noisy=...)"
            raise SettingError(f"together(**{{{name!r}: ...}})", want=want, fix=fix)
        if isinstance(one, str):
            meant = did_you_mean(name, ("length",))
            raise SettingError(f"together({name}={one!r}): a string is no loader.{meant}", where=True)
    if len(loaders) < 2:
        what = "together() of fewer than two loaders"
        raise SettingError(what, have=", ".join(loaders) or "none", fix="together(a=first, b=second)")
    names = {id(data): name for name, data in reversed(list(loaders.items()))}
    for name, data in loaders.items():
        if names[id(data)] != name:
            what = f"together({names[id(data)]}=..., {name}=...) are the same loader"
            raise SettingError(what, want="a loader of its own for each name")


def _draws_complete_passes(source: Any) -> bool:
    """Return whether the order of a pass can be drawn at its start, and its rows fetched by index."""
    if isinstance(source, LoaderBatches):
        return source.length is not None and source.fetches_by_index
    return isinstance(source, Batches) and source.length is not None


def _sharded_to_one_rank(stream: Continuing) -> bool:
    """Shard a stream over one rank; return False if its sampler shards rows itself."""
    try:
        stream.shard(Shard(0, 1))
    except DataError:
        return False
    return True
