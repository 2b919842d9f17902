"""Findings in the model and the loss: biases without effect, wrong modes, parameters that nothing reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from trainwright.core.errors import listed
from trainwright.core.trees import parameters_in
from trainwright.tools.finding import Finding
from trainwright.tools.watching import Calls, Recording
from trainwright.trainer import Trainer

FEW_ROWS = 4
"""Rows up to which the mean and variance of a batch say little."""


def of_training(trainer: Trainer[Any], seen: Recording, *, updates: int) -> list[Finding]:
    """What is found in the updates that were seen."""
    found = [*_biases(trainer.model, seen), *_stacks(trainer.model, seen), *_losses(seen)]
    found += [*_modes(trainer.model, seen), *_few_rows(seen), *_unreached(trainer, seen, updates=updates)]
    return [*found, *_frozen(trainer.model), *_constant(seen)]


def of_evaluation(seen: Recording | None) -> list[Finding]:
    """What is found in an evaluation: what still draws, or normalises by the batch."""
    if seen is None:
        return []
    drawn = [_named(name, calls) for name, calls in seen.dropouts.items() if calls.on]
    found = []
    if drawn:
        found.append(
            Finding(
                "dropout in validation",
                f"dropout is still on in an evaluation: {listed(drawn)}",
                "outputs are drawn anew each time, and validation is worse than the model is",
                "F.dropout(x, p, training=self.training)  # and dropout_p=p if self.training else 0.0",
                tuple(drawn),
            )
        )
    moved = [_named(name, calls) for name, calls in seen.norms.items() if calls.on and calls.tracks]
    if moved:
        found.append(
            Finding(
                "BatchNorm in validation",
                f"in train mode in an evaluation: {listed(moved)}",
                "a row's output depends on its neighbours, and validation data move the running statistics",
                "leave modes to evaluate(): no self.model.train() in a validation step, no training=True in a forward",
                tuple(moved),
            )
        )
    return found


def of_anomaly(seen: Recording) -> Iterator[Finding]:
    """Torch's anomaly mode, left on after a search for a NaN, or around a step."""
    if seen.anomaly is not None:
        yield Finding(
            "anomaly mode on",
            "torch's anomaly detection is on in every update" + (f", first at {seen.anomaly}" if seen.anomaly else ""),
            "each operation keeps a traceback, and each gradient is looked through for NaN: updates take much longer",
            "torch.autograd.set_detect_anomaly(False)  # for one search: with anomaly(): trainer.fit(...)",
            (seen.anomaly,) if seen.anomaly else (),
        )


def trained_by(trainer: Trainer[Any]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The parameters of the model, of a loss module, and what an optimizer holds beside them; root, name, itself."""
    known: set[int] = set()
    roots = {"model": trainer.model, "loss": trainer.loss}
    for root, module in roots.items():
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
                known.add(id(parameter))
                yield root, name, parameter
    for name, optimizer in trainer.optimizers.items():
        for index, held in enumerate(parameters_in(optimizer)):
            if id(held) not in known and isinstance(held, nn.Parameter):
                yield name, f"parameter {index}", held


def _biases(model: nn.Module, seen: Recording) -> Iterator[Finding]:
    """Layers all of whose outputs go into a normalisation by the batch, and nowhere else."""
    layers = [name for name, calls in seen.biased.items() if seen.normalised[name] == calls]
    if not layers:
        return
    pairs = [f"{name} before {seen.norm_of[name]}" for name in layers]
    yield Finding(
        "bias before BatchNorm",
        f"the bias of {listed(pairs)} has no effect",
        "the normalisation subtracts it again with the mean: its gradient is mere rounding, and adding it takes time",
        without_bias(model, layers[0]),
        tuple(layers),
    )


def without_bias(model: nn.Module, name: str) -> str:
    """The line that builds a layer of a model without its bias."""
    layer = model if name == "model" else model.get_submodule(name)
    text = repr(layer).replace(", bias=True", "")
    if "\n" in text or not text.endswith(")"):
        return f"{name}: bias=False"
    return f"nn.{text[:-1]}, bias=False)  # {name}"


def _stacks(model: nn.Module, seen: Recording) -> Iterator[Finding]:
    """Two linear layers in a row whose product is no smaller than one layer could be."""
    pairs = []
    for (first, second), _ in seen.stacked.items():
        one, other = _module(model, first), _module(model, second)
        if isinstance(one, nn.Linear) and isinstance(other, nn.Linear):
            narrow = one.out_features < min(one.in_features, other.out_features)
            if not narrow and first != second:
                pairs.append((first, second))
    if pairs:
        names = [f"{first} and {second}" for first, second in pairs]
        yield Finding(
            "linear layers in a row",
            f"nothing lies between {listed(names)}: together they are one linear layer",
            "the second costs time and parameters, and adds nothing that one layer could not compute",
            "nn.Sequential(first, nn.ReLU(), second)",
            tuple(names),
            level="note",
        )


_WRONG = {
    "softmax": ("probabilities", "takes logits, and applies its own softmax"),
    "sigmoid": ("probabilities", "takes logits"),
    "values above 0": ("values above 0", "takes log-probabilities"),
}
_TITLES = {
    "cross_entropy": "CrossEntropyLoss",
    "nll_loss": "NLLLoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
}


def _losses(seen: Recording) -> Iterator[Finding]:
    for (loss, made_by), place in seen.losses.items():
        got, takes = _WRONG[made_by]
        title = _TITLES[loss]
        if loss == "nll_loss":
            takes, fix = "takes log-probabilities", "loss=nn.CrossEntropyLoss()  # on the logits themselves"
        else:
            fix = f"return logits  # without {made_by}: {title} has it inside"
        what = f"{title} gets {got}" + (f", of the {made_by} at {place}" if place and made_by != got else "")
        yield Finding(
            f"{made_by} before {title}" if made_by != got else f"{title} of no log-probabilities",
            f"{what}; it {takes}",
            "the loss is another one than is meant: its gradients are small, and it cannot come near 0",
            fix,
            (place,) if place else (),
        )


def _modes(model: nn.Module, seen: Recording) -> Iterator[Finding]:
    """Layers that were in eval mode whenever they were trained through."""
    still = [(name, calls) for name, calls in seen.norms.items() if calls.off and not calls.on]
    norms = [_named(name, calls) for name, calls in still if _is_trained(_module(model, name))]
    if norms:
        yield Finding(
            "BatchNorm in eval mode",
            f"in eval mode while its parameters are trained: {listed(norms)}",
            "it normalises by statistics that stay as they are while the layers before it change",
            'model.train()  # or freeze(model, "...") where it is meant to stay',
            tuple(norms),
        )
    quiet = [(name, calls) for name, calls in seen.dropouts.items() if calls.off and not calls.on]
    drops = [_named(name, calls) for name, calls in quiet if _is_alive(model, calls)]
    if drops:
        yield Finding(
            "dropout in eval mode",
            f"off in every update that was seen: {listed(drops)}",
            "the model is trained without the regularisation that it was written with",
            "model.train()  # after each self.model.eval() of your own",
            tuple(drops),
        )


def _is_trained(layer: nn.Module | None) -> bool:
    """Whether a layer has parameters that are trained."""
    return layer is not None and any(parameter.requires_grad for parameter in layer.parameters())


def _is_alive(model: nn.Module, calls: Calls) -> bool:
    """Whether what lies around a layer without parameters is trained."""
    names = {id(module): own for own, module in model.named_modules()}
    if id(calls.module) not in names:
        return False  # a teacher's, or a function of the step's
    around = names[id(calls.module)]
    while around:
        parameters = list(model.get_submodule(around).parameters())
        if parameters:
            return any(parameter.requires_grad for parameter in parameters)
        around = around.rpartition(".")[0]
    return any(parameter.requires_grad for parameter in model.parameters())


def _few_rows(seen: Recording) -> Iterator[Finding]:
    few = {name: calls.rows for name, calls in seen.norms.items() if calls.on and 0 < calls.rows <= FEW_ROWS}
    if few:
        rows = max(few.values())
        yield Finding(
            "BatchNorm of few rows",
            f"normalised by {rows} row{'s' if rows > 1 else ''} at a time: {listed(list(few))}",
            "mean and variance of so few rows are mostly noise; accumulate does not help: each micro-batch has its own",
            "nn.GroupNorm(8, channels)  # in its place; or a larger batch_size with a smaller accumulate",
            tuple(few),
        )


def _unreached(trainer: Trainer[Any], seen: Recording, *, updates: int) -> Iterator[Finding]:
    """Trained parameters that no gradient reached, and parameters of optimizers that no step knows."""
    resting = _resting(trainer, seen)
    trained = [(r, n, id(one)) for r, n, one in trained_by(trainer) if one.requires_grad and id(one) not in resting]
    lost = [(root, name) for root, name, one in trained if one not in seen.reached]
    told = f"in {updates} update{'s' if updates > 1 else ''}"
    own = [f"{root}.{name}" for root, name in lost if root in ("model", "loss")]
    if own and not any(root == "model" and one in seen.reached for root, _, one in trained):
        yield Finding(
            "loss reaches no parameter",
            f"no parameter of the model got a gradient {told}",
            "the model is not trained: what is trained lies beside it",
            "return the loss as it was computed: no detach(), item() or torch.no_grad() around the model's output",
            tuple(own),
        )
    elif own:
        yield Finding(
            "unused parameters",
            f"{len(own)} trained parameters got no gradient {told}: {listed(own)}",
            "they stay as they were initialised, take memory, and stop a DDP run that does not look for them",
            _freezing(own, [f"{root}.{name}" for root, name, _ in trained]),
            tuple(own),
        )
    strange = [f"{root}: {name}" for root, name in lost if root not in ("model", "loss")]
    if strange:
        yield Finding(
            "parameters of another model",
            f"{len(strange)} in the optimizer are not the model's, and got no gradient {told}: {listed(strange)}",
            "the optimizer holds a copy of weights that nothing trains, such as those of a model before deepcopy",
            "optimizer = torch.optim.AdamW(model.parameters())  # of the model that is given to the Trainer",
            tuple(strange),
        )


def _resting(trainer: Trainer[Any], seen: Recording) -> set[int]:
    """Parameters of optimizers whose turn did not come, where an `update` of the user's own deals out the turns."""
    if not trainer._hooks.updates_itself or len(trainer.optimizers) < 2:
        return set()
    each = [{id(p) for p in parameters_in(one)} for one in trainer.optimizers.values()]
    return {one for held in each if held.isdisjoint(seen.reached) for one in held}


def _freezing(lost: list[str], trained: list[str]) -> str:
    """The line that freezes the first of what got no gradient: its whole layer, where that is so of all of it."""
    root, _, name = lost[0].partition(".")
    layer = name.rpartition(".")[0]
    whole = layer and all(one in lost for one in trained if one.startswith(f"{root}.{layer}."))
    return f'freeze({root}, "{layer if whole else name}")  # or use it in forward, or delete it'


def _frozen(model: nn.Module) -> Iterator[Finding]:
    """Frozen parameters: those of layers whose others are trained, and whole layers; both are often meant so."""
    parts, layers = [], []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        frozen = [f"{name}.{key}".lstrip(".") for key, one in own.items() if not one.requires_grad]
        if len(frozen) < len(own):
            parts += frozen
        elif frozen:
            layers.append(name or "model")
    for found, where in ((parts, "in layers that are trained otherwise"), (layers, "as whole layers")):
        if found:
            yield Finding(
                "frozen parameters" if found is parts else "frozen layers",
                f"frozen {where}: {listed(found)}",
                "they keep their values; that is meant in fine-tuning, and an oversight elsewhere",
                f'unfreeze(model, "{found[0]}")' if found[0] != "model" else "unfreeze(model)",
                tuple(found),
                level="note",
            )


def _constant(seen: Recording) -> Iterator[Finding]:
    if seen.constant:
        names = sorted(seen.constant)
        yield Finding(
            "loss without a gradient",
            f"training_step returns losses that no gradient can flow through: {listed(names)}",
            "they are added to the loss as constants: nothing is trained by them",
            f'self.log("{names[0]}", value)  # for a number to report; else no detach() or item() on the way to it',
            tuple(names),
        )


def _module(model: nn.Module, name: str) -> nn.Module | None:
    if name == "model":
        return model
    return dict(model.named_modules()).get(name)


def _named(name: str, calls: Calls) -> str:
    return f"{name} ({calls.place})" if calls.place and calls.place not in name and ":" in calls.place else name
