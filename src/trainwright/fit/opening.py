"""Opens the data of a `fit` or of an evaluation for this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainwright.core.checks import check_whole
from trainwright.core.errors import SettingError
from trainwright.core.progress import Counters
from trainwright.data.opening import is_function, is_together, open_source, takes_batch_size
from trainwright.data.row_batches import Batches
from trainwright.data.source import Source
from trainwright.fit.plan import Ends
from trainwright.fit.record import StageRecord
from trainwright.optim.named import check_schedulers
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.trainer_like import Hooks, TrainerLike


def open_data(
    trainer: TrainerLike, train: Any, val: Any, *, ends: Ends, batch_size: int | None, joins: bool = True
) -> tuple[Source, dict[str, Source]]:
    """Return the training source, and the validation sources by prefix: "val", or "val_<key>" for a dict of sets.

    Refuses a trainer that cannot train. `joins`: whether all ranks make this call together.
    """
    from trainwright.data.dataloader.loader import LoaderBatches
    from trainwright.data.streams import Continuing
    from trainwright.update.per_rank_state import assign_shard

    _check_trainable(trainer)
    if isinstance(val, int | float | Tensor | np.ndarray):
        _check_val(train, val)
    ends.check_given()
    ends.check_validates(val)
    sets = {} if val is None else _named_sets(val)
    # A function of the epoch may draw random numbers. Ranks join first, so that a missing rank is found at once.
    with _joined_ranks(trainer) if joins and trainer.world.size > 1 else nullcontext():
        if train is None:
            source = _without_data(trainer, ends, batch_size)
        else:
            source = open_source(train, batch_size=batch_size, shuffle=True, role="train")
        held_out = {
            # A batch size applies to validation data too, unless they are batches already.
            name: open_source(data, batch_size=batch_size if batch_size and takes_batch_size(data) else None, role=name)
            for name, data in sets.items()
        }
    if ends.epoch_updates is not None and source.length is None and train is not None:
        source = Continuing(source)
    if trainer.world.size > 1:
        assign_shard(trainer, source, *held_out.values())
    for name, opened in held_out.items():
        if isinstance(opened, LoaderBatches):
            opened.keep_workers(keeps=not _reads(train, sets[name]))
    return source, {name: _limited(opened, ends.max_val_batches) for name, opened in held_out.items()}


def _without_data(trainer: TrainerLike, ends: Ends, batch_size: int | None) -> Source:
    """Return the source of `fit(None)`. SettingError if a setting or a default step needs data."""
    from trainwright.data.streams import NoData

    hooks, what = trainer._hooks, "fit(None): training without data"
    if not (hooks.overrides_training_step or hooks.has_custom_update or hooks.overrides_compute_gradients):
        want = "training data; or a training_step or an update of your own that makes its data"
        raise SettingError(f"{what}, and no step makes its own", want=want, fix="def training_step(self, batch): ...")
    if ends.epochs is not None and ends.epoch_updates is None:
        want, n = "an end in updates or seconds, or the updates of an epoch", ends.epochs
        fix = f"fit(None, max_updates=1000), or fit(None, epochs={n}, epoch_updates=100)"
        raise SettingError(f"{what} has no epochs", have=f"epochs={n}", want=want, fix=fix)
    if batch_size is not None:
        raise SettingError(f"{what}, and batch_size={batch_size}", fix="leave batch_size out: the step knows its rows")
    if trainer.on_oom is not None:
        raise SettingError(f'{what}, and on_oom="split": there is no batch to split', fix="leave on_oom out")
    return NoData()


def _limited(source: Source, most: int | None) -> Source:
    """Return the first `most` batches of a source."""
    from trainwright.data.streams import first_batches

    return first_batches(source, most)


def _reads(train: Any, data: Any) -> bool:
    """Return whether `data` are the training data, or one of several loaders zipped into them."""
    return data is train or (is_together(train) and any(data is loader for loader in train.loaders.values()))


@contextmanager
def _joined_ranks(trainer: TrainerLike) -> Iterator[None]:
    """Context with peer monitoring, in which all ranks have the random state of rank 0."""
    from trainwright.update.per_rank_state import position_text, rng_of_rank0

    with trainer.world.watch(partial(position_text, trainer)), rng_of_rank0(trainer.world):
        yield


_OWN = {
    "_record": StageRecord,
    "_counters": Counters,
    "history": list,
    "_hooks": Hooks,
    "_tracker": LossTracker,
    "state": dict,
}
"""Attributes of a Trainer that a run writes to. A subclass must not replace them."""


def _check_trainable(trainer: TrainerLike) -> None:
    """Refuse a trainer with a replaced attribute, without an optimizer, or with lazy modules."""
    for name, kind in _OWN.items():
        if not isinstance(getattr(trainer, name), kind):
            have = f"a {type(getattr(trainer, name)).__name__}"
            what = f"self.{name} was replaced: the Trainer has a {kind.__name__} under this name"
            fix = f"self.my_{name.removeprefix('_')} = ..., or an entry of self.state"
            raise SettingError(what, have=have, fix=fix)
    if not trainer.optimizers:
        raise SettingError(
            "fit() without an optimizer", fix="Trainer(model, torch.optim.AdamW(model.parameters()), loss)"
        )
    if trainer.schedule is not None:
        check_schedulers(trainer.schedule, trainer.optimizers)  # again: the user may have built a torch scheduler since
    # A checkpoint, an average and the header need the shapes of all parameters.
    lazy = next((name for name, parameter in trainer.model.named_parameters() if nn.parameter.is_lazy(parameter)), None)
    if lazy is not None:
        raise SettingError(f"{lazy} has no shape yet", fix="call model(one_batch) once before fit")


def _check_val(train: Any, val: Any) -> None:
    """Refuse a target, epochs or a share as validation data: `fit(x, y)`, `fit(data, 5)`, `fit(data, 0.2)`."""
    if isinstance(val, int) and not isinstance(val, bool):
        what = f"fit(train, {val}): the second is taken as validation data"
        fix = f"fit(train, epochs={val}), or batch_size={val}"
        raise SettingError(what, want="data that were held out, or none", fix=fix)
    if isinstance(val, float):
        share = val if 0 < val < 1 else 0.2
        fix = f"train, val = trainwright.data.random_split(data, {share:g})"
        raise SettingError(f"fit(train, val={val})", want="data that were held out, not a share", fix=fix)
    kinds = (Tensor, np.ndarray)
    if not isinstance(train, kinds) or not isinstance(val, kinds) or not train.ndim or not val.ndim:
        return
    if len(train) == len(val) and (train.shape[1:] != val.shape[1:] or train.dtype != val.dtype):
        raise SettingError(
            f"fit(x, y): the second is taken as validation data, and has as many rows as the first, {len(train)}",
            have=f"{tuple(train.shape)} {train.dtype} and {tuple(val.shape)} {val.dtype}",
            want="inputs and targets in one tuple",
            fix="fit((x, y), ...)",
        )


def open_sets(
    trainer: TrainerLike, data: Any, name: str, *, batch_size: int | None, max_batches: int | None
) -> dict[str, Source]:
    """Return the sources to evaluate, by prefix: `name`, or `<name>_<key>` for each set of a dict."""
    sets = _named_sets(data, name)
    return {
        prefix: open_one(trainer, given, prefix, batch_size=batch_size, max_batches=max_batches)
        for prefix, given in sets.items()
    }


def partial_sets(sources: dict[str, Source]) -> dict[str, float]:
    """Return over how many batches each partial evaluation is, as `<name>_first_batches`; nothing for complete ones."""
    from trainwright.data.streams import FirstBatches

    partial = {name: source.most for name, source in sources.items() if isinstance(source, FirstBatches)}
    return {f"{name}_first_batches": float(most) for name, most in partial.items()}


def open_one(trainer: TrainerLike, data: Any, role: str, *, batch_size: int | None, max_batches: int | None) -> Source:
    """Return the source for one pass, sharded over the ranks, with at most `max_batches` batches."""
    if max_batches is not None:
        check_whole(max_batches, f"max_batches={max_batches!r}")
    role = "evaluated" if role == "train" else role  # the user may have chosen that name
    # A function may draw random numbers.
    with _joined_ranks(trainer) if is_function(data) and trainer.world.size > 1 else nullcontext():
        opened = open_source(data, batch_size=batch_size, role=role)
    if trainer.world.size > 1:
        from trainwright.update.per_rank_state import assign_shard

        assign_shard(trainer, opened)
    return _limited(opened, max_batches)


def _named_sets(data: Any, prefix: str = "val") -> dict[str, Any]:
    """Return the sets to evaluate, by prefix."""
    if isinstance(data, dict):
        return _sets_of_dict(data, prefix)
    if isinstance(data, list | tuple):
        _refuse_loaders(data, prefix)
    return {prefix: data}


def _sets_of_dict(data: dict[Any, Any], prefix: str) -> dict[str, Any]:
    """Return the sets of a dict, by prefix. A dict of arrays or tensors is one set, with its columns."""
    if all(isinstance(column, Tensor | np.ndarray) for column in data.values()):
        return {prefix: data}
    for name in data:
        if not isinstance(name, str) or not name.isidentifier():
            what = f"{prefix}={{{name!r}: ...}}"
            raise SettingError(what, want="names that are identifiers", fix='"clean"')
    return {f"{prefix}_{name}": given for name, given in data.items()}


def _refuse_loaders(data: Sequence[Any], prefix: str) -> None:
    """Refuse a list or tuple of loaders: it would be read as batches or rows."""
    if data and all(isinstance(item, Batches | DataLoader) for item in data):
        kind = type(data).__name__
        raise SettingError(
            f"{prefix}={kind} of {len(data)} loaders: a {kind} is taken as batches or rows",
            want=f"a dict of several sets of data, whose numbers are then {prefix}_a_loss and so on",
            fix=f'{prefix}={{"a": first, "b": second}}' if prefix == "val" else '{"a": first, "b": second}',
        )
