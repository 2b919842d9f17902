"""Updates of the user's own: what they return is reported, what they forget is named, what they step is counted."""

import itertools
import math

import pytest
import torch
from torch import nn

from records import Records
from trainwright import NonFiniteError, StepError, Trainer, batches

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(24) % 3


def made(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reported = Records()
    settings = {"console": False, "observers": [reported], **settings}
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **settings), reported


def test_an_update_that_never_steps_is_named():
    class Forgets(Trainer):
        def update(self, window):
            return self.compute_gradients(window)

    trainer, _ = made(Forgets)
    with pytest.raises(StepError, match=r"without one step of the optimizer(.|\n)*apply_gradients"):
        trainer.fit(batches((x, y), 8), epochs=2)
    assert trainer.progress.updates == 0


def test_an_update_without_a_loss_does_not_report_that_of_the_last_one():
    class Silent(Trainer):
        def update(self, window):
            return super().update(window) if self.progress.updates == 0 else self.optimizer.step()

    trainer, reported = made(Silent)
    trainer.fit(batches((x, y), 8), epochs=1)
    assert math.isfinite(reported.updates[0].loss) and all(math.isnan(update.loss) for update in reported.updates[1:])


def test_a_group_added_inside_an_epoch_is_zeroed_and_clipped_at_once():
    extra = nn.Parameter(torch.zeros(3))
    seen = []

    class Grows(Trainer):
        def training_step(self, batch):
            if self.progress.updates == 1 and len(self.optimizer.param_groups) == 1:
                self.optimizer.add_param_group({"params": [extra], "lr": 0.1})
            seen.append(None if extra.grad is None else extra.grad.clone())
            return nn.functional.cross_entropy(self.model(batch[0]) + extra, batch[1])

    trainer, _ = made(Grows)
    trainer.fit(batches((x, y), 4), epochs=1)
    assert all(gradient is None for gradient in seen[2:])


def test_named_losses_with_reserved_names_are_refused():
    class Lightning(Trainer):
        def training_step(self, batch):
            loss = self.loss(self.model(batch[0]), batch[1])
            return {"loss": loss, "accuracy": loss.detach()}

    trainer, _ = made(Lightning)
    with pytest.raises(StepError, match=r"all would be added up(.|\n)*self\.log"):
        trainer.fit(batches((x, y), 8), epochs=1)


def test_a_logged_number_with_the_name_of_a_metric_is_refused():
    class Logs(Trainer):
        def training_step(self, batch):
            self.log("hits", 1.0)
            return super().training_step(batch)

    trainer, _ = made(Logs, metrics={"hits": lambda output, target: (output.argmax(1) == target).float()})
    with pytest.raises(ValueError, match="a metric has this name"):
        trainer.fit(batches((x, y), 8), epochs=1)


def test_skipped_updates_count_towards_max_seconds():
    stream = itertools.repeat((torch.full((2, 4), math.nan), torch.zeros(2, dtype=torch.long)))
    trainer, _ = made(on_nonfinite="skip")
    result = trainer.fit(stream, max_seconds=0.03)
    assert result.updates == 0 and result.skipped > 0 and "nothing was trained" in result.notes[0]


def test_a_run_that_can_never_apply_an_update_ends_in_an_error():
    stream = itertools.repeat((torch.full((2, 4), math.nan), torch.zeros(2, dtype=torch.long)))
    trainer, _ = made(on_nonfinite="skip")
    with pytest.raises(NonFiniteError, match="1000 updates in a row"):
        trainer.fit(stream, max_updates=5)


def test_the_error_of_a_second_stage_counts_over_all_stages():
    trainer, _ = made()
    trainer.fit(batches((x, y), 8), epochs=1)
    with pytest.raises(NonFiniteError, match="update 4:"):
        trainer.fit([(torch.full((2, 4), math.nan), y[:2])], epochs=1)


def test_data_that_are_longer_than_announced_stop_near_max_updates():
    class Liar:
        def __len__(self):
            return 2

        def __iter__(self):
            return iter([(x[:4], y[:4])] * 10)

    trainer, _ = made()
    assert trainer.fit(Liar(), max_updates=5).updates == 5


def test_a_window_that_a_custom_update_leaves_out_is_not_reported_as_skipped():
    class EverySecond(Trainer):
        def update(self, window):
            loss = self.compute_gradients(window)
            if self.progress.batch % 2:
                self.optimizer.step()
            return loss

    trainer, reported = made(EverySecond)
    result = trainer.fit(batches((x, y), 6), epochs=1)
    assert not any(update.skipped for update in reported.updates) and (result.skipped, result.updates) == (0, 2)
