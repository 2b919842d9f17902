"""Recognises why a step failed, from what its frames hold: a cause, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.device import devices_of
from trainwright.core.memory import is_out_of_memory
from trainwright.core.suggestions import nearest
from trainwright.diagnostics.frames import MISSING, Site, dtype_name, place_of_fix, tensors, title
from trainwright.diagnostics.loss_rules import loss_cause
from trainwright.update.window import find_rows

Cause = tuple[str, str]
"""Why it failed, and what to write instead."""


def cause_of(site: Site) -> Cause | None:
    """Why a step failed and what to write instead, or None where it is not known."""
    return next((found for look in _KNOWN if (found := look(site)) is not None), None)


def _memory(site: Site) -> Cause | None:
    if not is_out_of_memory(site.error):
        return None
    rows = None if site.batch is MISSING else find_rows(site.batch)
    what = "step" if rows is None else f"batch of {rows} row{'' if rows == 1 else 's'}"
    why = f"the {what} does not fit in the memory of {site.owner.device}"
    if rows is None or rows < 2:
        return why, 'smaller inputs, or Trainer(..., precision="bf16")'
    if site.role != "train":
        return why, f"smaller batches for this data, such as batch_size={rows // 2}: its numbers stay the same"
    of_epochs = dict(site.owner.accumulate)
    k = 2 * of_epochs[max(epoch for epoch in of_epochs if epoch <= site.owner.counters.epoch)]
    fix = f"batches of {rows // 2} rows with Trainer(..., accumulate={k}): the same rows in each update"
    return why, fix if site.owner.on_oom is not None or not _may_split(site) else f'{fix}; or on_oom="split"'


def _may_split(site: Site) -> bool:
    """Whether `on_oom="split"` is not refused for what is trained."""
    from trainwright.acceleration.oom import over_the_batch

    return site.owner.world.size == 1 and not over_the_batch(site.owner)


def _several_devices(site: Site) -> Cause | None:
    model, placed = site.owner.model, devices_of(site.owner.model)
    if len(placed) < 2 or "device" not in str(site.error):
        return None
    why = f"the model lies on {' and '.join(map(str, placed))}, and its batches are on {site.owner.device}"
    fix = "x.to(layer.weight.device) before a layer that lies elsewhere, and output.to(x.device) at the end"
    left = next((name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_cpu), "")
    away = [device for device in placed if device.type != "cpu"]
    if not left or len(away) != 1:
        return why, fix
    return (
        f"{why}: {left} was left on the cpu",
        f"model.to({str(away[0])!r}) before Trainer(...); if it is meant so, {fix}",
    )


def _devices(site: Site) -> Cause | None:
    if "device" not in str(site.error):
        return None
    device, fix = site.owner.device, "create it with device=x.device, or by self.register_buffer(...) in the model"
    for name, parameter in site.owner.model.named_parameters():
        if not _same(parameter.device, device):
            why = f"the model's {name} is on {parameter.device}, and the Trainer was built for {device}"
            return why, f"move the model before Trainer(...), or Trainer(..., device={str(parameter.device)!r})"
    away = [t for t in (() if site.batch is MISSING else tensors(site.batch)) if not _same(t.device, device)]
    if away:
        why = f"the model is on {device}, and the batch has a tensor on {away[0].device}"
        return why, "return super().to_device(batch) from to_device(self, batch)"
    for frame, line in site.own_lines():
        place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rpartition('/')[2]}:{line})"
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor) and not _same(value.device, device):
                return f"model and batch are on {device}; {name!r} in {place} is on {value.device}", fix
        return f"model and batch are on {device}; a tensor made in {place} is not", fix
    return None


def _dtypes(site: Site) -> Cause | None:
    wanted = next((p.dtype for p in site.owner.model.parameters() if p.is_floating_point()), None)
    given = _called_layer(site)[2]
    if wanted is None or given is None or given.dtype == wanted or not _speaks_of_types(site):
        return None
    cast = "float()" if wanted == torch.float32 else f"to({wanted})"
    numpy = ", NumPy's own type" if given.dtype == torch.float64 else ""
    why = f"the weights are {str(wanted).removeprefix('torch.')}, and the inputs {dtype_name(given)}{numpy}"
    brought = site.batch is not MISSING and any(tensor.dtype == given.dtype for tensor in tensors(site.batch))
    data = f"x = x.{cast} in the Dataset, or " if brought else ""
    return why, f"{data}inputs.{cast} in {place_of_fix(site)}"


def _speaks_of_types(site: Site) -> bool:
    text = str(site.error)
    known = (
        "same dtype",
        "should be the same",
        "expected scalar type",
        "does not match weight dtype",
        "same data type",
    )
    return any(part in text for part in known)


def _one_row(site: Site) -> Cause | None:
    if "more than 1 value per channel" not in str(site.error):
        return None
    rows = None if site.batch is MISSING else find_rows(site.batch)
    layer = site.layer
    name = "BatchNorm" if layer is None else title(layer[0], layer[1])
    why = f"{name} takes a mean over the rows of a batch, and this one has {rows} row{'' if rows == 1 else 's'}"
    return why, "drop_last=True in batches(...) or DataLoader(...), or a batch_size that leaves no lone row"


def _numbers_of_an_embedding(site: Site) -> Cause | None:
    name, embedding, given = _called_layer(site)
    if not isinstance(site.error, IndexError) or not isinstance(embedding, nn.Embedding):
        return None
    if given is None or not given.is_cpu or not given.numel():
        return None
    least, most, size = int(given.min()), int(given.max()), embedding.num_embeddings
    why = f"{title(name, embedding)} has {size} rows, 0 to {size - 1}; the inputs go from {least} to {most}"
    return why, f"nn.Embedding({most + 1}, {embedding.embedding_dim})" if least >= 0 else "number the inputs from 0"


def _features(site: Site) -> Cause | None:
    name, linear, given = _called_layer(site)
    if not isinstance(site.error, RuntimeError) or not isinstance(linear, nn.Linear) or given is None:
        return None
    have, want, gives = given.shape[-1], linear.in_features, linear.out_features
    if have == want:
        return None
    why = f"{title(name, linear)} takes {want} features; it got {have}, in {tuple(given.shape)}"
    if given.ndim > 2 and given[0].numel() == want:
        return why, "nn.Flatten() before it"
    return why, f"nn.Linear({have}, {gives}) in place of nn.Linear({want}, {gives})"


def _channels(site: Site) -> Cause | None:
    name, module, given = _called_layer(site)
    if not isinstance(site.error, RuntimeError) or not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return None
    dims, want = module.weight.ndim, module.in_channels
    if given is None or (given.ndim == dims and given.shape[1] == want):
        return None
    why = f"{title(name, module)} takes (rows, {want} channels, ...); it got {tuple(given.shape)}"
    if given.ndim == dims - 1 and want == 1:
        return why, f"x.unsqueeze(1) in forward, or inputs.unsqueeze(1) in {place_of_fix(site)}"
    if given.ndim == dims and given.shape[-1] == want:
        return why, f"x.movedim(-1, 1) in forward, or inputs.movedim(-1, 1) in {place_of_fix(site)}"
    return (why, f"nn.{type(module).__name__}({given.shape[1]}, ...)") if given.ndim == dims else None


def _called_layer(site: Site) -> tuple[str, nn.Module | None, Tensor | None]:
    """The innermost module that was called, by name, and what it was called with where that is one tensor."""
    if site.layer is None:
        return "", None, None
    name, module, frame = site.layer
    given = frame.f_locals.get("input")
    return name, module, given if isinstance(given, Tensor) and given.ndim else None


def splits_in_training(owner: Any) -> bool:
    """Whether a training step takes inputs and target from `split`: the default one, or one that calls either."""
    codes = _own_codes(owner, "training_step")
    return not owner.hooks.steps_itself or any({"split", "training_step"} & set(code.co_names) for code in codes)


def own_backward(owner: Any) -> Cause | None:
    """The cause where a training step of the user's own calls `backward` on its loss, as a plain loop does."""
    if not any("backward" in code.co_names for code in _own_codes(owner, "training_step")):
        return None
    return (
        "training_step calls backward() itself",
        "return the loss: the loop calls backward() and the optimizer's step()",
    )


def _own_codes(owner: Any, name: str) -> list[CodeType]:
    """The code of a step in each subclass that writes one."""
    written = [vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)]
    codes = [getattr(function, "__code__", None) for function in written[:-1]]  # the last is the Trainer's
    return [code for code in codes if code is not None]


def _backward_twice(site: Site) -> Cause | None:
    known = ("backward through the graph a second time", "does not require grad")
    return own_backward(site.owner) if any(text in str(site.error) for text in known) else None


def _no_forward(site: Site) -> Cause | None:
    """A model of parts, without a `forward` of its own, in a step that calls it."""
    if not isinstance(site.error, NotImplementedError) or 'missing the required "forward"' not in str(site.error):
        return None
    name, module, _ = site.layer or ("", site.owner.model, None)
    why = f"{title(name, module)} has no forward(), so it cannot be called"
    if type(module) not in (nn.ModuleDict, nn.ModuleList):
        near = nearest("forward", [own for own in vars(type(module)) if own != "forward"])
        return why, f"def forward(self, ...) in {type(module).__name__}" + (f", which has {near}()" if near else "")
    if not site.steps_by_default or name:
        return why, "call its parts in place of it"
    if site.role == "train":
        several = "update(self, window), with self.minimize(loss, name) for each of the optimizers"
        return why, "override " + (several if len(site.owner.optimizers) > 1 else "training_step(self, batch)")
    step = "predict_step" if site.role in ("predict", "report") else "validation_step"
    return why, f"override {step}(self, batch)"


def _no_gradient(site: Site) -> Cause | None:
    if "does not require grad" not in str(site.error) or not site.in_backward:
        return None
    returned = site.loop.f_locals.get("returned")
    output = getattr(returned, "output", None)
    why = "the loss depends on no weight that is trained"
    if isinstance(output, Tensor) and output.requires_grad:
        why = "the output requires a gradient, and the loss that was made of it does not"
    elif not any(p.requires_grad for p in site.owner.model.parameters()):
        why = "no parameter of the model requires a gradient any more"
        return why, "parameter.requires_grad_(True) for those that are to be trained"
    return (
        why,
        "return the loss as it was computed: no detach(), item(), torch.tensor(loss) or torch.no_grad() around it",
    )


def _shards(site: Site) -> Cause | None:
    """A call of a part of a sharded model that does not gather its weights."""
    if "mixed torch.Tensor and DTensor" not in str(site.error):
        return None
    model = site.owner.model
    own = [frame.f_code.co_name for frame in site.frames if frame.f_locals.get("self") is model]
    method = next((name for name in own if name not in ("forward", "inner") and not name.startswith("_")), None)
    name, module, _ = site.layer or ("", model, None)
    why = f"the weights of {title(name, module)} are in shards: only the forward of a sharded module gathers them"
    if method is not None:
        return why, f"FSDP(..., methods=({method!r},)), which has {method}() gather them too"
    return why, f"call the model itself, or FSDP(blocks={{..., {type(module).__name__}}})"


def _second_backward(site: Site) -> Cause | None:
    if "backward through the graph a second time" not in str(site.error) or not site.in_backward:
        return None
    why = "the loss reaches back into an earlier batch: something computed there was kept and used again"
    return why, "hidden = hidden.detach() on whatever is kept for the next batch"


def _arguments(site: Site) -> Cause | None:
    """A call of the model with other arguments than its `forward` takes."""
    inputs, model = site.inputs, site.owner.model
    if not isinstance(site.error, TypeError) or not isinstance(inputs, tuple) or _binds(model.forward, inputs):
        return None
    names = list(inspect.signature(model.forward).parameters)
    if site.role in ("predict", "report") and not splits_in_training(site.owner):
        # Which item is the target, and which rows count, is known to the user's training_step alone.
        why = f"the default predict_step gives all items but the last to {type(model).__name__}.forward, which takes"
        made = "StepOutput(None, output, target)" if site.role == "report" else "output"
        return (
            f"{why} ({', '.join(names)})",
            f"def predict_step(self, batch): ...; return {made}   # as in training_step",
        )
    why = (
        f"{type(model).__name__}.forward takes ({', '.join(names)}); the batch without its last item has {len(inputs)}"
    )
    if _ends_in_weights(site):
        return f"{why}: its last item, a number for each row, is taken as the target", _weighed_step(site)
    taken = ", ".join(f"batch[{index}]" for index in range(min(len(names), len(inputs))))
    return why, f"def split(self, batch): return ({taken},), batch[-1]"


def _ends_in_weights(site: Site) -> bool:
    """Whether a batch is (inputs ..., target, weight), with a weight for each row."""
    items = site.batch
    if not isinstance(items, tuple | list) or len(items) < 3 or not all(isinstance(one, Tensor) for one in items):
        return False
    *inputs, target, weight = items
    per_row = weight.ndim == 1 and weight.is_floating_point() and target.ndim > 0 and len(weight) == len(target)
    return per_row and _binds(site.owner.model.forward, tuple(inputs))


def _weighed_step(site: Site) -> str:
    """The training step that takes the mean of the loss over the rows, each by its weight."""
    loss, metrics = site.owner.loss, bool(site.owner.metrics)
    takes, calls = ("x", "x") if len(site.batch) == 3 else ("*x", "*x")
    name = getattr(loss, "__name__", "")
    each = "loss_of_rows({0})"
    if isinstance(loss, nn.Module):
        each = f"nn.{type(loss).__name__}(reduction='none')({{0}})"
    elif name and hasattr(nn.functional, name):
        each = f"F.{name}({{0}}, reduction='none')"
    mean = "MeanLoss(loss, weight.sum())"
    returned = f"StepOutput({mean}, output, y)" if metrics else mean
    lines = [
        f"{takes}, y, weight = batch",
        f"output = self.model({calls})",
        f"each = {each.format('output, y')}.reshape(len(weight), -1).mean(1)",
        "loss = (each * weight).sum() / weight.sum()",
        f"return {returned}",
    ]
    return f"def training_step(self, batch): {'; '.join(lines)}"


def _binds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _device_assert(site: Site) -> Cause | None:
    if "device-side assert" not in str(site.error):
        return None
    why = f"an index was out of range on {site.owner.device}, at this batch or a little earlier"
    return why, 'Trainer(..., device="cpu") names the place; nothing works on this device until the process ends'


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)


_KNOWN = (
    *(_memory, _device_assert, _no_forward, _backward_twice, loss_cause, _several_devices, _devices, _dtypes, _one_row),
    *(_numbers_of_an_embedding, _shards, _features, _channels, _no_gradient, _second_backward, _arguments),
)
