"""Finds mistakes in a model, its loss and its inputs, by observing a few updates and one evaluation."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.core.errors import StepError, listed, user_line
from trainwright.core.torch_private import BatchNorm
from trainwright.core.trees import parameters_in, tensors_in
from trainwright.data.opening import takes_batch_size
from trainwright.diagnostics.first_batch import FirstBatch, LossMistake
from trainwright.tools.trial import is_several, ready, variant
from trainwright.trainer import Trainer

UPDATES = 3
"""Maximum number of observed updates."""
LARGE, LARGE_FEATURE, TINY = 3.0, 10.0, 0.01
"""Inputs are out of scale if the root mean square of all inputs exceeds `LARGE`, that of one feature exceeds
`LARGE_FEATURE`, or all inputs are below `TINY`."""
ROUNDING = 0.02
"""Maximum gradient of a bias, relative to that of its weight, that counts as rounding. bfloat16 reaches 0.01."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_INPUT_LAYERS = (nn.Linear, nn.RNNBase, *_CONVOLUTIONS)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FUNCTIONS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: its name, the evidence, its cost, and a line to write instead."""

    name: str
    """A name of two or three words, such as "bias before BatchNorm"."""
    what: str
    """One sentence with the layers or lines."""
    why: str
    """The cost or harm."""
    fix: str
    """A line of code to paste."""
    where: tuple[str, ...] = ()
    """Layers, parameters, or lines as `file:line`."""
    level: Literal["problem", "note"] = "problem"
    """A "note" is often intended."""

    def __str__(self) -> str:
        """Return name, evidence, reason and fix on three lines."""
        return f"{self.name}: {self.what}\n  why   {self.why}\n  fix   {self.fix}"


def findings(
    trainer: Trainer[Any], batches: Sequence[Any], *, val: Any = None, batch_size: int | None = None
) -> list[Finding]:
    """Return the mistakes observed in up to three updates on host batches, and in the evaluation of one batch.

    It trains: call it inside `traceless(trainer)`. Errors of the step are raised as in `fit`. A loss that depends on no
    trained parameter is a finding.
    """
    watch = _Watch(trainer)
    per_update = trainer.accumulate[0][1]
    updates = max(1, min(UPDATES, len(batches) // per_update))
    used = [
        batches[index % len(batches)] for index in range((updates + 1) * per_update)
    ]  # one extra window, so that the epoch does not end
    first = FirstBatch(checks=True)
    with _uncompiled(), watch.hooks(), watch, cast(Any, first):  # torch's mode has no types
        try:
            _silent(trainer).fit(used, max_updates=updates)
        except (RuntimeError, StepError) as caught:
            if "does not require grad" not in str(caught) and "reaches no weight" not in str(caught):
                raise
            return [_no_gradient(str(caught).splitlines()[0])]
    found = [*_biases(watch), *map(_of_loss, first.found), *_eval_modes(watch), *_unreached(watch, updates=updates)]
    found += _train_modes(_evaluate(trainer, batches, val, batch_size=batch_size))
    return [*found, *_inputs(watch, batches)]


def _silent(trainer: Trainer[Any]) -> Trainer[Any]:
    """Return a trial trainer that does not compile, and continues after a non-finite loss."""
    return variant(trainer, fast=replace(trainer.fast, compile=None), on_nonfinite="ignore")


def _uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled models run eagerly: hooks are not called inside a graph."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _evaluate(trainer: Trainer[Any], batches: Sequence[Any], val: Any, *, batch_size: int | None) -> _Watch | None:
    """Observe the evaluation of one batch: of `val`, or, with default steps, of the training data."""
    hooks = trainer._hooks
    own = hooks.overrides_training_step or hooks.overrides_validation_step or hooks.overrides_evaluate
    if val is None and (own or hooks.has_custom_update):
        return None
    if is_several(val):
        val = next(iter(val.values()))
    watch, twin, batch = _Watch(trainer), _silent(trainer), batches[:1]
    if val is not None:
        batch = ready(twin, val, updates=1, batch_size=batch_size if takes_batch_size(val) else None)[:1]
    with _uncompiled(), watch.hooks(), watch:
        twin.evaluate(list(batch))
    return watch


class _Watch(TorchFunctionMode):
    """Records modes, inputs and neighbors of layers by module hooks, and dropout by function calls."""

    def __init__(self, trainer: Trainer[Any]) -> None:
        super().__init__()
        self.trainer = trainer
        self.names = {module: name or "model" for name, module in trainer.model.named_modules()}
        self.modes: defaultdict[nn.Module, set[bool]] = defaultdict(set)
        """BatchNorm or dropout layer -> its observed values of `training`."""
        self.norm_of: dict[nn.Module, nn.Module] = {}
        """Layer with a bias -> the BatchNorm in train mode that receives its output."""
        self.active_dropouts: list[str] = []
        """Layers or lines of user code with active dropout."""
        self.inputs: defaultdict[nn.Module, list[Tensor]] = defaultdict(list)
        """Layer -> its input data as (rows, features). The channels of images are features."""
        self.largest_gradients: dict[int, float] = {}
        """Id of a parameter -> its largest gradient. Parameters without a gradient are missing."""
        self._running: list[nn.Module] = []
        self._reads_data = True
        self._outputs: list[tuple[nn.Module, Tensor]] = []

    def hooks(self) -> ExitStack:
        """Register the hooks; return a context that removes them."""
        stack = ExitStack()
        for module in self.names:
            stack.callback(module.register_forward_pre_hook(self._enter).remove)
            stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        for _, _, parameter in parameters_of(self.trainer):
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(self._note_gradient).remove)
        return stack

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the function, and note active dropout."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _DROPOUT_FUNCTIONS:
            settings = {"p": 0.5, "training": True} | kwargs
            settings |= dict(zip(("input", "p", "training"), args, strict=False))
            self._note_dropout(bool(settings["training"] and settings["p"]))
        elif name == "scaled_dot_product_attention":
            self._note_dropout(bool((*args[4:5], kwargs.get("dropout_p", 0.0))[0]))
        return func(*args, **kwargs)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._running:
            self._reads_data = True
        self._running.append(module)
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if isinstance(module, (BatchNorm, *_DROPOUTS)):
            self.modes[module].add(module.training)
        if isinstance(module, BatchNorm) and module.training:
            self.norm_of.update({layer: module for layer, output in self._outputs if output is given})
        if self._reads_data and given is not None and isinstance(module, _INPUT_LAYERS):
            dense = given.layout is torch.strided and not given.is_nested and given.ndim > 1
            if dense and given.is_floating_point() and not given.requires_grad and len(self.inputs[module]) < UPDATES:
                rows = given.movedim(1, -1) if isinstance(module, _CONVOLUTIONS) else given
                self.inputs[module].append(rows.detach().flatten(0, -2).to("cpu", torch.float64))
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            self._reads_data = False

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running.pop()
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and module.bias is not None and module.bias.requires_grad:
            self._outputs.append((module, output))
        if not self._running:
            self._outputs.clear()

    def _note_gradient(self, parameter: Tensor) -> None:
        gradient, largest = parameter.grad, 0.0
        if gradient is not None and gradient.layout is torch.strided:
            largest = float(gradient.detach().abs().max()) if gradient.numel() else 0.0
        self.largest_gradients[id(parameter)] = max(largest, self.largest_gradients.get(id(parameter), 0.0))

    def _note_dropout(self, active: bool) -> None:
        layer = self._running[-1] if self._running else None
        if active:
            own = isinstance(layer, _DROPOUTS)
            self.active_dropouts.append(self.names[layer] if own else user_line() or "the step")

    def is_trained(self, module: nn.Module) -> bool:
        """Return whether a layer is trained; for a layer without parameters, its nearest parent with some."""
        name, model = self.names[module], self.trainer.model
        while name and name != "model":
            parameters = list(model.get_submodule(name).parameters())
            if parameters:
                return any(parameter.requires_grad for parameter in parameters)
            name = name.rpartition(".")[0]
        return any(parameter.requires_grad for parameter in model.parameters())


def parameters_of(trainer: Trainer[Any]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (root, name, parameter) of the model, a loss module, and of parameters in optimizers alone."""
    known: set[int] = set()
    for root, module in (("model", trainer.model), ("loss", trainer.loss)):
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            known.add(id(parameter))
            yield root, name, parameter
    for name, optimizer in trainer.optimizers.items():
        for index, held in enumerate(parameters_in(optimizer)):
            if id(held) not in known and isinstance(held, nn.Parameter):
                yield name, f"parameter {index}", held


def _biases(watch: _Watch) -> Iterator[Finding]:
    """Find biases that the following BatchNorm removes: their gradient is rounding."""
    largest, layers = watch.largest_gradients, []
    for layer in watch.norm_of:
        bias, weight = (largest.get(id(getattr(layer, name)), 0.0) for name in ("bias", "weight"))
        if weight and bias <= ROUNDING * weight:
            layers.append(layer)
    if layers:
        pairs = [f"{watch.names[layer]} before {watch.names[watch.norm_of[layer]]}" for layer in layers]
        line = repr(layers[0]).replace(", bias=True", "").removesuffix(")")
        yield Finding(
            "bias before BatchNorm",
            f"the bias of {listed(pairs)} has no effect",
            "the normalization subtracts it with the mean: its gradient is rounding, and adding it takes time",
            f"nn.{line}, bias=False)  # {watch.names[layers[0]]}",
            tuple(watch.names[layer] for layer in layers),
        )


def _of_loss(mistake: LossMistake) -> Finding:
    """Return the finding for a loss of logits or log-probabilities that gets probabilities."""
    why = f"this is another loss, which cannot come near 0: it got {mistake.have}, and takes {mistake.want}"
    return Finding("input of the loss", mistake.what, why, mistake.fix)


def _eval_modes(watch: _Watch) -> Iterator[Finding]:
    """Find BatchNorm and dropout layers of trained parts in eval mode in every update."""
    quiet = [module for module, modes in watch.modes.items() if modes == {False} and watch.is_trained(module)]
    if quiet:
        names = [watch.names[module] for module in quiet]
        yield Finding(
            "layers in eval mode",
            f"in eval mode while the model is trained: {listed(names)}",
            "dropout does nothing, and BatchNorm normalizes by statistics that stay while the layers before it change",
            'model.train()  # after each model.eval() of yours; or freeze(model, "...") where it is intended',
            tuple(names),
        )


def _train_modes(watch: _Watch | None) -> Iterator[Finding]:
    """Find active dropout, and BatchNorm with batch statistics, in an evaluation."""
    if watch is None:
        return
    moved = [module for module, modes in watch.modes.items() if True in modes and isinstance(module, BatchNorm)]
    places = [watch.names[module] for module in moved if module.running_mean is not None]
    places = list(dict.fromkeys([*places, *watch.active_dropouts]))
    if places:
        yield Finding(
            "train mode in validation",
            f"dropout or BatchNorm works as in training in an evaluation: {listed(places)}",
            "a row's output depends on random numbers or on other rows, and validation is worse than the model",
            "F.dropout(x, p, training=self.training)  # and no self.model.train() in a validation step",
            tuple(places),
        )


def _no_gradient(evidence: str, names: Sequence[str] = ()) -> Finding:
    return Finding(
        "loss reaches no parameter",
        evidence,
        "the model is not trained",
        "return the loss as it was computed: no detach(), item() or torch.no_grad() around the model's output",
        tuple(names),
    )


def _unreached(watch: _Watch, *, updates: int) -> Iterator[Finding]:
    """Find trained parameters without a gradient, and parameters of optimizers that belong to another model."""
    trainer, reached = watch.trainer, watch.largest_gradients
    resting = _resting(trainer, reached)
    trained = [one for one in parameters_of(trainer) if one[2].requires_grad and id(one[2]) not in resting]
    lost = [(root, name) for root, name, one in trained if id(one) not in reached]
    own = [f"{root}.{name}" for root, name in lost if root in ("model", "loss")]
    strange = [f"{root}: {name}" for root, name in lost if root not in ("model", "loss")]
    seen = f"in {updates} update{'s' if updates > 1 else ''}"
    if own and not any(root == "model" and id(one) in reached for root, _, one in trained):
        yield _no_gradient(f"no parameter of the model got a gradient {seen}", own)
    elif own:
        root, _, name = own[0].partition(".")
        layer = name.rpartition(".")[0]
        siblings = [f"{root}.{other}" for at, other, _ in trained if at == root and other.startswith(f"{layer}.")]
        yield Finding(
            "unused parameters",
            f"{len(own)} trained parameters got no gradient {seen}: {listed(own)}",
            "they stay as they were initialized, take memory, and stop a DDP run that does not look for them",
            f'freeze({root}, "{layer if layer and set(siblings) <= set(own) else name}")  # or use it, or delete it',
            tuple(own),
        )
    if strange:
        yield Finding(
            "parameters of another model",
            f"{len(strange)} parameters in the optimizer are not the model's and got no gradient: {listed(strange)}",
            "the optimizer holds weights that nothing trains, such as those of a model before deepcopy",
            "optimizer = torch.optim.AdamW(model.parameters())  # of the model that is given to the Trainer",
            tuple(strange),
        )


def _resting(trainer: Trainer[Any], reached: dict[int, float]) -> set[int]:
    """Return the parameters of optimizers that a custom `update` did not use in these updates."""
    if not trainer._hooks.has_custom_update or len(trainer.optimizers) < 2:
        return set()
    each = [{id(p) for p in parameters_in(one)} for one in trainer.optimizers.values()]
    return {one for held in each if held.isdisjoint(reached) for one in held}


def _inputs(watch: _Watch, batches: Sequence[Any]) -> Iterator[Finding]:
    """Find inputs out of scale in the first layer with parameters.

    The rule: the root mean square of all inputs exceeds 3, or that of one feature (for images: channel) exceeds 10, or
    no input reaches 0.01. No finding if that layer is an embedding or a normalization.
    """
    for module, recorded in watch.inputs.items():
        layer, rows = watch.names[module], torch.cat(recorded)
        square, largest = rows.square().mean(0), float(rows.abs().max())
        if square.mean() > LARGE**2 or square.max() > LARGE_FEATURE**2 or 0 < largest < TINY:
            yield Finding(
                "inputs not normalized",
                f"the inputs of {layer} have mean {rows.mean():.3g}, standard deviation {rows.std():.3g}",
                "large or offset inputs make the loss steep in some directions and flat in others: rates must be small",
                _normalizing(rows, batches, images=isinstance(module, _CONVOLUTIONS)),
                (layer,),
            )


def _normalizing(rows: Tensor, batches: Sequence[Any], *, images: bool) -> str:
    """Return a line of code that normalizes the inputs. `Normalize` first scales bytes to 0 to 1."""
    if not images or rows.shape[1] > 4 or not bool((rows.std(0) > 0).all()):
        return "x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)  # of the training rows"
    unit = 255 if any(one.dtype is torch.uint8 for one in tensors_in(batches[0])) else 1
    mean, std = (tuple(round(float(one) / unit, 4) for one in each) for each in (rows.mean(0), rows.std(0)))
    return f"nn.Sequential(Normalize(mean={mean}, std={std}), model)"
