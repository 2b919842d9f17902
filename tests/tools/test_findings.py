"""Findings: each planted mistake is found with its layer or line, and correct models and data give none."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Trainer, freeze
from trainwright.data import Normalize
from trainwright.tools.findings import Finding, findings
from trainwright.tools.trial import ready, traceless

CLASSES = 3
EXAMPLES = Path(__file__).parents[2] / "examples"


def rows(number: int = 32, *shape: int, batches: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Ready batches of normal numbers with classes."""
    torch.manual_seed(0)
    shape = shape or (6,)
    return [(torch.randn(number, *shape), torch.arange(number) % CLASSES) for _ in range(batches)]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, CLASSES))


def convolutional(*, bias: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=bias),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, CLASSES),
    )


def trainer_of(model: nn.Module, loss: Any = None, kind: type[Trainer[Any]] = Trainer, **settings: Any) -> Trainer[Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return kind(model, optimizer, loss or nn.CrossEntropyLoss(), console=False, **settings)


def found(trainer: Trainer[Any], batches: Sequence[Any], **data: Any) -> dict[str, Finding]:
    """Return the findings by name; each name occurs once."""
    with traceless(trainer):
        each = findings(trainer, batches, **data)
    named = {one.name: one for one in each}
    assert len(named) == len(each)
    for one in each:
        assert one.what and one.why and one.fix and "\n" not in one.fix
    return named


@pytest.mark.parametrize("make", [perceptron, lambda: nn.Linear(6, CLASSES)])
def test_a_correct_perceptron_has_no_findings(make: Any) -> None:
    assert found(trainer_of(make()), rows()) == {}


def test_a_convolutional_network_without_biases_before_batchnorm_has_no_findings() -> None:
    assert found(trainer_of(convolutional()), rows(32, 1, 6, 6)) == {}


def test_a_bias_before_batchnorm_is_found_by_its_layer_with_the_line_that_builds_it_without() -> None:
    one = found(trainer_of(convolutional(bias=True)), rows(32, 1, 6, 6))["bias before BatchNorm"]
    assert one.where == ("0",) and "0 before 1" in one.what
    layer = eval(one.fix.partition("#")[0], {"nn": nn})
    assert layer.bias is None and layer.weight.shape == (4, 1, 3, 3) and layer.padding == (1, 1)


def test_the_bias_of_a_linear_layer_before_batchnorm_is_found_and_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()
    batches = [(x.double(), y) for x, y in rows()]
    one = found(trainer_of(model), batches)["bias before BatchNorm"]
    assert one.where == ("0",) and "nn.Linear(in_features=6, out_features=8, bias=False)" in one.fix
    F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    first: Any = model[0]
    assert first.bias.grad.abs().max() < 1e-12 < first.weight.grad.abs().max()


class Declared(nn.Module):
    """Layers declared in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last, self.first = nn.BatchNorm1d(8), nn.Linear(8, CLASSES), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


def test_layers_are_matched_by_execution_order_and_not_by_name() -> None:
    assert found(trainer_of(Declared()), rows())["bias before BatchNorm"].where == ("first",)


class Used(nn.Module):
    """A bias with an effect: beside BatchNorm, before an activation in place, or before BatchNorm in eval mode."""

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
def test_a_bias_with_an_effect_is_no_finding(how: str) -> None:
    model = Used(how)
    if how == "frozen":
        freeze(model, "norm")
    assert found(trainer_of(model), rows()) == {}


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
    assert list(found(trainer_of(model), rows())) == ["input of the loss"]
    right = nn.Sequential(nn.Linear(6, CLASSES), nn.LogSoftmax(1))
    assert found(trainer_of(right, nn.NLLLoss()), rows()) == {}
    bare = found(trainer_of(nn.Linear(6, CLASSES), nn.NLLLoss()), rows())
    assert list(bare) == ["input of the loss"] and "NLLLoss expects log-probabilities" in bare["input of the loss"].what
    softmax = nn.Sequential(nn.Linear(6, CLASSES), nn.Softmax(1))
    assert "input of the loss" in found(trainer_of(softmax, nn.NLLLoss()), rows())


def test_a_softmax_without_a_gradient_that_is_changed_in_place_is_no_finding() -> None:
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
    assert "input of the loss" in found(trainer_of(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), logits), batches)
    assert found(trainer_of(nn.Linear(6, 1), logits), batches) == {}
    assert found(trainer_of(nn.Sequential(nn.Linear(6, 1), nn.Sigmoid()), nn.BCELoss()), batches) == {}


def test_batchnorm_left_in_eval_mode_is_found_and_a_frozen_one_is_not() -> None:
    model = convolutional()
    model[1].eval()
    assert found(trainer_of(model), rows(32, 1, 6, 6))["layers in eval mode"].where == ("1",)
    frozen = convolutional()
    freeze(frozen, "1")
    assert found(trainer_of(frozen), rows(32, 1, 6, 6)) == {}


def test_dropout_left_in_eval_mode_is_found_and_that_of_a_frozen_part_is_not() -> None:
    model = perceptron()
    model[2].eval()
    assert found(trainer_of(model), rows())["layers in eval mode"].where == ("2",)
    two = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(8, CLASSES))
    freeze(two, "0")
    two[0].eval()
    assert found(trainer_of(two), rows()) == {}


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(torch.relu(self.first(x)), 0.2))  # training=True, the default
        return out


def test_functional_dropout_in_validation_is_found_with_its_line() -> None:
    one = found(trainer_of(Always()), rows())["train mode in validation"]
    assert one.where[0].startswith("test_findings.py:")


class Waking(Trainer[Any]):
    def validation_step(self, batch: Any) -> Any:
        self.model.train()
        return self.training_step(batch)


def test_a_validation_step_that_sets_train_mode_is_found() -> None:
    each = found(trainer_of(convolutional(), kind=Waking), rows(32, 1, 6, 6), val=rows(32, 1, 6, 6))
    assert each["train mode in validation"].where[0].startswith("1")
    assert found(trainer_of(convolutional(), kind=Waking), rows(32, 1, 6, 6)) == {}  # no validation data, no verdict


def test_batchnorm_without_running_statistics_is_no_finding() -> None:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    assert found(trainer_of(model), rows()) == {}


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
    assert found(trainer_of(model), rows()) == {}
    exec(one.fix.partition("#")[0], {"freeze": freeze, "model": (mended := Unused())})
    assert not mended.spare.weight.requires_grad and not mended.spare.bias.requires_grad


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


def test_a_loss_without_a_gradient_is_a_finding_and_not_an_error() -> None:
    assert list(found(trainer_of(perceptron(), kind=Detached), rows())) == ["loss reaches no parameter"]


def test_a_loss_that_trains_only_its_own_parameters_is_found() -> None:
    model, scale = nn.Linear(6, CLASSES), nn.PReLU()
    optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.1)
    one = found(Beside(model, optimizer, scale, console=False), rows())["loss reaches no parameter"]
    assert one.where == ("model.weight", "model.bias")


def test_a_custom_update_is_watched_and_not_evaluated_without_validation_data() -> None:
    class Own(Trainer[Any]):
        def update(self, window: Any) -> None:
            for x, _ in window:
                self.minimize(self.model(x)["score"].square().mean())

    class Scores(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"score": super().forward(input)}

    assert found(trainer_of(Scores(6, 1), kind=Own), rows()) == {}


def test_an_optimizer_that_made_no_update_is_no_finding_and_an_unused_layer_of_another_is() -> None:
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


def test_a_teacher_in_eval_mode_is_no_finding() -> None:
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


def test_inference_sparse_and_nested_tensors_are_no_finding() -> None:
    assert found(trainer_of(nn.Linear(6, CLASSES), kind=Odd), rows()) == {}


def test_other_errors_of_a_step_are_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        found(trainer_of(nn.Linear(5, CLASSES)), rows())


def test_a_compiled_model_runs_eagerly_and_gives_the_same_findings() -> None:
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


NAME = "inputs not normalized"


def shifted(scale: float, offset: float = 0.0, *shape: int) -> list[tuple[Tensor, Tensor]]:
    return [(scale * x + offset, y) for x, y in rows(32, *shape)]


@pytest.mark.parametrize(
    ("scale", "offset", "problem"),
    [(1, 0, False), (2, 0, False), (1, 2, False), (5, 0, True), (1, 4, True), (1e-3, 0, True), (100, 0, True)],
)
def test_inputs_are_judged_by_the_rule(scale: float, offset: float, problem: bool) -> None:
    assert (NAME in found(trainer_of(perceptron()), shifted(scale, offset))) is problem


def test_a_finding_on_inputs_names_their_mean_and_standard_deviation() -> None:
    batches = shifted(50, 200)
    seen = torch.cat([x for x, _ in batches])
    reported = found(trainer_of(perceptron()), batches)[NAME].what
    assert f"mean {seen.mean():.3g}, standard deviation {seen.std():.3g}" in reported


def test_one_feature_out_of_scale_among_many_is_found() -> None:
    batches = [(torch.cat([x.repeat(1, 20)[:, :100], 12 + x[:, :1]], 1), y) for x, y in rows()]
    assert NAME in found(trainer_of(nn.Linear(101, CLASSES)), batches)


@pytest.mark.parametrize(("load", "divide", "problem"), [(load_digits, 1, True), (load_digits, 16, False)])
def test_raw_digits_are_found_and_scaled_digits_are_not(load: Any, divide: float, problem: bool) -> None:
    x, y = load(return_X_y=True)
    x, y = torch.tensor(x / divide, dtype=torch.float32), torch.tensor(y)
    ready = list(zip(x.split(64), y.split(64), strict=True))
    assert (NAME in found(trainer_of(nn.Linear(64, 10)), ready)) is problem


def test_columns_of_different_scale_are_found_and_standardized_columns_are_not() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    model = nn.Linear(30, 2)
    one = found(trainer_of(model), list(zip(x.split(64), y.split(64), strict=True)))[NAME]
    names: dict[str, Any] = {"x": x}
    exec(one.fix.partition("#")[0], names)
    assert found(trainer_of(model), list(zip(names["x"].split(64), y.split(64), strict=True))) == {}


def test_tokens_and_inputs_that_the_model_normalizes_are_no_finding() -> None:
    tokens = [(torch.arange(64).view(32, 2) * 7, y) for _, y in rows()]
    embedding = nn.Sequential(nn.Embedding(500, 4), nn.Flatten(), nn.Linear(8, CLASSES))
    assert found(trainer_of(embedding), tokens) == {}
    own = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    assert found(trainer_of(own), shifted(100)) == {}


def test_activations_are_not_judged_as_inputs() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 100 * x.relu()

    assert found(trainer_of(nn.Sequential(nn.Linear(6, 8), Large(), nn.Linear(8, CLASSES))), rows()) == {}


def test_the_line_with_normalize_for_images_removes_the_finding() -> None:
    pixels = torch.randint(0, 256, (96, 1, 6, 6), dtype=torch.uint8)
    y = torch.arange(96) % CLASSES

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolutional()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x.float())
            return out

    trainer, ready_made = trainer_of(Bytes()), list(zip(pixels.split(32), y.split(32), strict=True))
    one = found(trainer, ready_made)[NAME]
    mended = eval(one.fix, {"nn": nn, "Normalize": Normalize, "model": trainer.model})
    assert abs(float(mended[0](pixels).mean())) < 0.1 and NAME not in found(trainer_of(mended), ready_made)


@pytest.mark.parametrize("workload", ["mlp", "cnn", "text"])
def test_the_bundled_workloads_have_no_findings(workload: str) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = runpy.run_path(str(EXAMPLES / "advise.py"))
    trainer, loader = names[workload]()
    assert found(trainer, ready(trainer, loader, updates=3), val=loader) == {}
