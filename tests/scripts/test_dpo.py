"""Direct preference optimization: a policy, the frozen model it started from, pairs of answers."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, made
from torch import nn
from torch.nn import functional as F

from trainwright import Trainer, batches

EPOCHS, TOKENS, BETA, PAD = 2, 17, 0.1, 0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(TOKENS, 16), nn.GRU(16, 16, batch_first=True)
        self.noise, self.head = nn.Dropout(0.1), nn.Linear(16, TOKENS)

    def forward(self, tokens):
        return self.head(self.noise(self.mix(self.embed(tokens))[0]))


def log_prob(model, prompt, answer):
    """The log probability of each answer, (rows); padding counts for nothing."""
    logits = model(torch.cat([prompt, answer], 1)[:, :-1])[:, prompt.shape[1] - 1 :]
    chosen = logits.log_softmax(-1).gather(2, answer[..., None]).squeeze(2)
    return (chosen * (answer != PAD)).sum(1)


def margin(model, reference, batch):
    """How much more than the reference the policy prefers the better answer, (rows)."""
    better, worse = (
        log_prob(model, batch["prompt"], batch[which]) - log_prob(reference, batch["prompt"], batch[which])
        for which in ("chosen", "rejected")
    )
    return BETA * (better - worse)


class DPO(Trainer):
    def training_step(self, batch):
        margins = margin(self.model, self.frozen["reference"], batch)
        self.log("preferred", (margins > 0).float().mean())
        return -F.logsigmoid(margins).mean()


def by_trainer(policy, train, val):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    trainer = DPO(policy, optimizer, frozen={"reference": copy.deepcopy(policy)}, clip=1.0, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def by_hand(policy, train, val):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    history = []
    for epoch in range(EPOCHS):
        row = {}
        for prefix, data in (("", train.epoch(epoch)), ("val_", val)):
            policy.train(not prefix)
            total = preferred = rows = 0
            for batch in data:
                with torch.set_grad_enabled(not prefix):
                    margins = margin(policy, reference, batch)
                    loss = -F.logsigmoid(margins).mean()
                if not prefix:
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()
                total += loss.item() * len(margins)
                preferred += (margins > 0).float().mean().item() * len(margins)
                rows += len(margins)
            row |= {f"{prefix}loss": total / rows, f"{prefix}preferred": preferred / rows}
        history.append(row)
    return history


def data():
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, TOKENS, (200, 4), generator=generator)
    chosen, rejected = (prompt.flip(1), torch.randint(1, TOKENS, (200, 4), generator=generator))
    lengths = torch.randint(1, 5, (200, 1), generator=generator)
    columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected.where(torch.arange(4) < lengths, PAD)}
    train, val = ({name: one[part] for name, one in columns.items()} for part in (slice(150), slice(150, None)))
    return batches(train, 16, shuffle=True, seed=0), batches(val, 32)


def test_dpo_is_its_plain_loop():
    ours, theirs = made(Policy), made(Policy)
    torch.manual_seed(5)
    history = by_trainer(ours, *data())
    torch.manual_seed(5)
    assert_same_history(history, by_hand(theirs, *data()))
    assert_same_weights(ours, theirs)
    assert history[-1]["val_preferred"] > 0.6


def test_the_policy_itself_as_its_reference_is_refused():
    policy = made(Policy)
    with pytest.raises(ValueError, match=r"shares parameters(.|\n)*frozen=\{'reference': copy.deepcopy\(model\)\}"):
        DPO(policy, torch.optim.AdamW, frozen={"reference": policy}, console=False)


def test_dpo_is_no_longer_than_its_plain_loop():
    assert_no_longer([DPO, by_trainer], [by_hand])
