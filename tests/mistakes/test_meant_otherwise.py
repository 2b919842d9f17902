"""Data and optimizers that are meant otherwise than the loop would take them are refused before the first update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import entry, make, network, pieces, refused, with_method
from torch import nn
from torch.utils.data import DataLoader

from trainwright import MeanLoss, SettingError, StepError, SumLoss, Trainer, batches, save_weights
from trainwright.observers import Throughput
from trainwright.optim import param_groups

X, Y = torch.cat([x for x, _ in pieces()]), torch.cat([y for _, y in pieces()])


@pytest.mark.parametrize("pair", [(X, Y), (X.numpy(), Y.numpy()), (X, np.zeros((16, 3), np.float32))])
@pytest.mark.parametrize("settings", [{}, {"batch_size": 8}])
def test_inputs_and_targets_as_two_arguments(pair, settings):
    trainer = make()
    call = lambda: trainer.fit(*pair, epochs=1, **settings)  # noqa: E731
    want = "inputs and targets in one tuple"
    first = r"fit\(x, y\): the second is taken as validation data, .* as the first, 16"
    fix = refused(call, SettingError, first=first, want=want, trainer=trainer)
    given = eval(f"dict(given={fix.removeprefix('fit(').removesuffix(', ...)')})", {"x": pair[0], "y": pair[1]})
    assert make().fit(given["given"], epochs=1, batch_size=8).updates == 2


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_as_many_rows_of_the_same_kind_are_validation_data():
    model = Own(4, 4)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), console=False)
    assert "val_loss" in trainer.fit(X, X + 1, epochs=1, batch_size=8).history[0]
    assert "val_loss" in make().fit((X, Y), (X, Y), epochs=1, batch_size=8).history[0]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("loader", [batches, DataLoader])
def test_several_loaders_as_val(kind, loader):
    rows = list(zip(X, Y, strict=True))
    first, second = loader(rows, 8), loader(rows[:8], 8)
    trainer = make()
    call = lambda: trainer.fit(pieces(), kind([first, second]), epochs=1)  # noqa: E731
    says = rf"val={kind.__name__} of 2 loaders: a {kind.__name__} is taken as batches or rows"
    fix = refused(call, SettingError, first=says, want="a dict", trainer=trainer)
    val = eval(f"dict({fix})", {"first": first, "second": second})["val"]
    assert {"val_a_loss", "val_b_loss"} <= set(make().fit(pieces(), val, epochs=1).history[0])


def lbfgs(cls=Trainer, named=False):
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    return cls(model, {"only": optimizer} if named else optimizer, nn.CrossEntropyLoss(), console=False)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_that_needs_a_closure_is_given_the_update_to_paste(named):
    first = r"LBFGS\.step needs a closure, and the default update gives none"
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    given = {"only": optimizer} if named else optimizer
    call = lambda: Trainer(model, given, nn.CrossEntropyLoss(), console=False)  # noqa: E731
    fix = refused(call, SettingError, first=first, want="an update(self, window)")
    assert lbfgs(with_method(fix), named).fit(pieces(), epochs=1).updates == 4


def test_a_log_between_steps_says_where_it_belongs():
    class Logs(Trainer):
        def begin_epoch(self, epoch):
            self.log("n", 1.0)

    with pytest.raises(SettingError, match=r"^log\('n', \.\.\.\) outside a step") as caught:
        make(Logs).fit(pieces(), epochs=1)
    assert entry(str(caught.value), "fix") == "self.log('n', ...) in after_update(self), or self.print(...) here"
    after = with_method("def after_update(self): self.log('n', 1.0)")
    assert make(after).fit(pieces(), epochs=1).history[0]["n"] == 1.0


def test_weights_of_another_model_are_named_by_what_is_missing_and_what_is_not_in_it(tmp_path):
    from trainwright import Checkpoint, CheckpointError

    make(checkpoint=Checkpoint(tmp_path)).fit(pieces(), epochs=1)
    other = nn.Sequential(network())
    with pytest.raises(CheckpointError, match="is from another model") as caught:
        make(model=other, checkpoint=Checkpoint(tmp_path)).fit(pieces(), epochs=2, resume="auto")
    have = entry(str(caught.value), "have")
    assert have == "missing in the checkpoint: 0.bias, 0.weight; not in the model: bias, weight"


def test_loss_and_optimizer_the_other_way_round():
    model = network()
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    call = lambda: Trainer(model, loss, optimizer)  # noqa: E731
    first = r"Trainer\(model, loss, SGD\(\.\.\.\)\): the optimizer was given as the loss"
    assert refused(call, TypeError, first=first) == "Trainer(model, optimizer, loss)"
    eval(
        "Trainer(model, optimizer, loss)", {"Trainer": Trainer}, {"model": model, "optimizer": optimizer, "loss": loss}
    )


def test_an_observer_in_the_place_of_a_list_of_them():
    call = lambda: make(observers=Throughput())  # noqa: E731
    fix = refused(call, TypeError, first=r"observers=Throughput\(\.\.\.\)", where=False)
    assert fix == "observers=[Throughput(...)]"
    make(observers=[Throughput()])


@pytest.mark.parametrize("seconds", ["3", True, 0, float("nan")])
def test_seconds_that_are_no_number_above_zero(seconds):
    trainer = make()
    call = lambda: trainer.fit(pieces(), max_seconds=seconds)  # noqa: E731
    want = "a number of seconds above 0"
    refused(call, SettingError, first=f"max_seconds={seconds!r}", want=want, trainer=trainer)


@pytest.mark.parametrize(
    "given", [lambda loss: MeanLoss(loss, -1), lambda loss: MeanLoss(loss, "4"), lambda loss: SumLoss(loss, -2.0)]
)
def test_a_count_that_is_none(given):
    trainer = make(with_method("def training_step(self, batch): return self.given(super().training_step(batch))"))
    trainer.given = given
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    first = r"a step returned (MeanLoss|SumLoss)\(\.\.\., count=.*\)"
    fix = refused(call, StepError, first=first, want="at least 0", trainer=trainer, where=False)
    name, _, inside = fix.partition("(")
    assert inside.endswith(", len(target))")
    trainer.given = lambda loss: {"MeanLoss": MeanLoss, "SumLoss": SumLoss}[name](loss, np.int64(4))
    assert trainer.fit(pieces(), epochs=1).updates == 4


def test_a_schedule_that_gives_nothing():
    trainer = make(schedule=lambda update, total: None)
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    refused(call, SettingError, first=".* gave None for update=0, total=4", want="a factor of", trainer=trainer)


def test_a_model_in_the_place_of_its_weights(tmp_path):
    call = lambda: save_weights(tmp_path / "model.safetensors", network())  # noqa: E731
    fix = refused(call, TypeError, first=r"save_weights\(PosixPath, Linear\)", want="a state_dict")
    assert fix == 'save_weights("model.safetensors", model.state_dict())'


def test_parameters_in_the_place_of_their_model():
    call = lambda: param_groups(network().parameters(), lr=0.1)  # noqa: E731
    fix = refused(call, TypeError, first=r"param_groups\(generator, \.\.\.\)", want="the model")
    assert fix == "param_groups(model, ...)"
