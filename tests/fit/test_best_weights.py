"""Best weights: of this stage, of this number, and only what is really there."""

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, EarlyStopping, Epochs, Trainer, Updates, load_weights


def data(sign=1.0):
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    return [(part, sign * part.sum(1, keepdim=True)) for part in x.split(8)]


def trainer(lr, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=lr), nn.MSELoss(), console=False, **settings)


def mae(output, target):
    return (output - target).abs().mean()


def test_the_best_of_a_second_stage_is_kept_though_the_first_was_better(tmp_path):
    made = trainer(0.02, early_stopping=EarlyStopping("val_loss"), checkpoint=Checkpoint(tmp_path, best="val_loss"))
    made.fit(data(), data(), epochs=10)
    result = made.fit(data(-1.0), data(), epochs=5)  # val_loss only rises
    assert result.best is not None and result.best.path is not None and result.best.path.exists()
    assert made.evaluate(data())["val_loss"] == pytest.approx(result.best.value)


def test_a_save_at_the_epochs_end_keeps_the_number_of_the_validation_at_the_same_update(tmp_path):
    slot = Checkpoint(tmp_path, best="val_loss", every=Epochs(1), keep=1, restore_best=True)
    made = trainer(0.6, checkpoint=slot)  # the rate is too large: the first validation is the best
    result = made.fit(lambda epoch: (batch for batch in data()), data(), epochs=4, validate=Updates(4))
    assert result.best.update == 4 and made.evaluate(data())["val_loss"] == pytest.approx(result.best.value)
    best = load_weights(tmp_path)
    assert torch.equal(best["weight"], made.model.weight)


def test_a_resume_with_another_best_puts_back_the_weights_of_the_number_that_is_watched(tmp_path):
    def run(epochs, **best):
        early = EarlyStopping("val_loss", patience=9)
        made = trainer(0.6, metrics={"mae": mae}, early_stopping=early, checkpoint=Checkpoint(tmp_path, **best))
        return made, made.fit(data(), data(), epochs=epochs, resume="auto")

    run(2, best="val_loss")
    with pytest.warns(UserWarning, match="it starts anew"):
        made, result = run(4, best="val_mae", mode="min")
    lowest = min(row["val_loss"] for row in result.history)
    assert (
        made.evaluate(data())["val_loss"] == pytest.approx(lowest) and result.weights == "best of epoch 1 by val_loss"
    )
    assert result.best.name == "val_mae"


def test_a_model_with_extra_state_can_be_restored():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": "mine"}

        def set_extra_state(self, state):
            assert state == {"note": "mine"}

    model = Extra(4, 1)
    made = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.6), nn.MSELoss(), console=False,
                   early_stopping=EarlyStopping("val_loss"))  # fmt: skip
    assert made.fit(data(), data(), epochs=3).weights.startswith("best of epoch")


def test_half_precision_losses_are_summed_in_float32():
    torch.manual_seed(0)
    model = nn.Linear(3, 5).half()
    x, y = torch.randn(4000, 3).half(), (5 * torch.randn(4000, 5)).half()
    made = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), console=False)
    with torch.no_grad():
        expected = nn.functional.mse_loss(model(x).double(), y.double()).item()
    assert made.evaluate([(x, y)])["val_loss"] == pytest.approx(expected, rel=1e-3)


def test_class_weights_that_are_replaced_count_as_they_are_now():
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = nn.Linear(4, 3)
    made = Trainer(model, None, loss, console=False)
    loss.weight = torch.tensor([5.0, 1.0, 1.0])
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    assert made.evaluate([(x, y)])["val_loss"] == pytest.approx(loss(model(x), y).item())


def test_a_run_works_where_the_default_dtype_is_float64():
    torch.set_default_dtype(torch.float64)
    try:
        made = trainer(0.1)
        assert made.fit(data(), epochs=1).updates == 4
    finally:
        torch.set_default_dtype(torch.float32)
