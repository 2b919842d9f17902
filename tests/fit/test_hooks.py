"""The hooks around epochs and updates: when each is called, with what, and what it may change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from records import Records
from trainwright import (
    Checkpoint,
    EarlyStopping,
    Epochs,
    Observer,
    OneCycle,
    Probe,
    SettingError,
    Trainer,
    TrainwrightError,
    Updates,
    batches,
    latest_checkpoint,
)

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3


def made(cls=Trainer, model=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)) if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return cls(model, optimizer, nn.CrossEntropyLoss(), **{"console": False, **settings})


def data(size=4):
    return batches((x, y), size)


def test_every_hook_and_observer_is_called_in_one_order(tmp_path):
    calls = []

    class Calls(Trainer):
        def begin_epoch(self, epoch):
            calls.append(f"begin {epoch}")

        def training_step(self, batch):
            calls.append("step")
            return super().training_step(batch)

        def validation_step(self, batch):
            calls.append("val")
            return self.loss(self.model(batch[0]), batch[1])

        def after_update(self):
            calls.append(f"after {self.progress.updates}")

        def end_epoch(self, metrics):
            calls.append(f"end {metrics['epoch']}")

    class Watches(Observer):
        def on_fit_start(self, plan):
            calls.append("start")

        def on_update(self, update):
            calls.append(f"update {update.update}")

        def on_validate(self, record):
            calls.append("validated")

        def on_epoch(self, record):
            calls.append("epoch")

        def on_save(self, saved):
            calls.append(f"saved {saved.update}")

        def on_fit_end(self, result):
            calls.append("finish")

    probe = Probe(lambda trainer: calls.append("probe"), every=Updates(2))
    trainer = made(Calls, checkpoint=Checkpoint(tmp_path, async_save=False), observers=[Watches(), probe])
    trainer.fit(data(), batches((x, y), 12), epochs=2)
    update = ["step", "after {0}", "update {0}"]
    ends = ["val", "validated", "epoch"]
    expected = ["begin 0", "val", "start"]
    expected += [one.format(1) for one in update] + [one.format(2) for one in update] + ["probe"]
    expected += [one.format(3) for one in update] + [*ends, "end 1", "saved 3"]
    expected += ["begin 1", *[one.format(4) for one in update], "probe", *[one.format(5) for one in update]]
    expected += [*[one.format(6) for one in update], "probe", *ends, "end 2", "saved 6", "finish"]
    assert calls == expected


def test_begin_epoch_adds_a_head_and_a_group_that_train_from_then_on():
    class Grows(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 1:
                self.model.append(nn.Linear(3, 3))
                self.optimizer.add_param_group({"params": self.model[1].parameters(), "lr": 0.5})
                self.before = self.model[1].weight.detach().clone()

    trainer = made(Grows)
    trainer.fit(data(), epochs=2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if epoch:
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
        for a, b in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True))
    assert not torch.equal(trainer.before, model[1].weight)


@pytest.mark.parametrize("hook", ["begin_epoch", "end_epoch", "after_update", "training_step"])
def test_a_parameter_set_free_that_is_in_no_optimizer_is_refused_at_the_epochs_start(hook):
    def thaw(self, *given):
        if hook == "begin_epoch" and given != (1,):
            return None
        self.model[0].requires_grad_(True)
        return Trainer.training_step(self, *given) if hook == "training_step" else None

    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
    trainer = made(type("Thaws", (Trainer,), {hook: thaw}), model)
    with pytest.raises(SettingError, match=r"2 trainable parameters are in no optimizer(.|\n)*model\.0\.weight"):
        trainer.fit(data(), epochs=2)
    assert trainer.progress.updates == 3


def test_begin_epoch_changes_the_data():
    rows = [(x[i], y[i]) for i in range(12)]
    seen = []

    class Scales(Trainer):
        def begin_epoch(self, epoch):
            self.scale = epoch

        def training_step(self, batch):
            seen.append(batch[0][0, 0].item() / x[0, 0].item())
            return super().training_step(batch)

    class Scaled(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return rows[index][0] * trainer.scale, rows[index][1]

    trainer = made(Scales)
    trainer.fit(torch.utils.data.DataLoader(Scaled(), 12), epochs=3)
    assert seen == [0.0, 1.0, 2.0]


def test_end_epoch_gets_the_row_of_the_history():
    rows = []

    class Ends(Trainer):
        def end_epoch(self, metrics):
            rows.append(dict(metrics))
            metrics.clear()

    trainer = made(Ends)
    result = trainer.fit(data(), batches((x, y), 5), epochs=2)
    assert rows == result.history and set(rows[0]) == {"epoch", "update", "loss", "val_loss", "lr"}


@pytest.mark.parametrize("hook", ["begin_epoch", "end_epoch", "after_update", "training_step", "validation_step"])
def test_stop_from_any_hook_ends_after_the_update_and_saves(hook, tmp_path):
    training = hook != "validation_step"

    def stopping(self, *given):
        if self.progress.updates == 3 and self.model.training is training and not self.progress.stopped:
            self.stop("enough")
        return getattr(Trainer, hook)(self, *given)

    cls = type("Stops", (Trainer,), {hook: stopping})
    trainer = made(cls, checkpoint=Checkpoint(tmp_path, every=Updates(100)))
    result = trainer.fit(data(), data(), epochs=9)
    assert (result.stopped, result.updates) == ("enough", 4 if hook == "training_step" else 3)
    assert latest_checkpoint(tmp_path).name == f"update-{result.updates:010d}"
    assert (result.final_validation is None) == (result.updates == 3), "a validation was due at the epoch's end alone"
    last = result.final_validation or result.history[-1]
    assert last["update"] == result.updates and "val_loss" in last


def test_a_stop_between_two_epochs_still_validates_what_was_not():
    class Stops(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 2:
                self.stop("enough")

    early = EarlyStopping("loss", restore_best=False)
    result = made(Stops, early_stopping=early).fit(data(), data(), epochs=9, validate=Epochs(5))
    first, second = result.history
    final = result.final_validation
    assert "val_loss" in final and "val_loss" not in second and first["loss"] != second["loss"]
    assert {name: final[name] for name in second} == second


def test_a_stop_in_the_first_begin_epoch_trains_nothing():
    class Stops(Trainer):
        def begin_epoch(self, epoch):
            self.stop("not today")

    result = made(Stops).fit(data(), epochs=2)
    assert (result.stopped, result.updates, result.history) == ("not today", 0, [])


def test_a_data_iterator_may_stop_the_run():
    def stream():
        for part in zip(x.split(2), y.split(2), strict=True):
            if trainer.progress.updates == 2:
                trainer.stop("dry")
            yield part

    trainer = made()
    result = trainer.fit(stream(), max_updates=6)
    assert (result.stopped, result.updates) == ("dry", 3)


def test_after_update_comes_for_applied_updates_only():
    seen = []

    class Sees(Trainer):
        def after_update(self):
            seen.append(self.progress.updates)

    trainer = made(Sees, on_nonfinite="skip")
    bad = [(x[:4], y[:4]), (x[:4] / 0, y[:4]), (x[4:8], y[4:8])]
    assert trainer.fit(bad, epochs=1).skipped == 1
    assert seen == [1, 2]


def test_numbers_logged_in_after_update_are_reported_with_their_update():
    class Logs(Trainer):
        def after_update(self):
            self.log("n", float(self.progress.updates))

    reported = Records()
    result = made(Logs, observers=[reported], accumulate=2).fit(batches((x, y), 5), epochs=1)
    assert [one.values for one in reported.updates] == [{"n": 1.0}, {"n": 2.0}]
    assert result.history[0]["n"] == pytest.approx((10 * 1.0 + 2 * 2.0) / 12)


@pytest.mark.parametrize("every", [1, 2])
def test_numbers_logged_in_after_update_are_in_the_checkpoint(every, tmp_path):
    class Logs(Trainer):
        def after_update(self):
            self.log("n", float(self.progress.updates))
            if self.progress.updates == self.dies:
                raise ZeroDivisionError

    def run(directory, dies=0):
        trainer = made(Logs, checkpoint=Checkpoint(directory, every=Updates(every)))
        trainer.dies = dies
        return trainer.fit(data(), epochs=1, resume="auto").history

    whole = run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", dies=3)
    assert run(tmp_path / "cut") == whole and whole[0]["n"] == 2.0


def test_numbers_are_logged_with_the_count_of_the_window_or_the_batch():
    class Logs(Trainer):
        def update(self, window):
            self.log("before", float(self.progress.updates))
            loss = self.compute_gradients(window)
            self.log("between", float(self.progress.updates))
            self.apply_gradients()
            return loss

        def training_step(self, batch):
            self.log("inside", float(len(batch[0])))
            return super().training_step(batch)

    row = made(Logs, accumulate=2).fit(batches((x, y), 5), epochs=1).history[0]
    assert row["before"] == row["between"] == pytest.approx((10 * 0 + 2 * 1) / 12)
    assert row["inside"] == pytest.approx((5 * 5 + 5 * 5 + 2 * 2) / 12)


@pytest.mark.parametrize("hook", ["begin_epoch", "end_epoch"])
def test_a_log_between_epochs_is_refused(hook):
    def logs(self, _):
        if self.progress.updates:
            self.log("n", 1.0)

    with pytest.raises(TrainwrightError, match="outside a step"):
        made(type("Logs", (Trainer,), {hook: logs})).fit(data(), epochs=2)


NEAR = {"begin_epochs": "begin_epoch", "end_epoc": "end_epoch", "after_updates": "after_update", "part": "parts"}
NEAR |= {"apply_gradient": "apply_gradients", "compute_gradient": "compute_gradients", "auto_cast": "autocast"}
NEAR |= {"trainning_step": "training_step", "training_steps": "training_step", "validaton_step": "validation_step"}
NEAR |= {"minimise": "minimize", "to_devise": "to_device", "updates": "update"}


@pytest.mark.parametrize(("name", "meant"), NEAR.items())
def test_a_near_miss_of_a_hook_is_refused_when_the_class_is_defined(name, meant):
    with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
        type("Mine", (Trainer,), {name: lambda self: None})
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
        type("Mine", (mixin, Trainer), {})


@pytest.mark.parametrize("name", ["on_batch_end", "on_epochs", "on_epoch_end", "on_updates"])
def test_an_event_that_does_not_exist_is_refused_when_the_observer_is_defined(name):
    with pytest.raises(TypeError, match=f"{name} is not a method that is ever called"):
        type("Mine", (Observer,), {name: lambda self, record: None})


def test_a_helper_whose_name_is_near_no_hook_is_the_users_own():
    helpers = dict.fromkeys(("begin_train_epoch", "draw_samples", "_training_steps"), lambda self: None)
    cls = type("Mine", (Trainer,), helpers)
    assert issubclass(cls, Trainer)


def test_early_stopping_in_the_epoch_of_end_epoch():
    ended = []

    class Ends(Trainer):
        def end_epoch(self, metrics):
            ended.append(self.progress.stopped)

    made(Ends, early_stopping=EarlyStopping("val_loss", patience=1, min_delta=9.0)).fit(data(), data(), epochs=9)
    assert len(ended) == 2 and "did not improve" in ended[1]


def test_a_group_added_beside_a_schedule_keeps_its_own_rate():
    class Grows(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 1:
                self.model.append(nn.Linear(3, 3))
                self.optimizer.add_param_group({"params": self.model[1].parameters(), "lr": 0.5})

    reported = Records()
    made(Grows, schedule=OneCycle(0.3, cycle_momentum=False), observers=[reported]).fit(data(), epochs=2)
    assert len(reported.updates[-1].lrs) == 2
