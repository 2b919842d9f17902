"""Averages the weights of one model during one `fit`, swaps them in and out, and saves and loads them.

The arithmetic is that of `torch.optim.swa_utils`, over lists that are grouped once. The number of averages is counted
on the host, so that nothing is read from the device. Integer and boolean parameters are never averaged: like buffers,
the averaged model has their current value. Of a sharded model each rank averages its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.checks import check_form, is_count, is_none_or, is_text
from trainwright.core.errors import CheckpointError, DataError, SettingError
from trainwright.core.torch_private import BatchNorm, buffer_dict, version_of
from trainwright.modules.dtensors import copy_into, is_sharded, local_shards, on_all_ranks, reshard
from trainwright.modules.modes import mode

Fold = Callable[[list[Tensor], list[Tensor], int], object]
"""Updates averages in place: (averages, weights, number of averages before)."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class AveragedWeights:
    """The average of a model's weights during one `fit`, and its raw weights while the model holds the average.

    Inside `swapped()`, and after `apply()`, the model's own parameters hold the average. Part of every checkpoint.
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
        """The settings as text, for the header of a run and for its checkpoints."""
        self.taken = 0
        """Number of averages taken."""
        self.each_update = each_update
        """Whether averages are taken after updates; otherwise at the ends of epochs, by `epoch_ended`."""
        self.is_applied = False
        """Whether the model holds the average now."""
        self._model, self._fold, self._due, self._estimates = model, fold, due, estimates
        self._groups = _grouped(model, {})
        if any(is_sharded(*group.weights) for group in self._groups):
            self._fold = _on_shards(fold)
        self._no_grad = torch.no_grad()  # made once: taking an average then costs six Python calls
        self._in_eval: frozenset[str] = frozenset()
        """Modules that were in eval mode when the last average was taken, in a model in train mode."""
        self._statistics: dict[str, Tensor] | None = None
        """BatchNorm statistics of the averaged weights; None where they must be estimated."""
        self._raw_statistics: dict[str, Tensor] = {}
        self._applied: list[_AppliedWeight] | None = None

    def take(self, updates: int) -> None:
        """Take an average if one is due after `updates` applied updates. Called after each update."""
        if self.each_update and (self._due is None or self._due(updates, 0)):
            self._take()

    def epoch_ended(self, updates: int, epochs: int) -> None:
        """Take an average if one is due after `epochs` finished epochs. Called after each, before validation."""
        if not self.each_update and (self._due is None or self._due(updates, epochs)):
            self._take()

    @contextmanager
    def swapped(self, forward: Forward | None = None) -> Iterator[None]:
        """Give the model the average inside the block; afterwards its raw weights, bit for bit, also after an error.

        No-op before the first average, and where the model holds the average already. `forward` runs the training data
        once through the model, in train mode and without gradients; it is called if `needs_statistics`.
        """
        if self.is_applied or not self.taken:
            yield
            return
        self._copy_raw(forward)
        try:
            self._load_averages(forward)
            yield
        finally:
            self._load_raw()

    @property
    def needs_statistics(self) -> bool:
        """Whether BatchNorm statistics must be estimated before the average can be evaluated."""
        stale = self._estimates and self.taken > 0 and self._statistics is None
        return stale and bool(estimable(self._model, self._in_eval))

    @property
    def will_need_statistics(self) -> bool:
        """Whether BatchNorm statistics of the present model will have to be estimated."""
        return self._estimates and bool(estimable(self._model, _in_eval(self._model)))

    def apply(self, forward: Forward | None = None) -> bool:
        """Give the model the average, until `revert` if that is called; return whether there is one.

        Called again after other weights were loaded into the model, it records those as the applied ones.
        """
        if not self.taken:
            return False
        if self._applied is not None:
            self._applied = [left.refreshed() for left in self._applied]
            return True
        assert not self.is_applied
        self._copy_raw(forward)
        try:
            self._load_averages(forward)
        except BaseException:
            self._load_raw()
            raise
        pairs = [pair for group in self._groups for pair in zip(group.weights, group.averages, strict=True)]
        self._applied = [_AppliedWeight(weight, version_of(weight), average) for weight, average in pairs]
        return True

    def revert(self) -> bool:
        """Give the model its raw weights after `apply`; return whether that was done.

        Nothing is done if weights were changed or parameters replaced since: weights that were loaded are trained on.
        A model that was only moved between devices counts as unchanged.
        """
        left, self._applied = self._applied, None
        if left is None:
            return False
        self.is_applied = False
        reshard(self._model)
        present = {id(parameter) for parameter in self._model.parameters()}
        unchanged = all(id(one.weight) in present and one.unchanged for one in left)
        if not on_all_ranks(unchanged, [one.weight for one in left]):
            return False
        self._load_raw()
        return True

    def attach(self, model: nn.Module) -> None:
        """Average the parameters that the model has now; a new one starts with its current value as its average."""
        assert not self.is_applied
        known = {id(w): a for group in self._groups for w, a in zip(group.weights, group.averages, strict=True)}
        groups = _grouped(model, known)
        self._model = model
        if [group.key for group in groups] != [group.key for group in self._groups]:
            self._groups, self._statistics = groups, None
        norms = statistics_of(estimable(model, self._in_eval)) if self._estimates else {}
        if set(self._statistics or {}) != set(norms):
            self._statistics = None

    def state_dict(self) -> dict[str, Any]:
        """Return the raw weights and counts, for a checkpoint whose model holds the average: call inside `swapped()`.

        The tensors are not copied. CheckpointError if the model does not hold the average.
        """
        if self.taken and not self.is_applied:
            raise CheckpointError(
                f"the state of {self.name} was asked for while the model holds its raw weights",
                want="a checkpoint whose model holds the averaged weights",
                fix="with average.swapped(): save(model.state_dict(), average.state_dict())",
            )
        raw = {name: t for group in self._groups for name, t in zip(group.names, group.raw, strict=False)}
        return {
            "name": self.name,
            "settings": self.text,
            "taken": self.taken,
            "raw": raw if self.taken else None,
            "statistics": self._raw_statistics if self.taken else {},
            "asleep": sorted(self._in_eval),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> str | None:
        """Use the weights that were just loaded into the model as the average, and give the model its raw weights.

        Returns a line if the settings differ. CheckpointError for another kind of average or another model.
        """
        assert self._applied is not None or not self.is_applied
        self._check(tree)
        self.taken, self.is_applied, self._applied = tree["taken"], False, None
        self._in_eval, self._statistics = frozenset(tree["asleep"]), None
        if tree["raw"] is not None:
            with torch.no_grad():
                for group in self._groups:
                    _copy(group.averages, group.weights)
                    for name, weight in zip(group.names, group.weights, strict=True):
                        copy_into(weight, tree["raw"][name])
            self._load_statistics(tree["statistics"])
        if tree["settings"] == self.text:
            return None
        return f"resumed: the average was {tree['settings']} until now, and goes on as {self.text}"

    def _take(self) -> None:
        if self.is_applied:
            what = f"{self.name}: an average was to be taken while the model holds the averaged weights"
            raise SettingError(what, want="the weights that are trained", fix="average.revert() first")
        with self._no_grad:
            if self.taken:
                for group in self._groups:
                    self._fold(group.averages, group.weights, self.taken)
            else:
                for group in self._groups:
                    _copy(group.averages, group.weights)
        self.taken += 1
        if self._estimates:
            self._statistics, self._in_eval = None, _in_eval(self._model)

    def _copy_raw(self, forward: Forward | None) -> None:
        """Copy the weights of the model into storage that is allocated once."""
        if self.needs_statistics and forward is None:
            raise SettingError(
                f"{self.name}: BatchNorm statistics must be estimated before the averaged weights are evaluated",
                have=", ".join(list(estimable(self._model, self._in_eval))[:5]) or "the model itself",
                want="a function that runs the training data once through the model",
                fix="average.swapped(lambda: [model(x) for x, _ in train])",
            )
        reshard(self._model)
        with torch.no_grad():
            for group in self._groups:
                if not group.raw:
                    group.raw = [torch.empty_like(average) for average in group.averages]
                _copy(group.raw, group.weights)
            if self._estimates:
                norms = estimable(self._model, self._in_eval)
                self._raw_statistics = {name: value.clone() for name, value in statistics_of(norms).items()}

    def _load_averages(self, forward: Forward | None) -> None:
        self.is_applied = True
        with torch.no_grad():
            for group in self._groups:
                _copy(group.weights, group.averages)
            if self._estimates:
                if self._statistics is None:
                    new = estimate(self._model, self._in_eval, forward)
                    reshard(self._model)
                    self._statistics = {**self._raw_statistics, **new}  # a layer that no batch reaches has none
                self._set_statistics(self._statistics)

    def _load_raw(self) -> None:
        reshard(self._model)
        with torch.no_grad():
            for group in self._groups:
                _copy(group.weights, group.raw)
            self._set_statistics(self._raw_statistics)
        self.is_applied = False

    def _set_statistics(self, values: Mapping[str, Tensor]) -> None:
        live = statistics_of(estimable(self._model, self._in_eval)) if values else {}
        for name, value in values.items():
            live[name].copy_(value)

    def _load_statistics(self, raw: Mapping[str, Tensor]) -> None:
        """Use the statistics that the model was loaded with as those of the average; give the model the raw ones."""
        if self._estimates:
            live = statistics_of(estimable(self._model, self._in_eval))
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
            raise CheckpointError(what, have=have, want=want, fix=fix)
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
            raise CheckpointError(what, have="; ".join(wrong[:5]), want="the model as it was saved")


@dataclass(slots=True)
class _Group:
    """The parameters of one device and dtype, their averages, and storage for raw values while averages are applied."""

    names: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    raw: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> list[tuple[str, int, int]]:
        """Names and identities: equal as long as the same parameters have the same averages."""
        pairs = zip(self.names, self.weights, self.averages, strict=True)
        return [(name, id(weight), id(average)) for name, weight, average in pairs]


@dataclass(frozen=True, slots=True)
class _AppliedWeight:
    """A parameter with the value that `apply` gave it."""

    weight: Tensor
    version: int
    value: Tensor

    @property
    def unchanged(self) -> bool:
        """Whether the parameter was not written to.

        In-place writes increase torch's version counter, even with the same values (`load_state_dict`); writes through
        `.data` do not, so the values are compared too.
        """
        if version_of(self.weight) != self.version or self.weight.dtype != self.value.dtype:
            return False
        now, value = local_shards((self.weight.detach(), self.value))
        return now.shape == value.shape and torch.allclose(now.to(value.device), value, rtol=0, atol=0, equal_nan=True)

    def refreshed(self) -> _AppliedWeight:
        """The same parameter with its present value."""
        if self.unchanged:
            return self
        return _AppliedWeight(self.weight, version_of(self.weight), self.weight.detach().clone())


def _grouped(model: nn.Module, known: Mapping[int, Tensor]) -> list[_Group]:
    """Group the parameters of a model by device and dtype, with their `known` averages or their current values."""
    reshard(model)
    groups: dict[tuple[torch.device, torch.dtype], _Group] = {}
    for name, weight in model.named_parameters():
        if nn.parameter.is_lazy(weight) or weight.layout != torch.strided:
            fix = "run one batch through the model first" if nn.parameter.is_lazy(weight) else "leave average= out"
            raise SettingError(f"{name} cannot be averaged: it is {type(weight).__name__}", fix=fix)
        if not weight.is_floating_point() and not weight.is_complex():
            continue
        if weight.dtype not in DTYPES:
            what = f"{name} cannot be averaged: its dtype is {weight.dtype}"
            raise SettingError(what, want="float16, bfloat16, float32, float64 or complex weights")
        average = known.get(id(weight))
        if average is None or average.shape != weight.shape:
            average = weight.detach().clone()
        group = groups.setdefault((weight.device, weight.dtype), _Group())
        group.names.append(name)
        group.weights.append(weight)
        group.averages.append(average.to(weight.device, weight.dtype))
    return list(groups.values())


def _are_tensors(value: object) -> bool:
    """Return whether a value is a dict of tensors."""
    return isinstance(value, Mapping) and all(isinstance(one, Tensor) for one in value.values())


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(local_shards(into), local_shards(values))


def _on_shards(fold: Fold) -> Fold:
    """Return the same arithmetic on the local shards: it is elementwise."""

    def folded(averages: list[Tensor], weights: list[Tensor], taken: int) -> object:
        return fold(local_shards(averages), local_shards(weights), taken)

    return folded


def _in_eval(model: nn.Module) -> frozenset[str]:
    """Return the names of modules in eval mode inside a model in train mode."""
    if not model.training:
        return frozenset()
    return frozenset(name for name, module in model.named_modules() if not module.training)


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | str:
    return tuple(tensors[name].shape) if name in tensors else "none"


Forward = Callable[[], object]
"""Runs the training data once through a model."""


def estimable(model: nn.Module, in_eval: Collection[str]) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers that track statistics, by name, without those that the user has in eval mode."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.num_batches_tracked is not None and name not in in_eval
    }


def statistics_of(norms: Mapping[str, BatchNorm]) -> dict[str, Tensor]:
    """Return the buffers of BatchNorm layers, by name."""
    return {
        f"{name}.{key}".lstrip("."): buffer
        for name, norm in norms.items()
        for key, buffer in norm.named_buffers(recurse=False)
    }


def estimate(model: nn.Module, in_eval: Collection[str], forward: Forward | None) -> dict[str, Tensor]:
    """Return the statistics of the model's present weights: plain means over all batches that `forward` runs.

    As torch's `update_bn` does. Called without gradients, in train mode except for `in_eval`; modes, momenta and every
    buffer are restored. A layer that no batch went through is left out; DataError if that holds for all of them.
    """
    norms = estimable(model, in_eval)
    if not norms:
        return {}
    assert forward is not None
    momenta = {name: norm.momentum for name, norm in norms.items()}
    with _training(model, in_eval):
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # None is torch's way to ask for a plain mean over all batches
            forward()
            seen = {name: norm for name, norm in norms.items() if int(norm.num_batches_tracked or 0)}
            if not seen:
                have = f"no batch went through {', '.join(list(norms)[:5]) or 'the model'}"
                what = "BatchNorm statistics of the averaged weights cannot be estimated"
                raise DataError(what, have=have, want="training data that can be iterated again", where=False)
            return {name: value.clone() for name, value in statistics_of(seen).items()}
        finally:
            for name, norm in norms.items():
                norm.momentum = momenta[name]


@contextmanager
def _training(model: nn.Module, in_eval: Collection[str]) -> Iterator[None]:
    """Train mode inside except for `in_eval`; restores every mode and every buffer."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in buffer_dict(module).items()
        if buffer is not None
    ]
    try:
        with mode(model, train=True):
            for name, module in model.named_modules():
                if name in in_eval:
                    module.training = False
            yield
    finally:
        for module, name, buffer, value in buffers:
            buffer_dict(module)[name] = buffer
            buffer.copy_(value)
