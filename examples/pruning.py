"""Prune a network by masking weights and by removing channels, and compare size, speed and accuracy.

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Time      about 10 seconds on one CPU core
Expected  half the channels give a model with about a quarter of the parameters and operations, which takes about half
          the time for a batch, and is as accurate after fine-tuning; masks alone make nothing smaller or faster
Copy      `mask_weights`, `shrink` and `remove_channels` are for your own code. The last two are for networks that are
          one nn.Sequential; for residual sums, attention and grouped convolutions there is torch-pruning
          (github.com/VainF/Torch-Pruning), which follows channels through the graph of any model
"""

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import prune

from trainwright import OneCycle, Trainer, accuracy, batches, summary

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
BY_CHANNEL = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Dropout, nn.Dropout2d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)
"""Modules that compute each channel by itself and hold no weights."""


def mask_weights(model: nn.Module, amount: float) -> None:
    """Set the share `amount` of the weights of linear layers and convolutions to zero, those nearest to zero.

    `amount` is the complete share: called again with more, masked weights stay masked (gradual pruning, from
    `begin_epoch`). Torch's `prune` computes `weight` from the parameter `weight_orig`, the same object as `weight` was,
    and the buffer `weight_mask`: optimizers made before stay valid, and masked weights get no gradient. Mask a model
    before the checkpoint of a masked one is loaded.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, WEIGHTED)]
    ranking = torch.cat([magnitudes(layer).flatten() for layer in layers])
    zeros = round(amount * len(ranking))
    if not 0 < amount < 1 or zeros < int((ranking < 0).sum()):
        raise ValueError(f"mask_weights(amount={amount}): want a share between 0 and 1, and no less than is masked")
    keeps = torch.ones(len(ranking))
    keeps[ranking.argsort(stable=True)[:zeros]] = 0
    for layer, piece in zip(layers, keeps.split([layer.weight.numel() for layer in layers]), strict=True):
        mask = piece.view_as(layer.weight).to(layer.weight)
        if is_masked(layer):
            layer.weight_mask = mask  # not in place: an average holds the one before, and writes its values back
        else:
            prune.custom_from_mask(layer, "weight", mask)
        # Torch's prune leaves a weight with a graph in its module, and copy.deepcopy(model), which averages and trials
        # of a trainer use, refuses it. Without a graph until the next forward, which computes it from weight_orig.
        layer.weight = (layer.weight_orig * layer.weight_mask).detach()


def remove_masks(model: nn.Module) -> None:
    """Make plain parameters of masked weights, which are zero then; more training would move them."""
    for module in model.modules():
        if is_masked(module):
            prune.remove(module, "weight")


def is_masked(module: nn.Module) -> bool:
    return "weight_mask" in dict(module.named_buffers(recurse=False))


def magnitudes(layer: Any) -> Tensor:
    """Return the absolute weights; below zero where they are masked already."""
    weight: Tensor = layer.weight_orig if is_masked(layer) else layer.weight
    worth = weight.detach().abs().double()
    if is_masked(layer):
        worth[layer.weight_mask == 0] = -1
    return worth.cpu()


@dataclass
class ChannelUsers:
    """The layers that use the channels of a layer, by their places in the network."""

    norms: list[int]
    reader: int


def channel_users(layers: Sequence[Any]) -> dict[int, ChannelUsers]:
    """Return the layers whose channels can be removed, by place, with the layers that scale and read these channels.

    Left out are the last layer, whose channels are the output, and layers before a module that is not known here.
    """
    found: dict[int, ChannelUsers] = {}
    for place, layer in enumerate(layers):
        if not is_plain(layer, layers):
            continue
        flat, norms = isinstance(layer, nn.Linear), list[int]()
        for later in range(place + 1, len(layers)):
            user = layers[later]
            if isinstance(user, NORMS):
                norms.append(later)
            elif isinstance(user, WEIGHTED):
                if is_plain(user, layers) and flat == isinstance(user, nn.Linear):
                    found[place] = ChannelUsers(norms, later)
                break
            elif isinstance(user, nn.Flatten) and (user.start_dim, user.end_dim) == (1, -1):
                flat = True
            elif not isinstance(user, BY_CHANNEL):
                break
    return found


def is_plain(layer: Any, layers: Sequence[Any]) -> bool:
    """Whether a layer is linear or a convolution, without groups and masks, and runs once."""
    known = isinstance(layer, WEIGHTED) and getattr(layer, "groups", 1) == 1
    return known and not is_masked(layer) and layers.count(layer) == 1


def shrink(model: nn.Sequential, amount: float, *, by: Literal["l1", "bn"] = "l1") -> nn.Sequential:
    """Return a copy of `model` without the `amount` of each layer's channels that rank last; `model` stays.

    `by`: "l1" ranks channels by the mean of the absolute weights that make them (Li et al., arXiv 1608.08710), "bn" by
    the absolute scale of the BatchNorm after them (network slimming, arXiv 1708.06519); a layer without one keeps its
    channels. The copy needs an optimizer and a Trainer of its own, and some epochs of fine-tuning.
    """
    if not 0 < amount < 1:
        raise ValueError(f"shrink(amount={amount}): want a share between 0 and 1")
    layers, gone = flattened(model), dict[int, list[int]]()
    for place, users in channel_users(layers).items():
        size = layers[place].weight.shape[0]
        worth = layers[place].weight.detach().abs().flatten(1).mean(1)
        if by == "bn":
            norm = next((layers[one] for one in users.norms if layers[one].num_features == size), None)
            if norm is None or norm.weight is None:
                continue
            worth = norm.weight.detach().abs()
        gone[place] = worth.argsort(stable=True)[: min(size - 1, int(amount * size + 1e-9))].tolist()
    return remove_channels(model, gone)


def remove_channels(model: nn.Sequential, channels: Mapping[int, Collection[int]]) -> nn.Sequential:
    """Return a copy of `model`, one flat nn.Sequential, without some channels of some layers; `model` stays.

    `channels`: by the place of a layer in the flat network. The copy computes what `model` would if the weights that
    read these channels were zero.
    """
    layers = flattened(copy.deepcopy(model))
    users = channel_users(layers)
    if refused := set(channels) - set(users):
        raise ValueError(
            f"remove_channels: layers {sorted(refused)} must keep their channels; others are {list(users)}"
        )
    for place, removed in channels.items():
        size = layers[place].weight.shape[0]
        kept = [channel for channel in range(size) if channel not in removed]
        if not kept or not set(removed) <= set(range(size)):
            raise ValueError(f"remove_channels({{{place}: {removed}}}): want some of the {size} channels, not all")
        narrow(layers[place], ("weight", "bias"), kept, dim=0)
        for norm in users[place].norms:
            # After a Flatten each channel is several features in a row.
            wide = features(kept, layers[norm].num_features // size)
            narrow(layers[norm], ("weight", "bias", "running_mean", "running_var"), wide, dim=0)
            layers[norm].num_features = len(wide)
        reader = layers[users[place].reader]
        narrow(reader, ("weight",), features(kept, reader.weight.shape[1] // size), dim=1)
    for layer in layers:
        name_sizes(layer)
    return nn.Sequential(*layers)


def flattened(model: nn.Module) -> list[Any]:
    """Return the modules of an nn.Sequential in the order in which they run, those of nested ones among them."""
    if type(model) is not nn.Sequential:
        return [model]
    return [layer for child in model for layer in flattened(child)]


def features(channels: Sequence[int], width: int) -> list[int]:
    return [channel * width + i for channel in channels for i in range(width)]


def narrow(module: nn.Module, names: Sequence[str], kept: Sequence[int], *, dim: int) -> None:
    """Keep some rows or columns of the parameters and buffers of a module."""
    for name in names:
        tensor = getattr(module, name, None)
        if tensor is None:
            continue
        left = tensor.detach().index_select(dim, torch.tensor(kept, device=tensor.device))
        trained = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(left, requires_grad=tensor.requires_grad) if trained else left)


def name_sizes(layer: Any) -> None:
    """Set the sizes that a layer prints to those of its weights."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, CONVOLUTIONS):
        layer.out_channels, layer.in_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64), nn.Flatten(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)


def fit(model: nn.Module, train: Any, *, epochs: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), schedule=OneCycle(max_lr=lr), console=False)
    trainer.fit(train, epochs=epochs)


def milliseconds(model: nn.Module, images: torch.Tensor) -> float:
    """The median time of a forward."""
    model.eval()
    seconds = []
    with torch.inference_mode():
        for _ in range(30):
            begin = time.perf_counter()
            model(images).cpu()  # which waits for a GPU
            seconds.append(time.perf_counter() - begin)
    model.train()
    return 1000 * sorted(seconds)[len(seconds) // 2]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(targets)
    order = torch.randperm(len(images))
    training, held_out = order[:1400], order[1400:]
    train = batches((images[training], classes[training]), 32, shuffle=True, seed=0)
    val = batches((images[held_out], classes[held_out]), 397)
    batch = images[held_out][:256]

    print(f"{'':<34}{'parameters':>12}{'not zero':>10}{'MFLOPs':>9}{'ms':>8}{'accuracy':>10}")

    def row(name: str, model: nn.Module) -> None:
        trainer = Trainer(model, None, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False)
        right = trainer.evaluate(val)["val_accuracy"]
        weights = list(model.parameters())
        size, used = sum(p.numel() for p in weights), sum(int(p.count_nonzero()) for p in weights)
        flops = summary(model, batch)[""].flops / len(batch) / 1e6
        taken = milliseconds(model, batch.to(trainer.device))
        print(f"{name:<34}{size:>12,}{used:>10,}{flops:>9.2f}{taken:>8.2f}{right:>10.1%}")

    model = network()
    fit(model, train, epochs=8, lr=3e-3)
    row("trained", model)

    masked = copy.deepcopy(model)
    mask_weights(masked, 0.9)  # nine of ten weights, those nearest to zero
    fit(masked, train, epochs=3, lr=1e-3)  # the others learn to do without them
    remove_masks(masked)
    row("90 % of weights masked, tuned", masked)

    smaller = shrink(model, 0.5, by="bn")  # by the scales of BatchNorm; the layer that ends the network stays
    row("half of the channels removed", smaller)
    fit(smaller, train, epochs=3, lr=1e-3)  # a new model, with an optimizer of its own
    row("half of the channels, tuned", smaller)


if __name__ == "__main__":
    main()
