"""Preference optimization (DPO): a language model that writes capitals three times of four learns small letters.

    python examples/dpo.py

Data      the text behind Python's `help("while")`: 24 letters are the prompt, the 24 that follow are the answer, quiet
          (in small letters) or shouted (the same in capitals)
Time      20 s on one CPU core
Expected  pairs whose quiet answer is the likelier one: 9 % before, 98 % after, of 500 held-out ones; what it writes
          itself is quiet in 8 %, then 79 %; a quiet answer costs it 2.75 bits a letter, then 2.80

The model is first trained on both kinds of answers, and then on 1,000 pairs with the preferred one, by the loss of
Rafailov et al. (arXiv 2305.18290, equation 7), with a frozen copy of itself as the reference. A hand-written loss is in
tests/examples/test_dpo.py.
"""

import copy
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Cosine, Trainer, adamw, batches

TEXT = " ".join(" ".join(topics[name].split()) for name in sorted(topics)).lower().encode("ascii", "ignore").decode()
LETTERS = sorted(set(TEXT) | set(TEXT.upper()))
LENGTH, BETA = 24, 0.1
Pairs = tuple[Tensor, Tensor, Tensor]


class Writer(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.letters, self.memory = nn.Embedding(len(LETTERS), 32), nn.GRU(32, width, batch_first=True)
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        scores: Tensor = self.out(self.memory(self.letters(letters))[0])
        return scores.transpose(1, 2)  # rows x letters of the alphabet x places


def log_prob(model: nn.Module, prompt: Tensor, answer: Tensor) -> Tensor:
    """The log probability of each complete answer, (rows)."""
    scores = model(torch.cat([prompt, answer], 1)[:, :-1])[:, :, prompt.shape[1] - 1 :]
    return -F.cross_entropy(scores, answer, reduction="none").sum(1)


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Equation 7; of either answer the log probability under the policy, less that under the reference, (rows)."""
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


class Imitation(Trainer[Writer]):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        prompt, answer = batch
        return -log_prob(self.model, prompt, answer).mean() / LENGTH


class DPO(Trainer[Writer]):
    def training_step(self, batch: Pairs) -> Tensor:
        prompt, *answers = batch
        policy, reference = self.model, self.frozen["reference"]
        chosen, rejected = (log_prob(policy, prompt, a) - log_prob(reference, prompt, a) for a in answers)
        self.log("rewarded", (chosen > rejected).float().mean())
        return dpo_loss(chosen, rejected, beta=BETA)


def pairs() -> tuple[Pairs, Pairs, Pairs]:
    """Prompts, quiet answers and shouted ones: to write from, to prefer by, and held out."""
    number = {letter: index for index, letter in enumerate(LETTERS)}
    cut = len(TEXT) // (2 * LENGTH) * 2 * LENGTH
    small, large = (torch.tensor([number[one] for one in text[:cut]]) for text in (TEXT, TEXT.upper()))
    rows, loud = small.view(-1, 2 * LENGTH), large.view(-1, 2 * LENGTH)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    columns = rows[order, :LENGTH], rows[order, LENGTH:], loud[order, LENGTH:]
    prompt, quiet, shouted = (column.split([6000, 1000, 500, len(rows) - 7500]) for column in columns)
    to_write, to_prefer, held_out, _ = zip(prompt, quiet, shouted, strict=True)
    return to_write, to_prefer, held_out


def learn_to_write(data: Pairs, *, updates: int) -> Writer:
    prompt, quiet, loud = data
    shouted = torch.arange(len(prompt)).unsqueeze(1) % 4 > 0  # three of four
    writer = Writer()
    trainer = Imitation(writer, adamw(lr=1e-2), schedule=Cosine(warmup=0.1), clip=1.0, console=False)
    answers = torch.where(shouted, loud, quiet)
    trainer.fit(batches((prompt, answers), 64, shuffle=True, seed=0), max_updates=updates)
    return writer


@torch.no_grad()
def write(writer: Writer, prompt: Tensor) -> Tensor:
    """The continuation that it writes, letter by letter."""
    generator, text = torch.Generator().manual_seed(0), prompt
    for _ in range(LENGTH):
        chances = writer(text)[:, :, -1].softmax(1).cpu()  # where the generator draws
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator).to(text.device)], 1)
    return text[:, prompt.shape[1] :]


@torch.no_grad()
def describe(writer: Writer, held_out: Pairs) -> str:
    device = next(writer.parameters()).device
    prompt, quiet, loud = (letters.to(device) for letters in held_out)
    likely = log_prob(writer, prompt, quiet)
    bits = -likely.mean().item() / LENGTH / math.log(2)
    prefers = (likely > log_prob(writer, prompt, loud)).float().mean().item()
    answers = ["".join(LETTERS[letter] for letter in row) for row in write(writer, prompt).tolist()]
    calm = sum(answer == answer.lower() for answer in answers) / len(answers)
    return (
        f"{prefers:6.1%} of pairs, {calm:6.1%} of its own answers are quiet, {bits:.2f} bits; it writes {answers[1]!r}"
    )


def main() -> None:
    torch.manual_seed(0)
    to_write, to_prefer, held_out = pairs()
    writer = learn_to_write(to_write, updates=500)
    print("before", describe(writer, held_out))
    reference = copy.deepcopy(writer)
    trainer = DPO(writer, adamw(lr=1e-3), frozen={"reference": reference}, clip=1.0)
    trainer.fit(batches(to_prefer, 50, shuffle=True, seed=0), batches(held_out, 500), epochs=3)
    print("after ", describe(writer, held_out))


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more
    main()
