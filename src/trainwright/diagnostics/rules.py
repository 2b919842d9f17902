"""The rules that explain failed steps. Imported after a failure.

To add a rule:

1. Write a function. It takes a `Failure` (`frames.py`); if its rule has `layer`, also the module and its input; if it
   has `loss`, also the output and the target. It returns an `Explanation`, or None if it does not apply.
2. Add a line to `RULES` with the conditions of its call: the class of the error, a part of its message, the called
   layer or loss. The first explanation is shown: put a special rule above a general one.
3. Add a case to `tests/mistakes/test_causes.py`: the error, the cause, and the fix that works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.core.device import devices_of, is_out_of_memory
from trainwright.core.records import StepOutput
from trainwright.core.suggestions import nearest
from trainwright.core.trees import tensors_in
from trainwright.diagnostics.frames import MISSING, Failure, dtype_name, shown
from trainwright.modules.freezing import layers_mixing_rows
from trainwright.update.losses import fix_of_shapes

MOST_SEARCHED = 10_000_000
"""Maximum number of targets whose minimum and maximum are computed."""


class Explanation(NamedTuple):
    """The cause of a failed step, and the fix."""

    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One known cause of a failed step."""

    explain: Callable[..., Explanation | None]
    """A function of the failure; with `layer` also of module and input, with `loss` also of output and target."""
    error: type[Exception] | tuple[type[Exception], ...] = Exception
    """The class of the error."""
    text: tuple[str, ...] = ()
    """The message of the error contains one of these texts. Empty: any message."""
    layer: tuple[type[nn.Module], ...] = ()
    """Types of the innermost called module, with one tensor as its input. Empty: any."""
    loss: tuple[str, ...] = ()
    """Names of loss functions of `torch.nn.functional`, called with two tensors. Empty: any."""

    def apply(self, failure: Failure) -> Explanation | None:
        """Return the explanation of a failure; None if the rule does not apply."""
        if not isinstance(failure.error, self.error) or (self.text and not any(t in failure.text for t in self.text)):
            return None
        if self.layer:
            layer = failure.layer
            if layer is None or layer.given is None or not isinstance(layer.module, self.layer):
                return None
            return self.explain(failure, layer.module, layer.given)
        if self.loss:
            call = failure.loss
            if call is None or call.function not in self.loss or not isinstance(call.output, Tensor):
                return None
            return self.explain(failure, call.output, call.target) if isinstance(call.target, Tensor) else None
        return self.explain(failure)


# Memory.


def out_of_memory(failure: Failure) -> Explanation | None:
    """Explain an out-of-memory error of any device, with the rows of the batch."""
    if not is_out_of_memory(failure.error):
        return None
    trainer, rows = failure.trainer, failure.rows
    what = "step" if not rows else f"batch of {rows} row{'' if rows == 1 else 's'}"
    cause = f"the {what} does not fit in the memory of {trainer.device}"
    if rows < 2:
        return Explanation(cause, 'smaller inputs, or Trainer(..., precision="bf16")')
    if failure.role != "train":
        fix = f"smaller batches for this data, such as batch_size={rows // 2}: its numbers stay the same"
        return Explanation(cause, fix)
    by_epoch = dict(trainer.accumulate)
    accumulate = 2 * by_epoch[max(epoch for epoch in by_epoch if epoch <= trainer._counters.epoch)]
    fix = f"batches of {rows // 2} rows with Trainer(..., accumulate={accumulate}): the same rows in each update"
    is_own = trainer._hooks.has_custom_update or trainer._hooks.overrides_compute_gradients
    is_refused = is_own or trainer.world.size > 1 or layers_mixing_rows(trainer.model, trainer.loss)
    return Explanation(cause, fix if trainer.on_oom or is_refused else f'{fix}; or on_oom="split"')


def index_out_of_range_on_the_device(failure: Failure) -> Explanation | None:
    """Explain a device-side assert, which CUDA reports after the faulty operation."""
    return Explanation(
        f"an index was out of range on {failure.trainer.device}, at this batch or a little earlier",
        'Trainer(..., device="cpu") names the place; nothing works on this device until the process ends',
    )


# Modules without a forward, and steps that call the trainer or backward.


def module_without_forward(failure: Failure) -> Explanation | None:
    """Explain a call of a module without `forward`, such as an `nn.ModuleList`."""
    trainer = failure.trainer
    module = trainer.model if failure.layer is None else failure.layer.module
    cause = f"{_called(failure)} has no forward(), so it cannot be called"
    if type(module) not in (nn.ModuleDict, nn.ModuleList):
        near = nearest("forward", [own for own in vars(type(module)) if own != "forward"])
        fix = f"def forward(self, ...) in {type(module).__name__}" + (f", which has {near}()" if near else "")
        if hasattr(module, "configure_optimizers"):  # a LightningModule
            fix = "Trainer(the network in it, optimizer), and its training_step in a subclass of Trainer"
        return Explanation(cause, fix)
    if not failure.in_default_step or module is not trainer.model:
        return Explanation(cause, "call its parts in place of it")
    if failure.role != "train":
        step = "predict_step" if failure.role in ("predict", "report") else "validation_step"
        return Explanation(cause, f"override {step}(self, batch)")
    several = "update(self, window), with self.minimize(loss, name) for each of the optimizers"
    return Explanation(cause, f"override {several if len(trainer.optimizers) > 1 else 'training_step(self, batch)'}")


def trainer_called_as_the_model(failure: Failure) -> Explanation | None:
    """Explain `self(x)` in a step, where `self` is the trainer."""
    name = type(failure.trainer).__name__
    if failure.text != f"{name!r} object is not callable":
        return None
    return Explanation(f"self is the {name}, not the model, so self(x) calls no model", "self.model(x)")


def step_that_calls_backward(failure: Failure) -> Explanation | None:
    """Explain errors of a second backward if the training step calls `backward`."""
    return explain_own_backward(failure.trainer)


def explain_own_backward(trainer: Any) -> Explanation | None:
    """Return the explanation for a training step that calls `backward`; None if it does not."""
    if not any("backward" in code.co_names for code in _user_code(trainer, "training_step")):
        return None
    return Explanation(
        "training_step calls backward() itself",
        "return the loss: the loop calls backward() and the optimizer's step()",
    )


# Losses: an output and a target that do not fit the loss.


def output_that_is_no_tensor(failure: Failure) -> Explanation | None:
    """Explain an output that is not a tensor, such as a dict or tuple."""
    output, trainer = failure.output, failure.trainer
    if failure.loss is None or output is MISSING or isinstance(output, Tensor):
        return None
    loss, part = failure.loss.name, _scores(output)
    kind = f"a {type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list | Mapping) else "")
    cause = f"{type(trainer.model).__name__} returned {kind}: {shown(output)}; {loss} takes one tensor"
    if not failure.in_default_step:
        return Explanation(cause, f"{part} in {failure.method}")
    package = "nn." if hasattr(nn, loss) else "nn.functional." if hasattr(nn.functional, loss) else ""
    function = package + (f"{loss}()" if isinstance(trainer.loss, nn.Module) else loss)
    return Explanation(cause, f"Trainer(..., loss=lambda output, target: {function}({part}, target))")


def _scores(output: Any) -> str:
    """Return the part of an output that is most likely the input of the loss, as a Python expression."""
    if isinstance(output, tuple | list):
        return f"output[{next((i for i, value in enumerate(output) if isinstance(value, Tensor)), 0)}]"
    held: Mapping[str, Any] = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    names = [name for name, value in held.items() if isinstance(value, Tensor)]
    name = "logits" if "logits" in names else next(iter(names), "logits")
    return f"output[{name!r}]" if isinstance(output, Mapping) else f"output.{name}"


def classes_of_another_dtype(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain class numbers whose dtype is not int64."""
    if target.dtype in (torch.int64, torch.uint8) or target.ndim != output.ndim - 1:
        return None
    cause = f"{_loss(failure)} takes class numbers as int64; the targets are {dtype_name(target)}"
    if target.is_floating_point():
        if target.numel() >= MOST_SEARCHED or not bool((target == target.floor()).all()):
            cause += " and hold fractions, so they are no classes"
            return Explanation(cause, "nn.MSELoss() for numbers in place of classes")
        cause += " and all whole numbers"
    return Explanation(cause, f"y = y.long() in the Dataset, or target.long() in {failure.method}")


def classes_of_another_shape(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain class numbers in a column, and integer one-hot targets."""
    if output.ndim < 2 or target.ndim != output.ndim or target.is_floating_point():
        return None
    cause = f"{_loss(failure)} takes one class number per row, (rows,); the targets are {tuple(target.shape)}"
    if target.shape[1] == 1:
        return Explanation(cause, f"target.squeeze(1) in {failure.method}")
    if target.shape == output.shape:
        return Explanation(f"{cause}, one-hot", f"target.argmax(1) in {failure.method}")
    return None


def classes_out_of_range(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain class numbers without an output of the model. Values are read on the CPU alone."""
    if not target.is_cpu or not 0 < target.numel() < MOST_SEARCHED:
        return None
    classes, least, most = output.shape[1 if output.ndim > 1 else 0], int(target.min()), int(target.max())
    if most < classes:
        padding = f"loss=nn.CrossEntropyLoss(ignore_index={least}), if these do not count"
        return Explanation(f"the smallest target is {least}; classes are numbered from 0", padding)
    shift = "" if least < 1 or most > classes else f", or target - 1 in {failure.method}"
    return Explanation(
        f"the largest target is {most}, and the model has {classes} outputs, for the classes 0 to {classes - 1}",
        f"a last layer of {most + 1} outputs{shift}",
    )


def rows_of_another_number(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain an output with more or fewer rows than its target."""
    if not output.ndim or not target.ndim or len(output) == len(target):
        return None
    cause = f"{_loss(failure)} got an output of {len(output)} rows and a target of {len(target)}"
    if output.ndim == 2 and target.numel() == len(output):
        return Explanation(cause, f"target.flatten() in {failure.method}")
    return Explanation(cause, "x.flatten(1) in forward for a view or reshape that mixes rows with features")


def binary_targets_of_another_dtype(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain integer targets of a binary cross entropy."""
    if target.is_floating_point():
        return None
    wanted = f"{_loss(failure)} takes targets of the output's dtype, {dtype_name(output)}"
    return Explanation(
        f"{wanted}; they are {dtype_name(target)}",
        f"y = y.float() in the Dataset, or target.float() in {failure.method}",
    )


def binary_targets_of_another_shape(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain targets of a binary cross entropy with another shape than the output."""
    if output.shape == target.shape:
        return None
    wanted = f"{_loss(failure)} takes targets of the output's shape {tuple(output.shape)}"
    return Explanation(f"{wanted}; they are {tuple(target.shape)}", fix_of_shapes(output, target, failure.method))


def no_probabilities(failure: Failure, output: Tensor, target: Tensor) -> Explanation | None:
    """Explain outputs or targets of `BCELoss` outside 0 to 1."""
    if not output.is_cpu:
        return None
    least, most = float(output.detach().min()), float(output.detach().max())
    if least < 0 or most > 1:
        cause = f"BCELoss takes probabilities; the outputs go from {least:.4g} to {most:.4g}"
        return Explanation(cause, "nn.BCEWithLogitsLoss() in place of nn.BCELoss()")
    return Explanation("BCELoss takes targets from 0 to 1; these are not", f"targets of 0 and 1 from {failure.method}")


def _loss(failure: Failure) -> str:
    return "" if failure.loss is None else failure.loss.name


# Devices and dtypes.


def model_on_several_devices(failure: Failure) -> Explanation | None:
    """Explain a model whose weights are on several devices."""
    model, placed = failure.trainer.model, devices_of(failure.trainer.model)
    if len(placed) < 2:
        return None
    cause = f"the model is on {' and '.join(map(str, placed))}, and its batches are on {failure.trainer.device}"
    fix = "x.to(layer.weight.device) before a layer on another device, and output.to(x.device) at the end"
    left = next((name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_cpu), "")
    away = [device for device in placed if device.type != "cpu"]
    if left and len(away) == 1:
        cause = f"{cause}: {left} was left on the cpu"
        fix = f"model.to({str(away[0])!r}) before Trainer(...); if it is meant so, {fix}"
    return Explanation(cause, fix)


def model_that_was_moved(failure: Failure) -> Explanation | None:
    """Explain a model that was moved after the Trainer was built."""
    device = failure.trainer.device
    for name, parameter in failure.trainer.model.named_parameters():
        if not _same_device(parameter.device, device):
            return Explanation(
                f"the model's {name} is on {parameter.device}, and the Trainer was built for {device}",
                f"move the model before Trainer(...), or Trainer(..., device={str(parameter.device)!r})",
            )
    return None


def batch_on_another_device(failure: Failure) -> Explanation | None:
    """Explain a batch with a tensor on another device than the model."""
    device = failure.trainer.device
    away = [tensor.device for tensor in tensors_in(failure.batch) if not _same_device(tensor.device, device)]
    if not away:
        return None
    return Explanation(
        f"the model is on {device}, and the batch has a tensor on {away[0]}",
        "return super().to_device(batch) from to_device(self, batch)",
    )


def tensor_made_on_another_device(failure: Failure) -> Explanation | None:
    """Explain a tensor that user code creates on another device."""
    device, frame, place = failure.trainer.device, failure.user_frame, failure.user_place
    if frame is None:
        return None
    which = f"a tensor made in {place} is not"
    for name, value in frame.f_locals.items():
        if isinstance(value, Tensor) and not _same_device(value.device, device):
            which = f"{name!r} in {place} is on {value.device}"
            break
    fix = "create it with device=x.device, or by self.register_buffer(...) in the model"
    return Explanation(f"model and batch are on {device}; {which}", fix)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)


def inputs_of_another_dtype(failure: Failure, module: nn.Module, given: Tensor) -> Explanation | None:
    """Explain inputs with another dtype than the weights, such as NumPy's float64."""
    wanted = next((p.dtype for p in failure.trainer.model.parameters() if p.is_floating_point()), given.dtype)
    if given.dtype == wanted:
        return None
    cast = "float()" if wanted == torch.float32 else f"to({wanted})"
    numpy = ", NumPy's own type" if given.dtype == torch.float64 else ""
    from_data = any(tensor.dtype == given.dtype for tensor in tensors_in(failure.batch))
    return Explanation(
        f"the weights are {str(wanted).removeprefix('torch.')}, and the inputs {dtype_name(given)}{numpy}",
        (f"x = x.{cast} in the Dataset, or " if from_data else "") + f"inputs.{cast} in {failure.method}",
    )


# Layers: inputs of another shape or range.


def one_row_under_batch_norm(failure: Failure) -> Explanation | None:
    """Explain a BatchNorm in train mode with one value per channel."""
    layer = "BatchNorm" if failure.layer is None else failure.layer.title
    rows = f"{failure.rows} row{'' if failure.rows == 1 else 's'}"
    return Explanation(
        f"{layer} takes a mean over the rows of a batch, and this one has {rows}",
        "drop_last=True in batches(...) or DataLoader(...), or a batch_size that leaves no lone row",
    )


def index_outside_an_embedding(failure: Failure, embedding: nn.Embedding, given: Tensor) -> Explanation | None:
    """Explain indices out of range of an embedding. Values are read on the CPU alone."""
    if not given.is_cpu or not given.numel():
        return None
    least, most, size = int(given.min()), int(given.max()), embedding.num_embeddings
    cause = f"{_called(failure)} has {size} rows, 0 to {size - 1}; the inputs go from {least} to {most}"
    fix = f"nn.Embedding({most + 1}, {embedding.embedding_dim})" if least >= 0 else "number the inputs from 0"
    return Explanation(cause, fix)


def weights_in_shards(failure: Failure) -> Explanation | None:
    """Explain a use of sharded weights outside of the forward that gathers them."""
    model = failure.trainer.model
    own = [frame.f_code.co_name for frame in failure.frames if frame.f_locals.get("self") is model]
    method = next((name for name in own if name not in ("forward", "inner") and not name.startswith("_")), None)
    module = model if failure.layer is None else failure.layer.module
    cause = f"the weights of {_called(failure)} are in shards: only the forward of a sharded module gathers them"
    if method is not None:
        return Explanation(cause, f"FSDP(..., methods=({method!r},)), which has {method}() gather them too")
    return Explanation(cause, f"call the model itself, or FSDP(blocks={{..., {type(module).__name__}}})")


def features_of_a_linear(failure: Failure, linear: nn.Linear, given: Tensor) -> Explanation | None:
    """Explain inputs of a linear layer with another number of features."""
    have, want, out = given.shape[-1], linear.in_features, linear.out_features
    if have == want:
        return None
    cause = f"{_called(failure)} takes {want} features; it got {have}, in {tuple(given.shape)}"
    if given.ndim > 2 and given[0].numel() == want:
        return Explanation(cause, "nn.Flatten() before it")
    return Explanation(cause, f"nn.Linear({have}, {out}) in place of nn.Linear({want}, {out})")


def channels_of_a_convolution(failure: Failure, conv: nn.Conv2d, given: Tensor) -> Explanation | None:
    """Explain inputs of a convolution with another number of channels or dimensions."""
    ndim, want, method = conv.weight.ndim, conv.in_channels, failure.method
    if given.ndim == ndim and given.shape[1] == want:
        return None
    cause = f"{_called(failure)} takes (rows, {want} channels, ...); it got {tuple(given.shape)}"
    if given.ndim == ndim - 1 and want == 1:
        return Explanation(cause, f"x.unsqueeze(1) in forward, or inputs.unsqueeze(1) in {method}")
    if given.ndim == ndim and given.shape[-1] == want:
        return Explanation(cause, f"x.movedim(-1, 1) in forward, or inputs.movedim(-1, 1) in {method}")
    return Explanation(cause, f"nn.{type(conv).__name__}({given.shape[1]}, ...)") if given.ndim == ndim else None


def _called(failure: Failure) -> str:
    """Return type and name of the innermost called module, or of the model."""
    return type(failure.trainer.model).__name__ if failure.layer is None else failure.layer.title


# Backward.


def loss_without_a_graph(failure: Failure) -> Explanation | None:
    """Explain a loss that does not require a gradient."""
    if not failure.in_backward:
        return None
    output = failure.returned.output if isinstance(failure.returned, StepOutput) else None
    fix = "return the loss as it was computed: no detach(), item(), torch.tensor(loss) or torch.no_grad() around it"
    if isinstance(output, Tensor) and output.requires_grad:
        return Explanation("the output requires a gradient, and the loss that was made of it does not", fix)
    if any(parameter.requires_grad for parameter in failure.trainer.model.parameters()):
        return Explanation("the loss depends on no weight that is trained", fix)
    return Explanation(
        "no parameter of the model requires a gradient any more",
        "parameter.requires_grad_(True) for those that are to be trained",
    )


def graph_of_an_earlier_batch(failure: Failure) -> Explanation | None:
    """Explain a backward through a graph that an earlier batch has freed."""
    if not failure.in_backward:
        return None
    return Explanation(
        "the loss reaches back into an earlier batch: a tensor computed there is used again",
        "hidden = hidden.detach() on the tensors that are carried to the next batch",
    )


# Calls of the model with wrong arguments.


def other_inputs_than_forward_takes(failure: Failure) -> Explanation | None:
    """Explain a batch with more or fewer inputs than `forward` takes."""
    inputs, model = failure.inputs, failure.trainer.model
    if not isinstance(inputs, tuple) or _takes(model.forward, inputs):
        return None
    names = list(inspect.signature(model.forward).parameters)
    takes = f"{type(model).__name__}.forward takes ({', '.join(names)})"
    if failure.role in ("predict", "report") and not splits_in_training(failure.trainer):
        # Only the user's training_step determines the target and the rows that count.
        returned = "StepOutput(None, output, target)" if failure.role == "report" else "output"
        return Explanation(
            f"{takes}, and the default predict_step gives it all items but the last",
            f"def predict_step(self, batch): ...; return {returned}   # as in training_step",
        )
    cause = f"{takes}; the batch without its last item has {len(inputs)}"
    if _ends_in_weights(failure):
        cause += ": its last item, a number for each row, is taken as the target"
        return Explanation(cause, f"def training_step(self, batch): {_weighted_step(failure)}")
    taken = ", ".join(f"batch[{index}]" for index in range(min(len(names), len(inputs))))
    return Explanation(cause, f"def split(self, batch): return ({taken},), batch[-1]")


def _ends_in_weights(failure: Failure) -> bool:
    """Return whether a batch has the form (inputs ..., target, weight), with one weight per row."""
    items = failure.batch
    if not isinstance(items, tuple | list) or len(items) < 3 or not all(isinstance(one, Tensor) for one in items):
        return False
    *inputs, target, weight = items
    per_row = weight.ndim == 1 and weight.is_floating_point() and target.ndim > 0 and len(weight) == len(target)
    return per_row and _takes(failure.trainer.model.forward, tuple(inputs))


def _weighted_step(failure: Failure) -> str:
    """Return the body of a training step whose loss is the weighted mean over the rows."""
    loss, inputs = failure.trainer.loss, "x" if len(failure.batch) == 3 else "*x"
    each = "loss_of_rows(output, y)"
    if isinstance(loss, nn.Module):
        each = f"nn.{type(loss).__name__}(reduction='none')(output, y)"
    elif inspect.isroutine(loss) and hasattr(nn.functional, loss.__name__):
        each = f"F.{loss.__name__}(output, y, reduction='none')"
    mean = "MeanLoss(loss, weight.sum())"
    lines = [
        f"{inputs}, y, weight = batch",
        f"output = self.model({inputs})",
        f"each = {each}.reshape(len(weight), -1).mean(1)",
        "loss = (each * weight).sum() / weight.sum()",
        f"return {f'StepOutput({mean}, output, y)' if failure.trainer.metrics else mean}",
    ]
    return "; ".join(lines)


def _takes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def splits_in_training(trainer: Any) -> bool:
    """Return whether the training step calls `split`, directly or through the default step."""
    codes = _user_code(trainer, "training_step")
    return not trainer._hooks.overrides_training_step or any(
        {"split", "training_step"} & set(code.co_names) for code in codes
    )


def _user_code(trainer: Any, name: str) -> list[CodeType]:
    """Return the code objects of a step in the subclasses that override it."""
    written = [vars(cls)[name] for cls in type(trainer).__mro__ if name in vars(cls)]
    # The last is the Trainer's own.
    return [function.__code__ for function in written[:-1] if inspect.isfunction(function)]


# The table.

_DEVICE = ("device",)
_OF_DTYPES = (
    "same dtype",
    "should be the same",
    "expected scalar type",
    "does not match weight dtype",
    "same data type",
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CLASS_LOSSES = ("cross_entropy", "nll_loss")
_BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")

RULES = (
    Rule(out_of_memory),
    Rule(index_out_of_range_on_the_device, text=("device-side assert",)),
    Rule(module_without_forward, error=NotImplementedError, text=('missing the required "forward"',)),
    Rule(trainer_called_as_the_model, error=TypeError),
    Rule(step_that_calls_backward, text=("backward through the graph a second time", "does not require grad")),
    Rule(output_that_is_no_tensor, error=(TypeError, AttributeError)),
    Rule(classes_of_another_dtype, loss=_CLASS_LOSSES),
    Rule(classes_of_another_shape, loss=_CLASS_LOSSES),
    Rule(classes_out_of_range, loss=_CLASS_LOSSES, error=IndexError),
    Rule(rows_of_another_number, loss=_CLASS_LOSSES, text=("batch_size",)),
    Rule(binary_targets_of_another_dtype, loss=_BINARY_LOSSES),
    Rule(binary_targets_of_another_shape, loss=_BINARY_LOSSES),
    Rule(no_probabilities, loss=_BINARY_LOSSES, text=("between 0 and 1",)),
    Rule(model_on_several_devices, text=_DEVICE),
    Rule(model_that_was_moved, text=_DEVICE),
    Rule(batch_on_another_device, text=_DEVICE),
    Rule(tensor_made_on_another_device, text=_DEVICE),
    Rule(inputs_of_another_dtype, text=_OF_DTYPES, layer=(nn.Module,)),
    Rule(one_row_under_batch_norm, text=("more than 1 value per channel",)),
    Rule(index_outside_an_embedding, layer=(nn.Embedding,), error=IndexError),
    Rule(weights_in_shards, text=("mixed torch.Tensor and DTensor",)),
    Rule(features_of_a_linear, layer=(nn.Linear,), error=RuntimeError),
    Rule(channels_of_a_convolution, layer=_CONVOLUTIONS, error=RuntimeError),
    Rule(loss_without_a_graph, text=("does not require grad",)),
    Rule(graph_of_an_earlier_batch, text=("backward through the graph a second time",)),
    Rule(other_inputs_than_forward_takes, error=TypeError),
)
"""The rules, in the order of trial."""


def explanation_of(failure: Failure) -> Explanation | None:
    """Return the explanation of the first rule that applies; None if none does."""
    return next((found for rule in RULES if (found := rule.apply(failure)) is not None), None)
