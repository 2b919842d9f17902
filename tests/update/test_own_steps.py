"""A step of the user's own may call the default one and add to what it returns."""

import pytest
import torch
from torch import nn

from trainwright import StepOutput, Trainer, batches

x = torch.randn(22, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = torch.arange(22) % 3


class Penalised(Trainer):
    def training_step(self, batch):
        return super().training_step(batch) + 0.1 * self.model.weight.square().sum()


def model():
    torch.manual_seed(1)
    return nn.Linear(4, 3).double()


def penalised_by_hand(accumulate):
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    rows = 4 * accumulate
    for start in range(0, 22, rows):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(made(x[start : start + rows]), y[start : start + rows])
        (loss + 0.1 * made.weight.square().sum()).backward()
        optimizer.step()
    return made


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_penalty_on_top_of_the_default_step_is_trained_and_evaluated(accumulate):
    made = model()
    trainer = Penalised(made, torch.optim.SGD(made.parameters(), lr=0.1), nn.CrossEntropyLoss(),
                        accumulate=accumulate, console=False)  # fmt: skip
    result = trainer.fit(batches((x, y), 4), batches((x, y), 5), epochs=1)
    hand = penalised_by_hand(accumulate)
    torch.testing.assert_close(made.weight, hand.weight, rtol=1e-12, atol=1e-14)
    expected = nn.functional.cross_entropy(hand(x), y) + 0.1 * hand.weight.square().sum()
    assert result.history[-1]["val_loss"] == pytest.approx(expected.item(), rel=1e-12)


def test_a_norm_that_overflows_is_not_clipped_to_a_gradient_of_zeros():
    made = nn.Linear(4, 1)
    huge = [(torch.full((2, 4), 1e20), torch.zeros(2, 1))]

    class Huge(Trainer):
        def training_step(self, batch):
            return self.model(batch[0]).sum() * 1e10

    before = made.weight.detach().clone()
    trainer = Huge(made, torch.optim.SGD(made.parameters(), lr=0.1), clip=1.0, console=False)
    with pytest.raises(ArithmeticError, match="gradient is not finite"):
        trainer.fit(huge, epochs=1)
    assert torch.equal(made.weight, before)


def test_a_run_that_ends_inside_an_epoch_tells_its_numbers():
    trainer = Trainer(made := model(), torch.optim.SGD(made.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    result = trainer.fit(iter([(x[:4], y[:4])] * 9), max_updates=5)
    assert [row["update"] for row in result.history] == [5] and result.history[0]["loss"] > 0


def own_step(step, **settings):
    cls = type("Own", (Trainer,), {"training_step": step})
    trainer = cls(made := model(), torch.optim.SGD(made.parameters(), lr=0.1), console=False, **settings)
    trainer.fit([(x, y)], epochs=1)


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.zeros(3), r"a tensor of shape \(3,\)"), ("much", "a str"), (None, "a NoneType")]
)
def test_a_logged_value_that_is_no_number_is_refused_where_it_is_logged(value, kind):
    def step(self, batch):
        self.log("share", value)

    with pytest.raises(ValueError, match=rf"'share' is {kind}\n  want  a number"):
        own_step(step)


def loss_and_share(trainer, batch):
    loss = nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])
    return StepOutput({"share": loss, "rest": 0 * loss}, batch[0], batch[1])


def test_one_name_for_a_logged_number_and_a_named_loss_is_refused():
    def step(self, batch):
        self.log("share", 1.0)
        return loss_and_share(self, batch)

    with pytest.raises(ValueError, match="the named loss 'share': a logged number has this name"):
        own_step(step)


def test_one_name_for_a_metric_and_a_named_loss_is_refused():
    with pytest.raises(ValueError, match=r"the named loss 'share': a metric has this name(.|\n)*share_loss"):
        own_step(loss_and_share, metrics={"share": lambda output, target: target.float()})
