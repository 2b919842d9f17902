"""One model's average during one `fit`: taken, swapped into the model and out again, saved and loaded.

The arithmetic is that of `torch.optim.swa_utils`, over lists that are grouped once; what was averaged how often is
counted on the host, so that nothing is read from the device. Integer and boolean parameters are never averaged: like
buffers, the averaged model has their current value. Of a sharded model each process averages its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.core.checks import check_form, is_count, is_none_or, is_text
from trainwright.core.errors import CheckpointError, DataError, SettingError, message
from trainwright.modules.dtensors import everywhere, is_sharded, local, put, reshard
from trainwright.modules.modes import mode

Fold = Callable[[list[Tensor], list[Tensor], int], object]
"""Folds weights into their averages, in place: (averages, weights, averages taken before)."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class Average:
    """The average of a model's weights during one `fit`, and the weights themselves; a part of every checkpoint.

    Inside `swapped()`, and after `leave()`, the model's own parameters hold the averages.
    """

    def __init__(
        self,
        settings: Any,
        model: nn.Module,
        *,
        fold: Fold,
        text: str,
        due: Callable[[int, int], bool] | None = None,
        each_update: bool = True,
        estimates: bool = False,
    ) -> None:
        self.settings = settings
        self.name: str = type(settings).__name__
        self.text = text
        """The settings in words, for the header of a run; a checkpoint knows them too."""
        self.taken = 0
        """Averages taken."""
        self.each_update = each_update
        """Whether `take` must be called after each update; else `epoch_ended` is enough."""
        self.holds = False
        """Whether the model holds the averaged weights now."""
        self._model, self._fold, self._due, self._estimates = model, fold, due, estimates
        self._groups = _grouped(model, {})
        if any(is_sharded(*group.weights) for group in self._groups):
            self._fold = _on_shards(fold)
        self._no_grad = torch.no_grad()  # made once: a take then costs six calls of Python
        self._asleep: frozenset[str] = frozenset()
        """Modules that were in eval mode when the last average was taken, in a model in train mode."""
        self._statistics: dict[str, Tensor] | None = None
        """BatchNorm statistics of the averaged weights; None where they must be estimated."""
        self._raw_statistics: dict[str, Tensor] = {}
        self._left: list[_Left] | None = None

    def take(self, updates: int) -> None:
        """Take an average where one is due after `updates` applied updates; called after each of them."""
        if self.each_update and (self._due is None or self._due(updates, 0)):
            self._take()

    def epoch_ended(self, updates: int, epochs: int) -> None:
        """Take an average where one is due after `epochs` finished epochs; called after each, before validation."""
        if not self.each_update and (self._due is None or self._due(updates, epochs)):
            self._take()

    @contextmanager
    def swapped(self, forward: Forward | None = None) -> Iterator[None]:
        """Have the model hold the averaged weights inside; afterwards its own, bit for bit, also after an error.

        Without an average yet, or where the model holds it already, nothing changes. `forward` runs the training data
        once through the model, in train mode and without gradients; it is called where `needs_statistics`.
        """
        if self.holds or not self.taken:
            yield
            return
        self._keep_raw(forward)
        try:
            self._put_averaged(forward)
            yield
        finally:
            self._put_raw()

    @property
    def needs_statistics(self) -> bool:
        """Whether BatchNorm statistics must be estimated before the averaged weights can be evaluated."""
        stale = self._estimates and self.taken > 0 and self._statistics is None
        return stale and bool(estimable(self._model, self._asleep))

    @property
    def will_need_statistics(self) -> bool:
        """Whether it will have to estimate BatchNorm statistics, of the model as it is now."""
        return self._estimates and bool(estimable(self._model, _asleep(self._model)))

    def leave(self, forward: Forward | None = None) -> bool:
        """Leave the averaged weights in the model, for good or until `put_back`; return whether there are any.

        Called once more after other weights were loaded on top, it takes note of them: they are then what was left.
        """
        if not self.taken:
            return False
        if self._left is not None:
            self._left = [left.as_it_is() for left in self._left]
            return True
        assert not self.holds
        self._keep_raw(forward)
        try:
            self._put_averaged(forward)
        except BaseException:
            self._put_raw()
            raise
        pairs = [pair for group in self._groups for pair in zip(group.weights, group.averages, strict=True)]
        self._left = [_Left(weight, weight._version, average) for weight, average in pairs]
        return True

    def put_back(self) -> bool:
        """Give the model its own weights back after `leave`; return whether that was done.

        Where anybody has changed the weights since, or replaced parameters, they stay: what was loaded is what is
        trained. A model that was only moved between devices is unchanged.
        """
        left, self._left = self._left, None
        if left is None:
            return False
        self.holds = False
        reshard(self._model)
        present = {id(parameter) for parameter in self._model.parameters()}
        unchanged = all(id(one.weight) in present and one.unchanged for one in left)
        if not everywhere(unchanged, [one.weight for one in left]):
            return False
        self._put_raw()
        return True

    def meet(self, model: nn.Module) -> None:
        """Take over the parameters that the model has now: new ones join with their current value as their average."""
        assert not self.holds
        known = {id(w): a for group in self._groups for w, a in zip(group.weights, group.averages, strict=True)}
        groups = _grouped(model, known)
        self._model = model
        if [group.key for group in groups] != [group.key for group in self._groups]:
            self._groups, self._statistics = groups, None
        norms = statistics_of(estimable(model, self._asleep)) if self._estimates else {}
        if set(self._statistics or {}) != set(norms):
            self._statistics = None

    def state_dict(self) -> dict[str, Any]:
        """The raw weights and counts, for a checkpoint whose model holds the averaged ones: asked inside `swapped()`.

        The tensors are those in use, not copies. CheckpointError where the model does not hold the average.
        """
        if self.taken and not self.holds:
            raise CheckpointError(
                message(
                    f"the state of {self.name} was asked for while the model holds its raw weights",
                    want="a checkpoint whose model holds the averaged weights",
                    fix="with average.swapped(): save(model.state_dict(), average.state_dict())",
                )
            )
        raw = {name: t for group in self._groups for name, t in zip(group.names, group.raw, strict=False)}
        return {
            "name": self.name,
            "settings": self.text,
            "taken": self.taken,
            "raw": raw if self.taken else None,
            "statistics": self._raw_statistics if self.taken else {},
            "asleep": sorted(self._asleep),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> str | None:
        """Take the weights that the model was just loaded with as the average, and give the model its raw ones.

        Returns a line where the settings differ. CheckpointError for another kind of average or another model.
        """
        assert self._left is not None or not self.holds
        self._check(tree)
        self.taken, self.holds, self._left = tree["taken"], False, None
        self._asleep, self._statistics = frozenset(tree["asleep"]), None
        if tree["raw"] is not None:
            with torch.no_grad():
                for group in self._groups:
                    _copy(group.averages, group.weights)
                    for name, weight in zip(group.names, group.weights, strict=True):
                        put(weight, tree["raw"][name])
            self._load_statistics(tree["statistics"])
        if tree["settings"] == self.text:
            return None
        return f"resumed: the average was {tree['settings']} until now, and goes on as {self.text}"

    def _take(self) -> None:
        if self.holds:
            what = f"{self.name}: an average was to be taken while the model holds the averaged weights"
            raise SettingError(message(what, want="the weights that are trained", fix="put_back() first"))
        with self._no_grad:
            if self.taken:
                for group in self._groups:
                    self._fold(group.averages, group.weights, self.taken)
            else:
                for group in self._groups:
                    _copy(group.averages, group.weights)
        self.taken += 1
        if self._estimates:
            self._statistics, self._asleep = None, _asleep(self._model)

    def _keep_raw(self, forward: Forward | None) -> None:
        """Copy what the model holds, into buffers that are allocated once."""
        if self.needs_statistics and forward is None:
            raise SettingError(
                message(
                    f"{self.name}: BatchNorm statistics must be estimated before the averaged weights are evaluated",
                    have=", ".join(list(estimable(self._model, self._asleep))[:5]) or "the model itself",
                    want="a function that runs the training data once through the model",
                    fix="average.swapped(lambda: [model(x) for x, _ in train])",
                )
            )
        reshard(self._model)
        with torch.no_grad():
            for group in self._groups:
                if not group.raw:
                    group.raw = [torch.empty_like(average) for average in group.averages]
                _copy(group.raw, group.weights)
            if self._estimates:
                norms = estimable(self._model, self._asleep)
                self._raw_statistics = {name: value.clone() for name, value in statistics_of(norms).items()}

    def _put_averaged(self, forward: Forward | None) -> None:
        self.holds = True
        with torch.no_grad():
            for group in self._groups:
                _copy(group.weights, group.averages)
            if self._estimates:
                if self._statistics is None:
                    new = estimate(self._model, self._asleep, forward)
                    reshard(self._model)
                    self._statistics = {**self._raw_statistics, **new}  # a layer that is never used keeps its own
                self._set_statistics(self._statistics)

    def _put_raw(self) -> None:
        reshard(self._model)
        with torch.no_grad():
            for group in self._groups:
                _copy(group.weights, group.raw)
            self._set_statistics(self._raw_statistics)
        self.holds = False

    def _set_statistics(self, values: Mapping[str, Tensor]) -> None:
        live = statistics_of(estimable(self._model, self._asleep)) if values else {}
        for name, value in values.items():
            live[name].copy_(value)

    def _load_statistics(self, raw: Mapping[str, Tensor]) -> None:
        """Keep the statistics that the model was loaded with as those of the averaged weights; put the raw ones in."""
        if self._estimates:
            live = statistics_of(estimable(self._model, self._asleep))
            self._statistics = {name: value.clone() for name, value in live.items()}
            self._set_statistics(raw)

    def _check(self, tree: Mapping[str, Any]) -> None:
        """Refuse the state of another kind of average, or of another model, before anything is changed."""
        check_form(tree, name=is_text, settings=is_text, taken=is_count, raw=is_none_or(_are_tensors))
        check_form(tree, statistics=_are_tensors, asleep=lambda names: isinstance(names, list))
        if tree["name"] != self.name:
            have, want = f"{tree['settings']} in the checkpoint", self.text
            what = "the checkpoint has another kind of average"
            fix = 'fit(..., resume_fresh=("average",)), or resume with the one of the checkpoint'
            raise CheckpointError(message(what, have=have, want=want, fix=fix))
        if tree["raw"] is None:
            return
        live = {name: w for group in self._groups for name, w in zip(group.names, group.weights, strict=True)}
        norms = estimable(self._model, frozenset(tree["asleep"])) if self._estimates else {}
        wrong = [
            f"{name} (checkpoint {_shape(saved, name)}, model {_shape(mine, name)})"
            for saved, mine in ((tree["raw"], live), (tree["statistics"], statistics_of(norms)))
            for name in sorted(set(saved) | set(mine))
            if _shape(saved, name) != _shape(mine, name)
        ]
        if wrong:
            what = f"the raw weights beside the {self.name} are those of another model"
            raise CheckpointError(message(what, have="; ".join(wrong[:5]), want="the model as it was saved"))


@dataclass(slots=True)
class _Group:
    """The parameters of one device and dtype, their averages, and room for the raw values while these are swapped."""

    names: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    raw: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> list[tuple[str, int, int]]:
        """What is the same as long as the same parameters have the same averages."""
        pairs = zip(self.names, self.weights, self.averages, strict=True)
        return [(name, id(weight), id(average)) for name, weight, average in pairs]


@dataclass(frozen=True, slots=True)
class _Left:
    """A parameter as `leave` left it."""

    weight: Tensor
    version: int
    value: Tensor

    @property
    def unchanged(self) -> bool:
        """Whether nobody wrote to it.

        In-place writes raise torch's version counter, also with the same values (`load_state_dict`); edits through
        `.data` do not, so the values are compared too.
        """
        if self.weight._version != self.version or self.weight.dtype != self.value.dtype:
            return False
        now, value = local((self.weight.detach(), self.value))
        return now.shape == value.shape and torch.allclose(now.to(value.device), value, rtol=0, atol=0, equal_nan=True)

    def as_it_is(self) -> _Left:
        """The same parameter as it is now."""
        return self if self.unchanged else _Left(self.weight, self.weight._version, self.weight.detach().clone())


def _grouped(model: nn.Module, known: Mapping[int, Tensor]) -> list[_Group]:
    """The parameters of a model by device and dtype, with the averages that are known, else their current values."""
    reshard(model)
    groups: dict[tuple[torch.device, torch.dtype], _Group] = {}
    for name, weight in model.named_parameters():
        if nn.parameter.is_lazy(weight) or weight.layout != torch.strided:
            fix = "run one batch through the model first" if nn.parameter.is_lazy(weight) else "leave average= out"
            raise SettingError(message(f"{name} cannot be averaged: it is {type(weight).__name__}", fix=fix))
        if not weight.is_floating_point() and not weight.is_complex():
            continue
        if weight.dtype not in DTYPES:
            what = f"{name} cannot be averaged: its dtype is {weight.dtype}"
            raise SettingError(message(what, want="float16, bfloat16, float32, float64 or complex weights"))
        average = known.get(id(weight))
        if average is None or average.shape != weight.shape:
            average = weight.detach().clone()
        group = groups.setdefault((weight.device, weight.dtype), _Group())
        group.names.append(name)
        group.weights.append(weight)
        group.averages.append(average.to(weight.device, weight.dtype))
    return list(groups.values())


def _are_tensors(value: object) -> bool:
    """Whether a value is a dict of tensors."""
    return isinstance(value, Mapping) and all(isinstance(one, Tensor) for one in value.values())


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(local(into), local(values))


def _on_shards(fold: Fold) -> Fold:
    """The same arithmetic on what this process holds: it is one element at a time."""

    def folded(averages: list[Tensor], weights: list[Tensor], taken: int) -> object:
        return fold(local(averages), local(weights), taken)

    return folded


def _asleep(model: nn.Module) -> frozenset[str]:
    """The modules that were put in eval mode within a model in train mode."""
    if not model.training:
        return frozenset()
    return frozenset(name for name, module in model.named_modules() if not module.training)


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | str:
    return tuple(tensors[name].shape) if name in tensors else "none"


Forward = Callable[[], object]
"""Runs the training data once through a model."""


def estimable(model: nn.Module, asleep: Collection[str]) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that track statistics, by name, without those asleep: in eval mode by the user's wish."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None and name not in asleep
    }


def statistics_of(norms: Mapping[str, _BatchNorm]) -> dict[str, Tensor]:
    """The buffers of BatchNorm layers, by name."""
    return {
        f"{name}.{key}".lstrip("."): buffer
        for name, norm in norms.items()
        for key, buffer in norm.named_buffers(recurse=False)
    }


def estimate(model: nn.Module, asleep: Collection[str], forward: Forward | None) -> dict[str, Tensor]:
    """The statistics of the weights that the model holds: plain means over all batches that `forward` runs.

    Called without gradients. The model is in train mode meanwhile, what is asleep apart; modes, momenta and every
    buffer are put back. A layer that no batch went through is left out. DataError where that is so for all of them.
    """
    norms = estimable(model, asleep)
    if not norms:
        return {}
    assert forward is not None
    momenta = {name: norm.momentum for name, norm in norms.items()}
    with _training(model, asleep):
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # torch's word for a plain mean over all batches
            forward()
            seen = {name: norm for name, norm in norms.items() if int(norm.num_batches_tracked or 0)}
            if not seen:
                have = f"no batch went through {', '.join(list(norms)[:5]) or 'the model'}"
                what = "BatchNorm statistics of the averaged weights cannot be estimated"
                raise DataError(message(what, have=have, want="training data that can be iterated again", where=False))
            return {name: value.clone() for name, value in statistics_of(seen).items()}
        finally:
            for name, norm in norms.items():
                norm.momentum = momenta[name]


@contextmanager
def _training(model: nn.Module, asleep: Collection[str]) -> Iterator[None]:
    """Train mode inside, what is asleep apart; afterwards every mode and every buffer is what it was."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with mode(model, train=True):
            for name, module in model.named_modules():
                if name in asleep:
                    module.training = False
            yield
    finally:
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            buffer.copy_(value)
