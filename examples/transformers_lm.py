"""Train a language model of transformers, built from its config, on Python's documentation.

Needs     pip install transformers
Data      the text behind Python's `help("while")`, as bytes; its last tenth is held out
Time      about a minute on one CPU core
Expected  about 2.5 bits for each byte of held-out text; the frequencies of single bytes give 5.0

A model that returns its loss needs no `loss=` and no custom step. It receives the batch, a dict, as keyword arguments.
"""

from __future__ import annotations

import math
import sys
from pydoc_data.topics import topics

import torch
from torch import Tensor

from trainwright import Cosine, Trainer, adamw, batches
from trainwright.metrics import Derived

try:
    import transformers  # pyright: ignore[reportMissingImports]
except ImportError:
    sys.exit("this example needs transformers: pip install transformers")

LENGTH = 64


def pieces(text: bytes) -> dict[str, Tensor]:
    """Cut a text into rows of LENGTH bytes; the model shifts the labels itself."""
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    return {"input_ids": rows, "labels": rows}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode()
    cut = len(text) * 9 // 10
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=96,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer = Trainer(
        model,
        adamw(lr=3e-3, weight_decay=0.1),  # biases and norms do not decay
        metrics={"bits": Derived(lambda numbers: numbers["loss"] / math.log(2))},
        clip=1.0,
        schedule=Cosine(warmup=0.1),
    )
    train, held_out = batches(pieces(text[:cut]), 32, shuffle=True, seed=0), batches(pieces(text[cut:]), 128)
    trainer.fit(train, held_out, epochs=2)

    model.eval()
    start = torch.tensor([list(b"The statement ")], device=trainer.device)
    written = model.generate(start, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    print(f"{trainer.evaluate(held_out, 'held_out')['held_out_bits']:.2f} bits for each byte of the held-out text")


if __name__ == "__main__":
    main()
