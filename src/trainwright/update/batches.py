"""The default step: split of a batch into inputs and target, call of the model, and loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.core.errors import DataError, SettingError
from trainwright.core.records import TARGETS, StepOutput, SumLoss
from trainwright.update.losses import check_shapes, no_target

if TYPE_CHECKING:
    from trainwright.update.trainer_like import TrainerLike


def split(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, target) of a batch; the target is None if there is none.

    The target is the last item of a sequence, or the value of a known key of a mapping. The inputs are a tuple (for
    positional arguments) or a dict (for keyword arguments). Raises DataError for a batch of any other type.
    """
    if isinstance(batch, tuple | list):
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    if isinstance(batch, Mapping):
        return _split_mapping(batch)
    if isinstance(batch, Tensor):
        return (batch,), None
    raise DataError(
        f"a batch of type {type(batch).__name__} has no inputs and target that are known",
        want="(inputs, target), a dict with 'target', 'targets', 'labels', 'label' or 'y', or a tensor",
        fix="override split(self, batch) -> (inputs, target), or training_step(self, batch)",
        where=False,
    )


def _split_mapping(batch: Mapping[Any, Any]) -> tuple[dict[Any, Any], Any]:
    name = next((name for name in TARGETS if name in batch), None)
    inputs = {key: value for key, value in batch.items() if key != name}
    return inputs, None if name is None else batch[name]


def known_target(batch: Any) -> Tensor | None:
    """Return the target that `split` finds, if it is a tensor; else None."""
    target = None
    if isinstance(batch, tuple | list) and len(batch) > 1:
        target = batch[-1]
    elif isinstance(batch, Mapping):
        target = next((batch[name] for name in TARGETS if name in batch), None)
    return target if isinstance(target, Tensor) else None


def call(model: Any, inputs: Any) -> Any:
    """Call a model with a tuple as positional arguments, a mapping as keyword arguments, or one other value.

    Raises DataError if the model's `forward` does not accept the keys of a mapping.
    """
    if isinstance(inputs, tuple):
        return model(*inputs)
    if not isinstance(inputs, Mapping):
        return model(inputs)
    try:
        return model(**inputs)
    except TypeError as error:
        if _takes(model, inputs):
            raise
        raise _other_keys(model, inputs) from error


def own_loss(trainer: TrainerLike, batch: Any) -> StepOutput:
    """Return the loss that the model itself computes for a batch, for a Trainer without a loss.

    The model is called with the complete mapping, or with the sequence as positional arguments. It must return a
    scalar, or an object with a `loss` (attribute or key); its `logits`, if any, are the output for metrics.
    """
    inputs = batch if isinstance(batch, Mapping | tuple) else tuple(batch) if isinstance(batch, list) else (batch,)
    try:
        returned = trainer.model(**inputs) if isinstance(inputs, Mapping) else trainer.model(*inputs)
    except TypeError:
        if _takes(trainer.model, inputs):
            raise
        if trainer.metrics and not trainer.optimizers:  # an evaluation of metrics only, which need no loss
            inputs, target = trainer._hooks.split(batch)
            return StepOutput(None, call(trainer.model, inputs), target)
        raise _without_loss(trainer, f"does not take a complete {type(batch).__name__} with the target in it") from None
    loss = returned if isinstance(returned, Tensor) else _named(returned, "loss")
    if not isinstance(loss, Tensor) or loss.ndim:
        raise _without_loss(trainer, f"returned {_kind(returned)}", _step_to_write(returned, batch))
    if isinstance(returned, Tensor):
        return StepOutput(loss)
    return StepOutput(loss, scores_of(returned), known_target(batch))


def scores_of(returned: Any) -> Any:
    """Return the output for metrics and reports of a model that computes its loss: its `logits`, or all it returns."""
    logits = None if isinstance(returned, Tensor) else _named(returned, "logits")
    return returned if logits is None else logits


def loss_of(trainer: TrainerLike, output: Any, target: Any) -> Any:
    """Return the loss of a micro-batch in training; a `SumLoss` for a known loss with `reduction="sum"`."""
    if target is None or trainer.loss is None:
        raise no_loss(trainer, target)
    known = trainer._hooks.known_loss
    if known is not None and known.each_element and output.shape != target.shape:
        check_shapes(trainer.loss, output, target)
    loss = trainer.loss(output, target)
    return SumLoss(loss) if known is not None and known.reduction == "sum" else loss


def counted_loss_of(trainer: TrainerLike, output: Any, target: Any) -> Any:
    """Return the mean of a known torch loss for a micro-batch in training, with its count if it must be weighted."""
    known, window, is_counted = trainer._hooks.known_loss, trainer._tracker.window, trainer._hooks.count is not None
    if target is None or known is None:
        raise no_target()
    if known.each_element and output.shape != target.shape:
        check_shapes(trainer.loss, output, target)
    # Only `compute_gradients` weights losses; a custom `update` that calls the step itself gets a plain mean.
    is_weighted = window is not None and window.begun and window.position + 1 < len(window.batches)
    if window is None or not is_weighted or (is_counted and len(window.batches) == 1):
        return trainer.loss(output, target)
    return known.with_count(output, target, trainer._tracker.count if is_counted else known.count(target))


def exact_loss_of(trainer: TrainerLike, output: Any, target: Any) -> Any:
    """Return the loss of a batch in an evaluation: for a known torch loss, a sum with its count."""
    if target is None or trainer.loss is None:
        raise no_loss(trainer, target)
    known = trainer._hooks.known_loss
    if known is not None and known.each_element and output.shape != target.shape:
        check_shapes(trainer.loss, output, target)
    if known is None or (trainer._hooks.overrides_count and known.reduction == "mean"):
        observer = trainer._tracker.count_source
        return trainer.loss(output, target) if observer is None else observer.observe(trainer.loss, output, target)
    return known.evaluated(output, target)


def no_loss(trainer: TrainerLike, target: Any) -> Exception:
    """Return the error for a default step without a loss or a target."""
    if trainer.loss is None:
        return SettingError(
            "no loss: loss is None, and this step is not overridden",
            want="a loss, or a step of your own that returns one",
            fix="Trainer(model, optimizer, nn.CrossEntropyLoss())",
            where=False,
        )
    return no_target()


def _takes(model: Any, inputs: Any) -> bool:
    """Return whether a model can be called with these inputs; True if its signature is unknown."""
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _without_loss(
    trainer: TrainerLike, but: str, fix: str = "Trainer(model, optimizer, nn.CrossEntropyLoss())"
) -> SettingError:
    return SettingError(
        f"no loss: loss is None, training_step is not overridden, and {type(trainer.model).__name__} {but}",
        want="a loss, a training_step(self, batch) that returns one, or a model that returns its own "
        "(a scalar, or something with `loss`)",
        fix=fix,
    )


def _step_to_write(returned: Any, batch: Any) -> str:
    """Return the code of a step that extracts the loss from the model's return; without one, that of a loss."""
    given = "**batch" if isinstance(batch, Mapping) else "*batch" if isinstance(batch, tuple | list) else "batch"
    step = f"def training_step(self, batch): return self.model({given})"
    if isinstance(returned, Mapping) and returned and all(map(_is_scalar, returned.values())):
        return step  # a dict of named losses, as torchvision's detectors return
    if isinstance(returned, tuple | list) and any(map(_is_scalar, returned)):
        return f"{step}[{list(map(_is_scalar, returned)).index(True)}]"
    return "Trainer(model, optimizer, nn.CrossEntropyLoss())"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _named(value: Any, name: str) -> Any:
    """Return the attribute or item of this name, or None."""
    if isinstance(value, Mapping):
        return value.get(name)
    return getattr(value, name, None)


def _kind(value: Any) -> str:
    """Return a short description of the return of a model, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(repr, value)) or 'nothing'}, and no 'loss'"
    return f"a {type(value).__name__} without a loss"


def _other_keys(model: Any, inputs: Mapping[Any, Any]) -> DataError:
    parameters = inspect.signature(model.forward).parameters
    names = [name for name, one in parameters.items() if one.default is one.empty]
    have, fix = ", ".join(map(repr, inputs)), ""
    if any(isinstance(value, tuple | list | Mapping) for value in inputs.values()):  # a batch of `together`
        fix = f"def training_step(self, batch): x, y = batch[{next(iter(inputs))!r}]; ..."
    given = [key for key in inputs if isinstance(key, str)]
    taken = "".join(f'inputs["{key}"], ' for key in given[: len(names)]) or "..."
    return DataError(
        f"a batch is a dict, and {type(model).__name__}.forward does not take its keys",
        have=have if fix else f"{have}, beside the target",
        want=", ".join(map(repr, names)),
        fix=fix or f"def split(self, batch): inputs, target = super().split(batch); return ({taken.strip()}), target",
    )
