"""A variational autoencoder: two named losses, noise in every step, samples drawn on the way."""

from __future__ import annotations

import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F

from trainwright import Epochs, Probe, Trainer, batches

EPOCHS = 3


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def losses(model, x):
    output, mean, log_variance = model(x)
    reconstruction = F.binary_cross_entropy_with_logits(output, x, reduction="sum") / len(x)
    return reconstruction, -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum() / len(x)


def samples(model):
    return model.decode(torch.randn(5, 4)).sigmoid()


class VAETrainer(Trainer):
    def training_step(self, x):
        reconstruction, kl = losses(self.model, x)
        return {"reconstruction": reconstruction, "kl": kl}


def by_trainer(model, train, val, drawn):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampling = Probe(lambda trainer: drawn.append(samples(trainer.model)), every=Epochs(1))
    trainer = VAETrainer(model, optimizer, observers=[sampling], console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def by_hand(model, train, val, drawn):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for epoch in range(EPOCHS):
        model.train()
        sums, rows = torch.zeros(3, dtype=torch.float64), 0
        for x in train.epoch(epoch):
            optimizer.zero_grad()
            reconstruction, kl = losses(model, x)
            (loss := reconstruction + kl).backward()
            optimizer.step()
            sums += torch.stack([loss, reconstruction, kl]).detach().double() * len(x)
            rows += len(x)
        row = dict(zip(("loss", "reconstruction", "kl"), (sums / rows).tolist(), strict=True))
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            drawn.append(samples(model))
        with torch.no_grad(), torch.random.fork_rng():
            sums, rows = torch.zeros(3, dtype=torch.float64), 0
            for x in val:
                reconstruction, kl = losses(model, x)
                sums += torch.stack([reconstruction + kl, reconstruction, kl]).double() * len(x)
                rows += len(x)
        names = ("val_loss", "val_reconstruction", "val_kl")
        history.append(row | dict(zip(names, (sums / rows).tolist(), strict=True)))
    return history


def data():
    x, _ = digits()
    return batches(x[:450], 64, shuffle=True, seed=0), batches(x[450:], 64)


def test_a_vae_with_named_losses_and_samples_is_its_plain_loop():
    ours, our_samples = made(VAE), []
    history = by_trainer(ours, *data(), our_samples)
    theirs, their_samples = made(VAE), []
    assert_same_history(history, by_hand(theirs, *data(), their_samples))
    assert_same_weights(ours, theirs)
    assert len(our_samples) == EPOCHS and torch.equal(torch.cat(our_samples), torch.cat(their_samples))


def test_a_vae_is_no_longer_than_its_plain_loop():
    assert_no_longer([VAETrainer, by_trainer], [by_hand])
