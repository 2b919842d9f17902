"""A transformer language model of Python's documentation, with weights sharded over the processes by FSDP.

    torchrun --nproc-per-node 2 examples/fsdp_char_lm.py
    python examples/fsdp_char_lm.py                                   # one process, the same numbers

Data      the text behind Python's `help("while")`, 465,000 characters in Python 3.11; its last tenth is held out
Expected  2.19 bits per character of held-out text (3.3 by counting pairs of characters), the same alone and in two
Time      one minute of each of two cores, or of one alone
Writes    runs/fsdp_char_lm: checkpoints, and weights.safetensors for one process

Each process holds half of every weight, gradient and moment. The weights of a block are gathered for its forward and
its backward. All processes must therefore run the model together: in training, in evaluation, and to generate text.
"""

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import EMA, FSDP, Checkpoint, Cosine, Trainer, adamw, batches, load_weights
from trainwright.metrics import Derived

TEXT = "".join(topics[name] for name in sorted(topics))
CHARACTERS = sorted(set(TEXT))
LENGTH = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Writer(nn.Module):
    def __init__(self, width: int = 96, blocks: int = 3) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(blocks))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits.transpose(1, 2).contiguous()  # rows x characters x places; FSDP warns of views


def pieces(text: str) -> tuple[Tensor, Tensor]:
    """Inputs, and the character that follows each of theirs."""
    number = {character: index for index, character in enumerate(CHARACTERS)}
    letters = torch.tensor([number[character] for character in text])
    whole = (len(letters) - 1) // LENGTH * LENGTH
    return letters[:whole].view(-1, LENGTH), letters[1 : whole + 1].view(-1, LENGTH)


@torch.no_grad()
def write(model: nn.Module, length: int) -> str:
    """Text that the model continues with. Every process runs it: the same model, draws from the same seed."""
    generator = torch.Generator().manual_seed(0)
    model.eval()
    letters = torch.tensor([[CHARACTERS.index("\n")]])
    for _ in range(length):
        chances = model(letters[:, -LENGTH:])[:, :, -1].float().softmax(1)
        letters = torch.cat([letters, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return "".join(CHARACTERS[letter] for letter in letters[0])


def train(directory: Path, *, epochs: int) -> None:
    torch.manual_seed(0)
    cut = len(TEXT) * 9 // 10
    inputs, following = pieces(TEXT[:cut])
    val = batches(pieces(TEXT[cut:]), 128)
    trainer = Trainer(
        Writer(),
        adamw(lr=3e-3, weight_decay=0.1),  # a function of the model: it is called when the weights are in shards
        nn.CrossEntropyLoss(),
        metrics={"bits": Derived(lambda numbers: numbers["loss"] / math.log(2))},
        clip=1.0,
        schedule=Cosine(warmup=0.1),
        average=EMA(0.98),
        checkpoint=Checkpoint(directory, best="val_loss") if directory else None,
        parallel=FSDP(blocks={Block}),
        device="cpu",
    )
    resume = "auto" if directory else None
    trainer.fit(batches((inputs, following), 32, shuffle=True, seed=0), val, epochs=epochs, resume=resume)

    # Not `if trainer.is_main: write(...)`: its forwards would wait for the other processes.
    trainer.print(f"It writes:\n{write(trainer.model, 400)}\n")
    bits = trainer.evaluate(val, name="held_out")["held_out_bits"]
    trainer.print(f"{bits:.3f} bits per character of the held-out text, on {trainer.world.size} processes")
    if directory:
        trainer.save_weights(directory / "weights.safetensors")  # called on all, written by the first
        if trainer.is_main:
            print(f"{alone(directory / 'weights.safetensors', val):.3f} bits from that file, in one process alone")


def alone(path: Path, val: object) -> float:
    """What the weights give where no other process is needed."""
    model = Writer()
    load_weights(path, model)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), parallel=None, device="cpu", console=False)
    return trainer.evaluate(val)["val_loss"] / math.log(2)


if __name__ == "__main__":
    torch.set_num_threads(1)  # two processes on two cores
    train(Path("runs/fsdp_char_lm"), epochs=3)
