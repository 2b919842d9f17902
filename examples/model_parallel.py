"""Train one network with its halves on two GPUs, or with both on the CPU if there are fewer than two GPUs.

    python examples/model_parallel.py

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Time      2 to 4 seconds of training on one CPU core
Expected  at least 97 % of the held-out digits right; 97.7 % on the CPU with torch 2.13.0
Writes    runs/model_parallel; started again, it continues from there

The Trainer does not move such a model. It moves each batch to the device of the first parameters. The model's `forward`
moves the activations from one part to the next, and the output back to the device of the batch. The parts wait for each
other, so this is for a model that does not fit on one device, not for speed.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import EMA, Checkpoint, Trainer, accuracy, batches


class TwoParts(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()).to(first)
        self.second = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(second)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden: Tensor = self.first(pixels)
        output: Tensor = self.second(hidden.to(next(self.second.parameters()).device))
        return output.to(pixels.device)  # the loss is computed where the targets are


def two_devices() -> tuple[torch.device, torch.device]:
    if torch.cuda.device_count() >= 2:
        return torch.device("cuda:0"), torch.device("cuda:1")
    print(f"CUDA devices: {torch.cuda.device_count()}. Both parts of the model are on the CPU: nothing lies apart.")
    return torch.device("cpu"), torch.device("cpu")


def train(directory: str, *, epochs: int) -> float:
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(targets)
    order = torch.randperm(len(images))
    train, held_out = order[:1400], order[1400:]

    first, second = two_devices()
    model = TwoParts(first, second)
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        clip=1.0,  # the norm is over both parts
        average=EMA(0.98),
        checkpoint=Checkpoint(directory),
        device="cpu" if first == second else "auto",  # there is no device to choose for a model that lies on two
    )
    val = batches((images[held_out], classes[held_out]), 256)
    training = batches((images[train], classes[train]), 32, shuffle=True, seed=0)
    trainer.fit(training, val, epochs=epochs, resume="auto")

    first, second = (next(part.parameters()).device for part in (model.first, model.second))
    print(f"first part on {first}, second part on {second}")
    return trainer.evaluate(val, name="held_out")["held_out_accuracy"]


def main() -> None:
    right = train("runs/model_parallel", epochs=12)
    print(f"{right:.1%} of the held-out digits are right")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more
    main()
