"""The law Window where `split` is the user's own: the count is that of the target that `split` finds."""

import pytest
import torch
from torch import nn

from trainwright import Trainer
from trainwright.update.losses import KnownLoss

ROWS = [7, 3, 5, 2]


def data(target_first):
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in ROWS]
    wide = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in ROWS]
    classes = [torch.randint(0, 3, (n,), generator=generator) for n in ROWS]
    classes = [torch.where(torch.rand(len(t), generator=generator) < 0.4, -100, t) for t in classes]
    for target in classes:
        target[0] = 1  # no batch counts nothing: alone, torch's mean over it is NaN
    if target_first:
        return list(zip(classes, x, strict=True)), x, classes
    return [{"left": a, "distance": b} for a, b in zip(x, wide, strict=True)], x, wide


class Named(Trainer):
    def split(self, batch):
        return batch["left"], batch["distance"]


class First(Trainer):
    def split(self, batch):
        return (batch[1],), batch[0]


def trained_by_hand(x, target, loss, k):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    total = count = 0.0
    for start in range(0, len(x), k):
        inputs, wanted = torch.cat(x[start : start + k]), torch.cat(target[start : start + k])
        optimizer.zero_grad()
        made = loss(model(inputs), wanted)
        n = wanted.numel() if wanted.is_floating_point() else int((wanted != -100).sum())
        total, count = total + made.item() * n, count + n
        made.backward()
        optimizer.step()
    return model, total / count


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize(("cls", "loss"), [(Named, nn.MSELoss()), (First, nn.CrossEntropyLoss())])
def test_a_split_of_the_users_own_is_weighed_by_the_target_it_finds(cls, loss, k):
    batches, x, target = data(cls is First)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    trainer = cls(model, torch.optim.SGD(model.parameters(), lr=0.3), loss, accumulate=k, console=False)
    reported = trainer.fit(batches, epochs=1).history[-1]["loss"]
    hand, expected = trained_by_hand(x, target, loss, k)
    assert (model.weight - hand.weight).abs().max() / hand.weight.abs().max() <= 1e-12
    assert reported == pytest.approx(expected, rel=1e-12)


def test_the_law_sees_a_count_of_batches(monkeypatch):
    monkeypatch.setattr(KnownLoss, "count", lambda self, target: 1)
    with pytest.raises(AssertionError):
        test_a_split_of_the_users_own_is_weighed_by_the_target_it_finds(Named, nn.MSELoss(), 3)


def test_a_split_of_the_users_own_is_called_once_per_batch():
    class Counted(First):
        calls = 0

        def split(self, batch):
            Counted.calls += 1
            return super().split(batch)

    batches, _, _ = data(True)
    for k in (1, 3):
        model = nn.Linear(4, 3).double()
        trainer = Counted(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), accumulate=k,
                          console=False)  # fmt: skip
        trainer.fit(batches, epochs=1)
    assert Counted.calls == 2 * len(ROWS)


@pytest.mark.parametrize("k", [1, 2])
def test_a_count_of_the_users_own_weighs_means_whatever_the_loss_counts(k):
    class ByRows(Trainer):
        def count(self, batch):
            return len(batch["distance"])

        def split(self, batch):
            return batch["left"], batch["distance"]

    batches, x, target = data(False)
    model = nn.Linear(4, 3).double()
    trainer = ByRows(model, torch.optim.SGD(model.parameters(), lr=0.0), nn.MSELoss(), accumulate=k, console=False)
    row = trainer.fit(batches, batches, epochs=1).history[-1]
    means = [nn.functional.mse_loss(model(a), b).item() for a, b in zip(x, target, strict=True)]
    expected = sum(n * mean for n, mean in zip(ROWS, means, strict=True)) / sum(ROWS)
    assert row["loss"] == pytest.approx(expected, rel=1e-12)
    assert row["val_loss"] == pytest.approx(expected, rel=1e-12)
