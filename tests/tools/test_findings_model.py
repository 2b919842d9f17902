"""Findings in models: each planted problem is found by its layer, and what is as it should be is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from looked_at import CLASSES, convolutional, found, perceptron, rows, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Trainer, freeze, unfreeze


@pytest.mark.parametrize("make", [perceptron, lambda: nn.Linear(6, CLASSES)])
def test_nothing_is_found_in_a_clean_perceptron(make: Any) -> None:
    assert found(trainer_of(make()), rows()) == {}


def test_nothing_is_found_in_a_convolutional_net_without_biases_before_its_batchnorm() -> None:
    assert found(trainer_of(convolutional()), rows(32, 1, 6, 6)) == {}


def test_a_bias_before_batchnorm_is_found_by_its_layer_with_the_line_that_builds_it_without() -> None:
    one = found(trainer_of(convolutional(bias=True)), rows(32, 1, 6, 6))["bias before BatchNorm"]
    assert one.where == ("0",) and "0 before 1" in one.what
    layer = eval(one.fix.partition("#")[0], {"nn": nn})
    assert layer.bias is None and layer.weight.shape == (4, 1, 3, 3) and layer.padding == (1, 1)


def test_a_linear_layer_before_batchnorm_is_found_and_its_bias_is_really_of_no_effect() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    batches = [(x.double(), y) for x, y in rows()]
    one = found(trainer_of(model), batches)["bias before BatchNorm"]
    assert one.where == ("0",) and "nn.Linear(in_features=6, out_features=8, bias=False)" in one.fix
    F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    first: Any = model[0]
    assert first.bias.grad.abs().max() < 1e-12 < first.weight.grad.abs().max()


class Declared(nn.Module):
    """Layers in another order than they run in: names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last, self.first = nn.BatchNorm1d(8), nn.Linear(8, CLASSES), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


def test_the_order_of_execution_tells_not_that_of_names() -> None:
    assert found(trainer_of(Declared()), rows())["bias before BatchNorm"].where == ("first",)


class Used(nn.Module):
    """The bias has an effect: by another way round, by an activation, or in eval mode."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.how = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES), how
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.how == "inplace":
            out = self.norm(self.relu(hidden))
        else:
            out = torch.relu(self.norm(hidden)) + (hidden if self.how == "beside" else 0)
        last: Tensor = self.last(out)
        return last


@pytest.mark.parametrize("how", ["beside", "inplace", "frozen"])
def test_a_bias_that_has_an_effect_is_passed_over(how: str) -> None:
    model = Used(how)
    if how == "frozen":
        freeze(model, "norm")
    assert list(found(trainer_of(model), rows())) == (["frozen layers"] if how == "frozen" else [])


def test_a_layer_that_is_called_twice_and_once_without_batchnorm_keeps_its_bias() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.tanh(self.shared(torch.relu(self.norm(self.shared(x))))))
            return out

    assert found(trainer_of(Twice()), rows()) == {}


def test_softmax_before_cross_entropy_is_found_through_a_reshape_and_log_softmax_before_nll_is_not() -> None:
    model = nn.Sequential(nn.Linear(6, CLASSES), nn.Softmax(1), nn.Flatten())
    one = found(trainer_of(model), rows())["softmax before CrossEntropyLoss"]
    assert "Softmax '1'" in one.what
    right = nn.Sequential(nn.Linear(6, CLASSES), nn.LogSoftmax(1))
    assert found(trainer_of(right, nn.NLLLoss()), rows()) == {}
    bare = found(trainer_of(nn.Linear(6, CLASSES), nn.NLLLoss()), rows())
    assert list(bare) == ["NLLLoss of no log-probabilities"]
    softmax = nn.Sequential(nn.Linear(6, CLASSES), nn.Softmax(1))
    assert "softmax before NLLLoss" in found(trainer_of(softmax, nn.NLLLoss()), rows())


def test_a_softmax_whose_output_was_changed_in_place_is_another_matter() -> None:
    class Mixed(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            with torch.no_grad():
                other = self.model(x).softmax(1)
                other.mul_(100).log_()
            return F.cross_entropy(self.model(x), y) + F.cross_entropy(other, y)

    assert found(trainer_of(nn.Linear(6, CLASSES), kind=Mixed), rows()) == {}


def test_a_sigmoid_before_the_loss_that_has_one_is_found() -> None:
    batches = [(x, (x[:, :1] > 0).float()) for x, _ in rows()]
    logits = nn.BCEWithLogitsLoss()
    assert "sigmoid before BCEWithLogitsLoss" in found(
        trainer_of(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), logits), batches
    )
    assert found(trainer_of(nn.Linear(6, 1), logits), batches) == {}
    assert found(trainer_of(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), nn.BCELoss()), batches) == {}


def test_linear_layers_in_a_row_are_a_note_but_for_a_narrow_one() -> None:
    wide = found(trainer_of(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, CLASSES))), rows())
    assert wide["linear layers in a row"].level == "note" and wide["linear layers in a row"].where == ("0 and 1",)
    low_rank = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    assert found(trainer_of(low_rank), rows()) == {}


def test_batchnorm_left_in_eval_mode_is_found_and_a_frozen_one_is_not() -> None:
    model = convolutional()
    model[1].eval()
    assert found(trainer_of(model), rows(32, 1, 6, 6))["BatchNorm in eval mode"].where == ("1",)
    frozen = convolutional()
    freeze(frozen, "1")
    assert list(found(trainer_of(frozen), rows(32, 1, 6, 6))) == ["frozen layers"]  # a note


def test_dropout_left_in_eval_mode_is_found_and_that_of_a_frozen_part_is_not() -> None:
    model = perceptron()
    model[2].eval()
    assert found(trainer_of(model), rows())["dropout in eval mode"].where == ("2",)
    two = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(8, CLASSES))
    freeze(two, "0")
    two[0].eval()
    assert list(found(trainer_of(two), rows())) == ["frozen layers"]


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(torch.relu(self.first(x)), 0.2))  # training=True, the default
        return out


def test_functional_dropout_that_stays_on_in_validation_is_found_by_its_line() -> None:
    one = found(trainer_of(Always()), rows())["dropout in validation"]
    assert one.where[0].startswith("test_findings_model.py:")


class Waking(Trainer[Any]):
    def validation_step(self, batch: Any) -> Any:
        self.model.train()
        return self.training_step(batch)


def test_a_validation_step_that_wakes_the_model_is_found() -> None:
    each = found(trainer_of(convolutional(), kind=Waking), rows(32, 1, 6, 6), val=rows(32, 1, 6, 6))
    assert each["BatchNorm in validation"].where[0].startswith("1")
    assert found(trainer_of(convolutional(), kind=Waking), rows(32, 1, 6, 6)) == {}  # no validation data, no verdict


def test_a_batchnorm_without_running_statistics_normalises_by_the_batch_in_validation_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    assert found(trainer_of(model), rows()) == {}


@pytest.mark.parametrize(("size", "problem"), [(2, True), (4, True), (5, False)])
def test_batchnorm_of_few_rows_is_found(size: int, problem: bool) -> None:
    each = found(trainer_of(convolutional()), rows(size, 1, 6, 6))
    assert ("BatchNorm of few rows" in each) is problem


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(6, CLASSES), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_a_trained_parameter_without_a_gradient_is_found_and_a_frozen_one_is_not() -> None:
    one = found(trainer_of(Unused()), rows())["unused parameters"]
    assert one.where == ("model.spare.weight", "model.spare.bias")
    model = Unused()
    freeze(model, "spare")
    assert list(found(trainer_of(model), rows())) == ["frozen layers"]
    exec(one.fix.partition("#")[0], {"freeze": freeze, "model": (mended := Unused())})
    assert not mended.spare.weight.requires_grad and not mended.spare.bias.requires_grad


def test_a_layer_that_is_frozen_in_part_is_a_note() -> None:
    model = perceptron()
    model[0].bias.requires_grad_(False)
    one = found(trainer_of(model), rows())["frozen parameters"]
    assert (one.level, one.where) == ("note", ("0.bias",))


def test_layers_that_are_frozen_as_a_whole_are_a_note_with_the_line_that_trains_them_again() -> None:
    model = perceptron()
    freeze(model, "0")
    one = found(trainer_of(model), rows())["frozen layers"]
    assert (one.level, one.where) == ("note", ("0",))
    exec(one.fix, {"unfreeze": unfreeze, "model": model})
    assert found(trainer_of(model), rows()) == {}


def test_parameters_of_another_model_in_the_optimizer_are_found() -> None:
    model, other = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    trainer: Trainer[Any] = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False)
    assert len(found(trainer, rows())["parameters of another model"].where) == 2


class Detached(Trainer[Any]):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x).detach(), y)


class Beside(Trainer[Any]):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            output = self.model(x)
        return F.cross_entropy(output * self.loss.weight, y)  # type: ignore[union-attr]


class Named(Trainer[Any]):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        output = self.model(x)
        return {"class": F.cross_entropy(output, y), "size": output.detach().square().mean()}


def test_a_loss_that_reaches_nothing_is_a_finding_and_not_an_error() -> None:
    assert list(found(trainer_of(perceptron(), kind=Detached), rows())) == ["loss reaches no parameter"]


def test_a_loss_that_reaches_only_what_lies_beside_the_model_is_found() -> None:
    model, scale = nn.Linear(6, CLASSES), nn.PReLU()
    optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.1)
    one = found(Beside(model, optimizer, scale, console=False), rows())["loss reaches no parameter"]
    assert one.where == ("model.weight", "model.bias")


def test_one_of_several_losses_without_a_gradient_is_found_by_its_name() -> None:
    assert found(trainer_of(perceptron(), kind=Named), rows())["loss without a gradient"].where == ("size",)


def test_an_update_of_the_users_own_is_looked_at_and_not_evaluated_where_no_validation_data_are_given() -> None:
    class Own(Trainer[Any]):
        def update(self, window: Any) -> None:
            for x, _ in window:
                self.minimize(self.model(x)["score"].square().mean())

    class Scores(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"score": super().forward(input)}

    assert found(trainer_of(Scores(6, 1), kind=Own), rows()) == {}
    assert list(found(trainer_of(Scores(6, 1), kind=Own), rows(2))) == ["tiny batch"]


def test_an_optimizer_whose_turn_has_not_come_is_passed_over_and_one_unused_layer_of_another_is_not() -> None:
    class Turns(Trainer[Any]):
        def update(self, window: Any) -> None:
            for x, _ in window:
                self.minimize(self.model["often"](x).square().mean(), "often")

    parts = nn.ModuleDict({"often": Unused(), "seldom": nn.Linear(6, 2)})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in parts.items()}
    one = found(Turns(parts, optimizers, console=False), rows())["unused parameters"]
    assert one.where == ("model.often.spare.weight", "model.often.spare.bias")


class Taught(Trainer[Any]):
    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        return F.mse_loss(self.model(x), self.frozen["teacher"](x))


def test_a_teacher_in_eval_mode_is_passed_over() -> None:
    teacher = nn.Sequential(perceptron(), nn.BatchNorm1d(CLASSES))
    assert found(trainer_of(perceptron(), kind=Taught, frozen={"teacher": teacher}), rows()) == {}


class Odd(Trainer[Any]):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        with torch.inference_mode():
            assert not self.model(x).softmax(1).requires_grad
        sparse = x.to_sparse() @ self.model.weight.T
        nested = torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)
        return F.cross_entropy(sparse + self.model.bias, y) + self.model(nested).values().mean()


def test_inference_sparse_and_nested_tensors_are_passed_over() -> None:
    assert found(trainer_of(nn.Linear(6, CLASSES), kind=Odd), rows()) == {}


def test_other_errors_of_a_step_are_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        found(trainer_of(nn.Linear(5, CLASSES)), rows())


def test_a_compiled_model_is_looked_into_and_nothing_of_the_watch_is_compiled() -> None:
    model = convolutional(bias=True)
    compiled: Any = torch.compile(model, backend="eager")
    trainer = trainer_of(compiled)
    trainer.fit(rows(32, 1, 6, 6), max_updates=1)
    assert found(trainer, rows(32, 1, 6, 6))["bias before BatchNorm"].where == ("_orig_mod.0",)
    model.compile(backend="eager")
    assert found(trainer_of(model), rows(32, 1, 6, 6))["bias before BatchNorm"].where == ("0",)


def test_findings_leave_no_trace() -> None:
    trainer = trainer_of(convolutional(bias=True))
    before = [one.clone() for one in trainer.model.state_dict().values()]
    found(trainer, rows(32, 1, 6, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.state_dict().values(), strict=True))
    parameters = list(trainer.model.parameters())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in parameters)
    assert (trainer.progress.updates, trainer.history) == (0, [])


@pytest.fixture
def anomaly_mode() -> Iterator[None]:
    torch.autograd.set_detect_anomaly(True)
    yield
    torch.autograd.set_detect_anomaly(False)


def test_anomaly_mode_left_on_is_found(anomaly_mode: None) -> None:
    one = found(trainer_of(perceptron()), rows())["anomaly mode on"]
    assert "set_detect_anomaly(False)" in one.fix


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_around_a_step_is_found_with_its_line() -> None:
    class Searching(Trainer[Any]):
        def training_step(self, batch: Any) -> Any:
            x, y = batch
            with torch.autograd.detect_anomaly():
                return F.cross_entropy(self.model(x), y)

    one = found(trainer_of(perceptron(), kind=Searching), rows())["anomaly mode on"]
    assert one.where and one.where[0].startswith("test_findings_model.py:")


def test_anomaly_mode_that_is_off_is_not_found() -> None:
    assert found(trainer_of(perceptron()), rows()) == {}
