"""The error of an update that is not finite says where it began, and looking for that leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, MixedPrecision, NonFiniteError, Trainer, Updates

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 1, generator=GENERATOR)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def made(model, cls=Trainer, loss=None, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(
        model, optimizer, nn.MSELoss() if loss is None else loss, **{"console": False, "device": "cpu", **settings}
    )


def error_of(trainer, data):
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(data, epochs=1)
    return str(caught.value)


def holding(value, *places, like=X):
    tensor = like.clone()
    for row, column in places:
        tensor[row, column] = value
    return tensor


# The batch.


def test_it_names_the_input_with_its_counts_and_rows():
    bad = holding(math.inf, (3, 0), like=holding(math.nan, (1, 2), (3, 1)))
    text = error_of(made(nn.Linear(3, 1)), [(X, Y), (bad, Y)])
    assert "update 2: the loss is not finite; no weight was changed" in text
    assert "train batch 2 of epoch 1: input batch[0] has 2 NaN and 1 inf of 12 elements, in rows 1, 3 of 4" in text
    assert "fix   correct these rows in the data" in text and 'on_nonfinite="skip"' in text
    assert "forward" not in text


def test_it_names_the_target_and_the_micro_batch_of_a_window():
    text = error_of(
        made(nn.Linear(3, 1), accumulate=2), [(X, Y), (X, Y), (X, Y), (X, holding(math.nan, (2, 0), like=Y))]
    )
    assert "train batch 4 of epoch 1: target batch[1] has 1 NaN of 4 elements, in row 2 of 4" in text


def test_many_rows_are_counted_and_not_all_listed():
    x = torch.randn(30, 3)
    x[5:25] = math.nan
    assert "in rows 5, 6, 7, 8, 9 and 15 more of 30" in error_of(made(nn.Linear(3, 1)), [(x, torch.zeros(30, 1))])
    assert "in all 30 rows" in error_of(made(nn.Linear(3, 1)), [(x * math.nan, torch.zeros(30, 1))])


class ByName(Trainer):
    def training_step(self, batch):
        return self.loss(self.model(batch["features"]["x"]), batch["y"])


def test_a_nested_batch_is_named_as_it_is_written_in_python():
    batch = {"features": {"x": holding(math.nan, (0, 0))}, "y": Y, "name": ["a", "b"], "number": torch.arange(4)}
    text = error_of(made(nn.Linear(3, 1), ByName), [batch])
    assert "batch['features']['x'] has 1 NaN of 12 elements, in row 0 of 4" in text


def test_what_to_device_makes_of_a_finite_batch_is_named():
    class Divides(Trainer):
        def to_device(self, batch):
            return batch[0] / 0, batch[1]

    assert "batch[0] has 12 inf of 12 elements, in all 4 rows, after to_device" in error_of(
        made(nn.Linear(3, 1), Divides), [(X, Y)]
    )


# The weights.


def test_weights_that_were_not_finite_before_the_update_are_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight[0, 2] = math.inf
    text = error_of(made(model), [(X, Y)])
    assert "the weight '1.weight' of Sequential had 1 inf of 4 elements before this update" in text
    assert "a lower learning rate" in text


# The forward.


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class Net(nn.Module):
    """Computes something between its modules."""

    def __init__(self, between):
        super().__init__()
        self.body, self.head, self.between = nn.Linear(3, 4), nn.Linear(4, 1), between

    def forward(self, x):
        return self.head(self.between(self.body(x)))


def test_the_first_module_whose_output_is_not_finite_is_named():
    text = error_of(
        made(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Identity(), Log()), nn.Linear(4, 1))), [(X, Y)]
    )
    assert "forward: Log '1.1' gave the first output that is not finite: " in text and " NaN of 16 elements" in text
    assert "batch[" not in text


def test_an_operation_between_modules_is_placed_between_them():
    text = error_of(made(Net(torch.log)), [(X, Y)])
    assert "forward: the input of Linear 'head' is the first that is not finite" in text
    assert "computed in the forward of Net, after Linear 'body'" in text


def test_a_loss_of_finite_outputs_is_named():
    text = error_of(made(nn.Linear(3, 1), loss=lambda output, target: (output - target).log().mean()), [(X, Y)])
    assert "forward: the outputs of all modules are finite; the loss that was made of them is not" in text
    assert "MSELoss gave the first output" in error_of(made(nn.Linear(3, 1)), [(X * 1e30, Y)])


def test_infinite_inputs_that_are_meant_do_not_hide_the_module():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.log = nn.Linear(3, 3), Log()

        def forward(self, x, mask):
            return (self.log(self.linear(x)) + (x + mask).softmax(1)).sum(1, keepdim=True)

    text = error_of(made(Masked()), [(X, torch.tensor([[0.0, -math.inf, 0.0]] * 4), Y)])
    assert "input batch[1] has 4 inf of 12 elements" in text
    assert "forward: Log 'log' gave the first output that is not finite" in text


def test_the_micro_batch_of_a_forward_that_is_not_finite_is_named():
    text = error_of(made(nn.Sequential(Log(), nn.Linear(3, 1)), accumulate=2), [(X.abs(), Y), (X, Y)])
    assert "Log '0' gave the first output that is not finite" in text and "(train batch 2 of epoch 1)" in text


def test_a_forward_that_is_finite_the_second_time_is_said_so():
    class Once(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (math.nan if self.calls == 2 else 1.0)

    model = Once(3, 1)
    text = error_of(made(model), [(X, Y)] * 3)
    assert "update 2" in text and "a second forward and backward gave finite numbers" in text and model.calls == 3


def test_a_step_that_fails_when_it_is_run_again_does_not_replace_the_error():
    class TakesOut(Trainer):
        def training_step(self, batch):
            return self.loss(self.model(batch.pop("x")).log(), batch["y"])

    text = error_of(made(nn.Linear(3, 1), TakesOut), [{"x": X, "y": Y}])
    assert "the loss is not finite" in text and "a second forward, to find the module, failed with KeyError" in text


# The backward.


def root(h):
    return (h - h.detach()).abs().sqrt()  # 0, with an infinite slope


class Root(nn.Module):
    def forward(self, x):
        return root(x)


def test_the_module_whose_backward_made_the_first_gradient_that_is_not_finite_is_named():
    text = error_of(made(nn.Sequential(nn.Linear(3, 4), nn.Sequential(Root()), nn.Linear(4, 1))), [(X, Y)])
    assert "the gradient is not finite" in text
    assert "backward: Root '1.0' made the first gradient that is not finite, from a finite one" in text
    assert "anomaly() names the line" in text


def test_a_backward_between_modules_is_placed_behind_the_one_before():
    assert (
        "backward: the gradient that reaches the output of Linear 'body' is the first that is not finite"
        in error_of(made(Net(root)), [(X, Y)])
    )


def test_gradients_of_weights_that_no_module_made_are_named():
    class Penalised(Trainer):
        def training_step(self, batch):
            weight = self.model.weight
            return super().training_step(batch) + (weight - weight.detach()).sum().sqrt()

    text = error_of(made(nn.Linear(3, 1), Penalised), [(X, Y)])
    assert "backward: the gradients of all outputs are finite, those of weights are not: 'weight' (3 inf" in text


def test_an_overflow_at_the_floor_of_the_loss_scale_is_traced_under_that_scale():
    floor = MixedPrecision("fp16", init_scale=2.0**16, min_scale=2.0**16)
    text = error_of(made(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), precision=floor), [(X, 1e3 * Y)])
    assert "the gradient is not finite" in text and "backward: " in text


# What it does not know, and what it leaves.


def test_an_update_of_the_users_own_receives_the_batch_alone():
    class Own(Trainer):
        def update(self, window):
            loss = self.compute_gradients(window)
            self.apply_gradients()
            return loss

    assert "input batch[0] has 1 NaN" in error_of(made(nn.Linear(3, 1), Own), [(holding(math.nan, (0, 0)), Y)])
    assert "forward" not in error_of(made(nn.Sequential(Log(), nn.Linear(3, 1)), Own), [(X, Y)])


class Running(nn.Module):
    """Divides by a running scale that its forward writes past the version counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale.data.mul_(0.5).add_(x.detach().abs().mean())
        return x / self.scale


class Notes(Trainer):
    def training_step(self, batch):
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.log("steps", self.state["steps"])
        return super().training_step(batch)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_looking_for_it_leaves_no_trace(kind, tmp_path):
    def net():
        torch.manual_seed(0)
        poisonous = Root() if kind == "backward" else nn.Identity()
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Running(), nn.Dropout(0.5), nn.Linear(4, 2), poisonous)

    data = [(X, torch.zeros(4, 2)), (X, torch.full((4, 2), 1e30))]
    loss = nn.MSELoss()
    expected = net()
    torch.manual_seed(1)
    before_last = None
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in data:
        before_last = {name: value.clone() for name, value in expected[1].state_dict().items()}
        optimizer.zero_grad()
        value = loss(expected(x), y)
        value.backward()
        if kind == "backward":
            break
        if y[0, 0] == 0:
            optimizer.step()
    draws = torch.get_rng_state()
    gradients = [p.grad for p in expected.parameters()]

    trainer = made(
        net(),
        Notes,
        loss,
        metrics={"size": lambda output, target: output.abs().mean()},
        checkpoint=Checkpoint(tmp_path, every=Updates(1)),
    )
    torch.manual_seed(1)
    error_of(trainer, data)
    assert torch.equal(torch.get_rng_state(), draws)
    model = trainer.model
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7.0, 8.0, 9.0), gradient.nan_to_num(7.0, 8.0, 9.0))
    assert all(torch.equal(value, before_last[name]) for name, value in model[1].state_dict().items())
    assert torch.equal(model[2].scale.nan_to_num(7.0), expected[2].scale.nan_to_num(7.0))
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), *loss.modules()))
    assert trainer.state["steps"] == (1 if kind == "backward" else 2)
    assert trainer.progress.updates == (0 if kind == "backward" else 1)
