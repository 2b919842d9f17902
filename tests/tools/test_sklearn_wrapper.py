"""Estimators: what they train is what a plain loop trains; parameters, weights, random states, searches and pickles."""

from __future__ import annotations

import pickle
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from torch import Tensor, nn

from trainwright import EarlyStopping, SettingError, batches, sgd
from trainwright.tools import SklearnClassifier, SklearnRegressor

draws = np.random.RandomState(0)
X = draws.randn(80, 4)
y = np.where(X.sum(1) > 0, "yes", "no")
values = X @ np.array([[1.0, 0.5], [0.0, -1.0], [2.0, 0.0], [0.5, 0.5]])
QUICK: dict[str, Any] = {"epochs": 3, "random_state": 0}


class Net(nn.Module):
    def __init__(self, features: int, outputs: int, *, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores


def by_hand(rows: Any, target: Tensor, weight: Tensor) -> Tensor:
    """The probabilities of a plain loop for the rows it has been trained on."""
    seed = int(check_random_state(0).randint(2**31 - 1))
    inputs = torch.tensor(rows, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net(4, 2, dropout=0.2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = batches((inputs, target, weight), 16, shuffle=True, seed=seed)
        for _ in range(3):
            for part, classes, weights in loader:
                optimizer.zero_grad()
                losses = F.cross_entropy(model(part), classes, reduction="none")
                ((losses * weights).sum() / weights.sum()).backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        return model(inputs).softmax(1)


def dropping(**settings: Any) -> SklearnClassifier:
    how = {"module_params": {"dropout": 0.2}, "optimizer": torch.optim.SGD, "lr": 0.1, "batch_size": 16}
    return SklearnClassifier(Net, **{**how, **QUICK, **settings})


def test_what_is_trained_is_what_a_plain_loop_trains() -> None:
    fitted = dropping().fit(X, y)
    expected = by_hand(X, torch.tensor((y == "yes").astype(np.int64)), torch.ones(80))
    torch.testing.assert_close(torch.from_numpy(fitted.predict_proba(X)), expected, rtol=1e-5, atol=1e-6)
    assert fitted.classes_.tolist() == ["no", "yes"] and len(fitted.history_) == 3
    assert (fitted.predict(X) == fitted.classes_[expected.argmax(1).numpy()]).all()


def test_weights_of_rows_give_the_weighted_mean_of_each_update() -> None:
    weight = draws.rand(80) + 0.1
    fitted = dropping().fit(X, y, sample_weight=weight)
    target = torch.tensor((y == "yes").astype(np.int64))
    expected = by_hand(X, target, torch.tensor(weight, dtype=torch.float32))
    torch.testing.assert_close(torch.from_numpy(fitted.predict_proba(X)), expected, rtol=1e-5, atol=1e-6)
    without = by_hand(X, target, torch.ones(80))
    assert (expected - without).abs().max() > 1e-3
    left = weight > 0.5
    removed = dropping().fit(X[left], y[left], sample_weight=weight[left])
    zeroed = dropping().fit(X, y, sample_weight=np.where(left, weight, 0.0))
    assert (removed.predict_proba(X) == zeroed.predict_proba(X)).all()


@pytest.mark.parametrize(
    "loss", [lambda output, target: output.logsumexp(1).mean(), nn.CrossEntropyLoss(weight=torch.ones(2))]
)
def test_weights_with_a_loss_that_cannot_be_taken_apart_are_refused(loss: Any) -> None:
    with pytest.raises(SettingError, match="sample_weight with loss="):
        dropping(loss=loss).fit(X, y, sample_weight=np.ones(80))


def test_the_random_state_is_that_of_scikit_learn_and_the_process_keeps_its_own() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    one, other = (dropping().fit(X, y).predict_proba(X) for _ in range(2))
    assert (one == other).all() and states() == before
    assert (dropping(random_state=1).fit(X, y).predict_proba(X) != one).any()
    drawing = dropping(random_state=None)
    np.random.seed(3)
    first, second = drawing.fit(X, y).predict_proba(X), drawing.fit(X, y).predict_proba(X)
    np.random.seed(3)
    assert (drawing.fit(X, y).predict_proba(X) == first).all() and (first != second).any()
    own = np.random.RandomState(0)
    assert (dropping(random_state=own).fit(X, y).predict_proba(X) == one).all()


def test_a_grid_in_a_pipeline_sets_what_module_and_trainer_take() -> None:
    pipeline = make_pipeline(StandardScaler(), SklearnClassifier(Net, lr=0.05, epochs=4, random_state=0))
    name = "sklearnclassifier"
    grid = {f"{name}__module__width": [1, 16], f"{name}__trainer__clip": [None, 1.0], f"{name}__lr": [1e-5, 0.05]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, y)
    assert search.best_params_[f"{name}__lr"] == 0.05 and search.best_score_ > 0.8
    best = search.best_estimator_[-1]
    assert best.module_.layers[0].out_features == search.best_params_[f"{name}__module__width"]
    assert set(best.trainer_params) == {"clip"} and len(search.cv_results_["params"]) == 8
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.8


def test_nested_parameters_are_set_without_touching_another_estimators() -> None:
    first = SklearnClassifier(Net, module_params={"width": 4})
    second = clone(first).set_params(module__dropout=0.5, trainer__clip=1.0, lr=0.1)
    assert first.module_params == {"width": 4} and first.trainer_params is None
    assert second.module_params == {"width": 4, "dropout": 0.5} and second.lr == 0.1
    assert second.get_params()["module__width"] == 4 and "module__width" not in second.get_params(deep=False)
    with pytest.raises(ValueError, match="Invalid parameter 'modul'"):
        first.set_params(modul__width=3)
    with pytest.raises(TypeError, match="acumulate"):
        dropping(trainer_params={"acumulate": 2}).fit(X, y)


def test_a_fitted_estimator_is_pickled_with_its_weights() -> None:
    fitted = dropping().fit(X, y)
    again = pickle.loads(pickle.dumps(fitted))
    assert (again.predict_proba(X) == fitted.predict_proba(X)).all() and again.n_features_in_ == 4


def test_rows_to_validate_on_are_put_aside_by_class() -> None:
    rare = np.array([1] * 8 + [0] * 72)
    fitted = dropping(
        validation=0.25, epochs=30, trainer_params={"early_stopping": EarlyStopping("val_loss", patience=2)}
    )
    fitted.fit(X, rare, sample_weight=np.ones(80))
    assert "val_loss" in fitted.history_[-1] and fitted.trainer_params["early_stopping"].patience == 2


def test_probabilities_are_reported_where_the_loss_has_them() -> None:
    class LogNet(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).log_softmax(1)

    scores = SklearnClassifier(Net, **QUICK).fit(X, y)
    logs = SklearnClassifier(LogNet, loss=nn.NLLLoss(), **QUICK).fit(X, y)
    np.testing.assert_allclose(scores.predict_proba(X), logs.predict_proba(X), atol=1e-6)
    margin = SklearnClassifier(Net, loss=nn.MultiMarginLoss(), **QUICK).fit(X, y)
    assert not hasattr(margin, "predict_proba") and set(margin.predict(X)) <= {"yes", "no"}


def test_a_regressor_has_as_many_outputs_as_the_target_has_columns() -> None:
    both = SklearnRegressor(Net, lr=0.02, epochs=60, random_state=0).fit(X, values)
    assert both.predict(X).shape == (80, 2) and both.score(X, values) > 0.9
    one = SklearnRegressor(Net, lr=0.02, epochs=60, random_state=0).fit(X, values[:, 0])
    assert one.predict(X).shape == (80,) and one.score(X, values[:, 0]) > 0.9


@pytest.mark.parametrize("optimizer", ["auto", torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9), sgd])
def test_optimizers_are_given_the_rate(optimizer: Any) -> None:
    still = SklearnClassifier(Net, optimizer=optimizer, lr=1e-30, dtype="float64", **QUICK).fit(X, y)
    seed = int(check_random_state(0).randint(2**31 - 1))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = Net(4, 2).double()
    assert all(torch.equal(a, b) for a, b in zip(still.module_.parameters(), fresh.parameters(), strict=True))
    moved = SklearnClassifier(Net, optimizer=optimizer, lr=0.1, **QUICK).fit(X, y)
    assert not torch.equal(moved.module_.layers[0].weight, fresh.layers[0].weight.float())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingError, match="builds a fresh one"):
        SklearnClassifier(Net(4, 2)).fit(X, y)
    with pytest.raises(SettingError, match='"float32" or "float64"'):
        SklearnClassifier(dtype="half").fit(X, y)
    with pytest.raises(TypeError, match="batch_sise"):
        SklearnClassifier(batch_sise=3)
    with pytest.raises(ValueError, match="Negative values in data"):
        dropping().fit(X, y, sample_weight=-np.ones(80))


def test_a_module_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(TypeError, match="'depth'"):
        SklearnClassifier(Net, module_params={"depth": 3}).fit(X, y)
    wide = SklearnClassifier(lambda features, outputs: Net(features, outputs + 1), **QUICK).fit(X, y)
    with pytest.raises(SettingError, match=r"gives \(3,\) for each row, and there are 2 classes"):
        wide.predict_proba(X)
