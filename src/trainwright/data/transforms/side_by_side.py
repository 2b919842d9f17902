"""The sources of several loaders, read side by side: one gives the epoch, the others go on where they stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainwright.core.errors import DataError
from trainwright.core.rng import rng_preserved, seed
from trainwright.data.dataloader.loader import LoaderBatches
from trainwright.data.dataloader.position import TOGETHER, check_facts, check_kind
from trainwright.data.row_batches import Batches
from trainwright.data.seeded import mixed_seed
from trainwright.data.source import Source, shallow_copy
from trainwright.data.sources import mark
from trainwright.data.streams import Continuing
from trainwright.distributed.mesh import Shard, Slice

LENGTHS = ("longest", "shortest")


class SideBySide(Source):
    """The sources of several loaders, read side by side.

    The one that gives the epoch is read as it is alone. The others are `Continuing`; of those that can, every pass is
    drawn from a random state that follows from the one before, so that any number of processes draw the same.
    """

    def __init__(self, sources: dict[str, Source], *, length: str, role: str) -> None:
        self._role = role
        self.sources = sources
        """The source of every loader, by its name."""
        self.draws_global_rng = any(one.draws_global_rng for one in sources.values())
        for name, source in sources.items():
            if not source.repeatable:
                raise self._once(name, source)
        self._leader = self._led_by(length)
        self._told = {name: source.describe() for name, source in sources.items()}
        self._streams: dict[str, Any] = _streams(sources, self._leader)
        self._chained = self._deal_streams()
        """Those whose passes are drawn from random states of their own."""
        self._measure()

    @property
    def own_length(self) -> int | None:
        """Batches of an epoch on this rank, where it has data of its own; else as `length`."""
        return self.sources[self._leader].own_length

    @property
    def generators(self) -> list[Any]:
        """The loaders' own random generators."""
        return [generator for one in self.sources.values() for generator in one.generators]

    @property
    def must_resume(self) -> bool | None:
        """Whether a checkpoint may be saved: data that could not be resumed are then refused."""
        told = [one.must_resume for one in self.sources.values()]
        return next((one for one in told if one is not None), None)

    @must_resume.setter
    def must_resume(self, must: bool | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for one in self.sources.values():
            one.must_resume = must

    @property
    def resumes(self) -> str:
        """A line on what may be inexact in a resume inside an epoch; empty where nothing is."""
        told = {name: one.resumes for name, one in self.sources.items()}
        return "; ".join(f"{name}: {one}" for name, one in told.items() if one)

    @property
    def other_size_note(self) -> str | None:
        """A line on what differs after a resume on another number of processes; None where nothing does."""
        told = {name: one.other_size_note for name, one in self.sources.items()}
        return "; ".join(f"{name}: {one}" for name, one in told.items() if one) or None

    @property
    def sharded(self) -> bool:
        """Whether the batches are this rank's own part already."""
        return all(one.sharded for one in self.sources.values())

    @sharded.setter
    def sharded(self, sharded: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        assert sharded
        for one in self.sources.values():
            mark(one, self._role)

    def describe(self) -> str:
        """Return a description of every loader."""
        told = {name: f"{name}: {one}" for name, one in self._told.items()}
        return "; ".join(one if name == self._leader else f"{one}, again and again" for name, one in told.items())

    @property
    def note(self) -> str:
        """A line for the header."""
        return f"read together: {self.describe()}"

    def deal(self, part: Shard | None) -> None:
        """Have `epoch` yield a `Slice` of each batch: the part of this rank; None: complete batches again.

        DataError where some of the loaders are each process's own part, and others are not, and where a batch of one
        has rows for fewer processes than that of another.
        """
        self._part = part
        for one in self.sources.values():
            one.deal(part)
        if part is not None:
            self._check_parts(part)
        self._told = {name: source.describe() for name, source in self.sources.items()}
        self._chained = self._deal_streams()
        self._measure()

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of `epoch` without its first `skip`."""
        with rng_preserved():
            drawn = int(torch.empty((), dtype=torch.int64).random_())
        iterators = {self._leader: self._streams[self._leader].epoch(epoch, skip)}
        self._measure()  # a function of the epoch may have given more or fewer batches
        for index, (name, stream) in enumerate(self._streams.items()):
            if name == self._leader:
                continue
            if name not in self._chained:
                iterators[name] = stream.epoch(epoch, skip)
                continue
            with rng_preserved():  # what the first pass is drawn from is neither the leader's nor another's
                seed(mixed_seed(drawn, index))
                iterators[name] = stream.epoch(epoch, skip)
        return self._joined(iterators)

    def beside(self) -> SideBySide:
        """Return a copy for a pass beside training, which reads the loaders from their start."""
        other = shallow_copy(self)
        other.sources = {name: one.beside() for name, one in self.sources.items()}
        other._streams = _streams(other.sources, other._leader)
        other._chained = other._deal_streams()
        return other

    def seek_loaded(self) -> None:
        """Seek the loaded positions at once: another `fit` reads the loaders."""
        for one in self._streams.values():
            one.seek_loaded()

    def at_boundary(self) -> None:
        """Record that all batches given so far are trained on."""
        for one in self._streams.values():
            one.at_boundary()

    def facts(self) -> dict[str, Any]:
        """Return the properties that must not change between a save and a resume, beside those of each loader."""
        return {"loaders": ", ".join(self.sources), "epochs of": self._leader}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all loaders."""
        return {"facts": self.facts(), "loaders": {name: one.state_dict() for name, one in self._streams.items()}}

    def load_state_dict(self, tree: dict[str, Any]) -> str | None:
        """Load saved states, for the next epoch; DataError where the loaders are not what they were."""
        check_kind(tree, TOGETHER)
        what = "the loaders are not those of when the state was saved"
        check_facts(self.facts(), tree["facts"], what=what, fix="write together(...) as it was")
        told = {name: one.load_state_dict(tree["loaders"][name]) for name, one in self._streams.items()}
        return _lines(told)

    def process_state(self) -> dict[str, Any]:
        """Return the states of this rank."""
        return {name: one.process_state() for name, one in self._streams.items()}

    def load_process_state(self, tree: dict[str, Any] | None) -> str | None:
        """Load the states of this rank after the common ones; None: another number of processes saved them."""
        told = {
            name: one.load_process_state(None if tree is None else tree.get(name))
            for name, one in self._streams.items()
        }
        return _lines(told)

    def _measure(self) -> None:
        """Tell batches of an epoch, and rows: those of the first loader, where it gives the epoch."""
        leader, first = self.sources[self._leader], next(iter(self.sources))
        self.length = leader.length
        self.rows = leader.rows if self._leader == first else None
        self.batch_size = self.sources[first].batch_size

    def _led_by(self, length: str) -> str:
        if length not in LENGTHS:
            return length
        lengths = {name: one.length for name, one in self.sources.items()}
        for name, one in lengths.items():
            if one is None:
                raise DataError(
                    f"{self._role} data: together(length={length!r}), and {name} has no length",
                    have=self.sources[name].describe(),
                    want="loaders with a length, or the name of the one that gives the epoch",
                    fix=f"together(..., length={next((n for n in lengths if lengths[n] is not None), name)!r})",
                )
        choose = max if length == "longest" else min
        return choose(lengths, key=lambda name: lengths[name] or 0)

    def _deal_streams(self) -> set[str]:
        """Have streams give their part, alone too where they can: then a pass draws its order when it begins."""
        dealt = set()
        for name, stream in self._streams.items():
            if name == self._leader:
                continue
            if self._part is not None:
                stream.deal(self._part)
                dealt.add(name)
            elif _draws_whole_passes(self.sources[name]) and _deals_alone(stream):
                dealt.add(name)
        return dealt

    def _joined(self, iterators: dict[str, Iterator[Any]]) -> Iterator[Any]:
        """One batch of each; nothing is taken of the others where the leader has none."""
        names = [(name, iterators[name]) for name in self.sources]
        for batch in iterators[self._leader]:
            given = {name: batch if name == self._leader else self._next(name, one) for name, one in names}
            if self._part is not None:
                yield self._slice(given)
                continue
            yield {name: one.batch if name in self._chained else one for name, one in given.items()}

    def _next(self, name: str, stream: Iterator[Any]) -> Any:
        for batch in stream:
            return batch
        what = f"{self._role} data: a pass over {name} had no batch"
        raise DataError(what, have=self._told[name], want="at least one batch in every pass")

    def _slice(self, given: dict[str, Slice]) -> Slice:
        first = next(iter(given.values()))
        part = self._part
        assert part is not None
        served = {name: None if one.all_rows is None else part.served(one.all_rows) for name, one in given.items()}
        if len(set(served.values())) > 1:
            raise self._too_few({name: one.all_rows for name, one in given.items()})
        return Slice({name: one.batch for name, one in given.items()}, first.rows, first.all_rows)

    def _check_parts(self, part: Shard) -> None:
        marks = {name: one.sharded for name, one in self.sources.items()}
        if len(set(marks.values())) > 1:
            raise DataError(
                f"{self._role} data: of the loaders that are read together some are each process's own part",
                have=", ".join(f"{name}: {'its own' if own else 'dealt'}" for name, own in marks.items()),
                want="all of them dealt, or all of them marked",
                fix="together(a=sharded(...), b=sharded(...))",
            )
        if len({(one.rows, one.batch_size) for one in self.sources.values()}) == 1:
            return  # their short batches meet
        for name, one in self.sources.items():
            short = one.rows % one.batch_size if one.rows and one.batch_size else 0
            if short and part.served(short) < part.size:
                raise self._too_few({name: short})

    def _too_few(self, rows: Mapping[str, int | None]) -> DataError:
        assert self._part is not None
        have = ", ".join(f"{n} rows of {name}" for name, n in rows.items() if n is not None)
        return DataError(
            f"{self._role} data: a batch read together has rows for some of {self._part.size} processes only",
            have=have,
            want=f"at least {self._part.size * self._part.least} rows in every batch of every loader",
            fix="drop_last=True, or another batch size",
        )

    def _once(self, name: str, source: Source) -> DataError:
        return DataError(
            f"{self._role} data: together({name}=...) can be iterated only once",
            have=source.describe(),
            want="loaders that can be read again",
            fix="a list of the batches, or a function epoch -> batches",
        )


def _streams(sources: Mapping[str, Source], leader: str) -> dict[str, Any]:
    """The loaders at their start, as streams but for the one that gives the epoch."""
    return {name: one if name == leader else Continuing(one) for name, one in sources.items()}


def _draws_whole_passes(source: Any) -> bool:
    """Whether the order of a pass can be drawn at its start, and its batches need not be cut."""
    if isinstance(source, LoaderBatches):
        return source.length is not None and source.by_numbers
    return isinstance(source, Batches) and source.length is not None


def _deals_alone(stream: Continuing) -> bool:
    """Whether a stream can be dealt to one process: not where its sampler deals to several already."""
    try:
        stream.deal(Shard(0, 1))
    except DataError:
        return False
    return True


def _lines(told: Mapping[str, str | None]) -> str | None:
    return "; ".join(f"{name}: {one}" for name, one in told.items() if one) or None
