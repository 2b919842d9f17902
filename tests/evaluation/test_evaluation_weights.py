"""Which weights are validated, judged, kept, saved, predicted and left, where there are two sets of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from laws.traceless_cases import ScheduleFree
from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    EarlyStopping,
    Observer,
    Probe,
    SettingError,
    Trainer,
    Updates,
    batches,
    freeze,
    load_weights,
)

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
held = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
truth = held.sum(1, keepdim=True)


def net(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 1))


def made(model=None, lr=0.1, cls=Trainer, **settings):
    model = net() if model is None else model
    return cls(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        nn.MSELoss(),
        **{"console": False, "average": EMA(0.8)} | settings,
    )


def train():
    return batches((x, y), 8)


def val():
    return batches((held, truth), 16)


def loss_of(model):
    with torch.no_grad():
        return nn.functional.mse_loss(model.eval()(held), truth).item()


def plain(epochs, lr=0.1, norm=False):
    """The raw and the averaged model of a hand-written loop after each epoch."""
    model = net(norm)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for a, b in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            averaged.update_parameters(model)
    return model, averaged.module


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_averaged_weights_are_validated_kept_saved_predicted_and_left(tmp_path):
    seen = []

    class Sees(Trainer):
        def validation_step(self, batch):
            seen.append([p.detach().clone() for p in self.model.parameters()])
            return super().validation_step(batch)

        def end_epoch(self, metrics):
            self.save_weights(tmp_path / f"weights-{metrics['epoch']}.safetensors")
            self.raw = [p.detach().clone() for p in self.model.parameters()]
            self.predicted = self.predict(held, batch_size=16)
            assert metrics["val_loss"] == pytest.approx(self.evaluate(val())["val_loss"], rel=1e-12)

    def probe(trainer):
        return {"probed": loss_of(trainer.model)}

    trainer = made(cls=Sees, checkpoint=Checkpoint(tmp_path / "run", best="val_loss"), observers=[Probe(probe)])
    result = trainer.fit(train(), val(), epochs=2)
    for epoch in (1, 2):
        _, averaged = plain(epoch)
        row = result.history[epoch - 1]
        assert row["val_loss"] == pytest.approx(loss_of(averaged), rel=1e-6)
        assert row["probed"] == pytest.approx(loss_of(averaged), rel=1e-6)
        weights = list(load_weights(tmp_path / f"weights-{epoch}.safetensors").values())
        assert all(torch.equal(a, b) for a, b in zip(weights, averaged.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(seen[2 * epoch - 1], averaged.parameters(), strict=True))
        kept = load_weights(tmp_path / "run" / f"update-{3 * epoch:010d}")
        assert all(torch.equal(a, b) for a, b in zip(kept.values(), averaged.parameters(), strict=True))
    raw, averaged = plain(2)
    assert all(torch.equal(a, b) for a, b in zip(trainer.raw, raw.parameters(), strict=True))
    assert torch.equal(trainer.predicted, averaged(held).detach())
    assert equal(trainer.model, averaged)
    assert torch.equal(trainer.predict(held, batch_size=16), averaged(held).detach())
    assert trainer.evaluate(val())["val_loss"] == pytest.approx(loss_of(averaged), rel=1e-6)
    assert result.best.value == min(row["val_loss"] for row in result.history)


@pytest.mark.parametrize("from_file", [False, True])
def test_the_best_averaged_weights_are_left_and_the_next_fit_trains_the_raw_ones(from_file, tmp_path, capsys):
    early = EarlyStopping("val_loss", patience=2)
    slot = Checkpoint(tmp_path, best="val_loss") if from_file else None
    first = []

    class Sees(Trainer):
        def begin_epoch(self, epoch):
            first.append([p.detach().clone() for p in self.model.parameters()])

    trainer = made(lr=0.6, cls=Sees, early_stopping=early, checkpoint=slot, console=True)
    result = trainer.fit(train(), val(), epochs=6)
    best = result.best.epoch
    assert best < result.epochs
    assert result.weights == f"averaged, best of epoch {best}"
    assert f"weights: averaged, best of epoch {best}" in " ".join(capsys.readouterr().out.split())
    assert equal(trainer.model, plain(best, lr=0.6)[1])
    assert trainer.evaluate(val())["val_loss"] == pytest.approx(result.best.value)
    raw, _ = plain(result.epochs, lr=0.6)
    begun = len(first)
    trainer.fit(train(), val(), epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(first[begun], raw.parameters(), strict=True))


def test_the_last_line_says_which_weights_are_left(capsys):
    for settings, said in (
        ({"average": None}, "weights: last"),
        ({}, "weights: averaged"),
        ({"early_stopping": EarlyStopping("val_loss"), "average": None}, "weights: best of epoch 2"),
        ({"average": SWA(0.0, Updates(100))}, None),
    ):
        trainer = made(console=True, **settings)
        if said is None:
            with pytest.raises(SettingError, match="takes no average"):
                trainer.fit(train(), val(), epochs=2)
            continue
        trainer.fit(train(), val(), epochs=2)
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "weights:" in line][-1].endswith(said)


def test_swa_with_batchnorm_shows_statistics_of_its_own():
    model = net(norm=True)
    trainer = made(model, average=SWA(Updates(1), Updates(1)))
    result = trainer.fit(train(), val(), epochs=2)

    plain_model = net(norm=True)
    averaged = AveragedModel(plain_model)
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for _ in range(2):
        for a, b in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(plain_model(a), b).backward()
            optimizer.step()
            averaged.update_parameters(plain_model)
    update_bn(x.split(8), averaged)
    assert equal(model, averaged.module)
    assert torch.equal(model[1].running_mean, averaged.module[1].running_mean)
    assert result.history[-1]["val_loss"] == pytest.approx(loss_of(averaged.module), rel=1e-6)


def test_swa_with_batchnorm_on_a_stream_is_refused_with_what_to_write():
    trainer = made(net(norm=True), average=SWA(Updates(1), Updates(1)))
    stream = ((x[:8], y[:8]) for _ in range(99))
    with pytest.raises(SettingError, match=r"BatchNorm statistics(.|\n)*average=EMA"):
        trainer.fit(stream, val(), max_updates=4)
    assert trainer.progress.updates == 0
    frozen = net(norm=True)
    freeze(frozen[1])
    stream = ((x[:8], y[:8]) for _ in range(99))
    assert made(frozen, average=SWA(Updates(1), Updates(1))).fit(stream, val(), max_updates=4).updates == 4


def free(cls=Trainer, **settings):
    model = net()
    return cls(model, ScheduleFree(model.parameters(), lr=0.1), nn.MSELoss(), **{"console": False} | settings)


def by_hand(epochs):
    model = net()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    for _ in range(epochs):
        for a, b in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    raw = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    return raw, model


def test_a_schedule_free_optimizer_trains_one_set_and_shows_the_other(tmp_path, capsys):
    trainer = free(checkpoint=Checkpoint(tmp_path), console=True)
    result = trainer.fit(train(), val(), epochs=2)
    raw, shown = by_hand(2)
    assert equal(trainer.model, shown)
    assert not all(torch.equal(a, b) for a, b in zip(raw, shown.parameters(), strict=True))
    assert result.history[-1]["val_loss"] == pytest.approx(loss_of(shown), rel=1e-6)
    kept = load_weights(tmp_path, which="last")
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), shown.parameters(), strict=True))
    assert result.weights == "averaged" and "weights: averaged" in capsys.readouterr().out
    assert loss_of(by_hand(1)[1]) == pytest.approx(result.history[0]["val_loss"], rel=1e-6)


class Dies(Observer):
    def __init__(self, at):
        self.at = at

    def on_update(self, update):
        if update.update == self.at:
            raise ZeroDivisionError


@pytest.mark.sample(4)
@pytest.mark.parametrize("at", [2, 4, 6, 8, 11])
@pytest.mark.parametrize("early", [False, True])
def test_a_schedule_free_script_killed_and_run_again_is_never_killed(at, early, tmp_path):
    def script(directory, at=None):
        settings = {"early_stopping": EarlyStopping("val_loss", patience=9)} if early else {}
        slot = Checkpoint(directory, every=Updates(1), keep=12)
        trainer = free(checkpoint=slot, observers=[] if at is None else [Dies(at)], **settings)
        results = [trainer.fit(train(), val(), epochs=2, resume="auto") for _ in range(2)]
        return trainer, [(one.weights, one.history, one.updates) for one in results]

    whole, reported = script(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        script(tmp_path / "cut", at)
    cut, also = script(tmp_path / "cut")
    assert equal(whole.model, cut.model) and reported == also
    for a, b in zip(whole.optimizer.state.values(), cut.optimizer.state.values(), strict=True):
        assert torch.equal(a["z"], b["z"])
    assert cut.optimizer.param_groups[0]["k"] == whole.optimizer.param_groups[0]["k"] == 12


def test_an_average_beside_a_schedule_free_optimizer_is_refused():
    with pytest.raises(SettingError, match="ScheduleFree averages by itself"):
        free(average=EMA(0.9)).fit(train(), epochs=1)


def test_an_error_leaves_the_raw_weights_in_the_model():
    class Fails(Trainer):
        def validation_step(self, batch):
            if self.progress.updates:
                raise ZeroDivisionError
            return super().validation_step(batch)

    trainer = made(cls=Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(train(), val(), epochs=1)
    assert equal(trainer.model, plain(1)[0])


@pytest.mark.parametrize("from_file", [False, True])
def test_a_layer_added_after_the_best_leaves_the_last_weights_and_says_so(from_file, tmp_path):
    class Grows(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 2:
                self.model.append(nn.Linear(1, 1))
                nn.init.constant_(self.model[-1].weight, 30.0)
                self.optimizer.add_param_group({"params": self.model[-1].parameters(), "lr": 0.0})

    early = EarlyStopping("val_loss", patience=9)
    slot = Checkpoint(tmp_path, best="val_loss") if from_file else None
    trainer = made(cls=Grows, average=None, lr=1e-4, early_stopping=early, checkpoint=slot)
    with pytest.warns(UserWarning, match=r"another model(.|\n)*the model has the last ones"):
        result = trainer.fit(train(), val(), epochs=3)
    assert result.best.epoch == 2 and result.weights == "last"


def test_a_layer_added_before_the_best_is_kept_with_it():
    class Grows(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 1:
                self.model.append(nn.Linear(1, 1))
                self.optimizer.add_param_group({"params": self.model[-1].parameters()})

    trainer = made(cls=Grows, average=None, lr=0.01, early_stopping=EarlyStopping("loss", patience=9))
    assert trainer.fit(train(), val(), epochs=6).weights == "best of epoch 6"
