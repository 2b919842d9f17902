"""Networks as scikit-learn estimators, for `GridSearchCV` and `Pipeline`. Imported on first use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from trainwright.core.errors import SettingError
from trainwright.core.records import StepOutput, SumLoss
from trainwright.core.rng import rng_preserved
from trainwright.core.rng import seed as start_random_state
from trainwright.core.suggestions import suggests
from trainwright.data.opening import batches
from trainwright.optim.optimizers import adamw
from trainwright.trainer import Trainer
from trainwright.update.losses import known_loss

Array = NDArray[Any]
_NESTED = {"module__": "module_params", "trainer__": "trainer_params"}
"""Prefix of parameters -> the dict that holds them: `module__x` is entry x of `module_params`."""


@suggests
@dataclass(eq=False, repr=False)
class _Estimator(BaseEstimator):  # type: ignore[misc]
    """Base class of classifier and regressor. Its fields are the parameters of the estimator."""

    module: Callable[..., nn.Module] | Literal["auto"] = "auto"
    _: KW_ONLY
    module_params: Mapping[str, Any] | None = None
    loss: Callable[..., Any] | Literal["auto"] = "auto"
    optimizer: Callable[..., Any] | Literal["auto"] = "auto"
    lr: float = 1e-3
    epochs: int = 50
    batch_size: int = 32
    validation: float | None = None
    trainer_params: Mapping[str, Any] | None = None
    dtype: str = "float32"
    random_state: Any = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters. `deep`: also those of module and trainer, such as `module__width`."""
        params: dict[str, Any] = super().get_params(deep)
        for prefix, held in _NESTED.items() if deep else ():
            own = params[held]
            params |= {f"{prefix}{name}": own[name] for name in (own if isinstance(own, Mapping) else ())}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters. `module__<name>` and `trainer__<name>` set a parameter of module or trainer."""
        super().set_params(**{name: one for name, one in params.items() if not name.startswith(tuple(_NESTED))})
        for prefix, held in _NESTED.items():
            given = {name.removeprefix(prefix): one for name, one in params.items() if name.startswith(prefix)}
            if given:
                setattr(self, held, {**(getattr(self, held) or {}), **given})
        return self

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a fresh module on `X` (rows, features) and `y`; return the estimator.

        `sample_weight`: the weight of each row. The loss of an update is the weighted mean over its rows; rows with
        weight 0 are left out. The random state of the process is restored, except for one draw from NumPy if
        `random_state` is None, as in every scikit-learn estimator.
        """
        X, y = validate_data(self, X, y, dtype=self._numpy_dtype(), multi_output=not is_classifier(self))
        weights = []
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
            X, y, weights = X[weight > 0], y[weight > 0], [weight[weight > 0]]
        target, outputs = self._read_target(y)
        train, val = (X, target, *weights), None
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with rng_preserved():
            start_random_state(seed)
            trainer = self._make_trainer(X.shape[1], outputs, weighted=bool(weights))
            if self.validation is not None:
                classes = target if is_classifier(self) else None
                split: Any = train_test_split(*train, test_size=self.validation, random_state=seed, stratify=classes)
                train, val = tuple(split[::2]), tuple(split[1::2])
            result = trainer.fit(
                batches(train, self.batch_size, shuffle=True, seed=seed),
                None if val is None else batches(val, self.batch_size),
                epochs=self.epochs,
            )
        self.history_, self.module_ = result.history, trainer.model
        return self

    def _make_trainer(self, features: int, outputs: int, *, weighted: bool) -> Trainer[Any]:
        """Return a trainer with a fresh module for these numbers of features and outputs."""
        build = perceptron if self.module == "auto" else self.module
        if isinstance(build, nn.Module) or not callable(build):
            want = "a class, or a function (features, outputs) that builds a fresh one"
            what = f"{type(self).__name__}(module): a {type(build).__name__}"
            raise SettingError(what, want=want, fix='module=Net, module_params={"width": 64}')
        params = self.module_params or {}
        module = build(features, outputs, **params).to(getattr(torch, self.dtype))
        optimizer: Any = adamw if self.optimizer == "auto" else self.optimizer
        # A torch class, or a partial of one, takes parameters; `adamw(lr=...)` returns a function of the model.
        takes_parameters = isinstance(optimizer.func if isinstance(optimizer, partial) else optimizer, type)
        optimizer = partial(optimizer, lr=self.lr) if takes_parameters else optimizer(lr=self.lr)
        loss: Any = copy.deepcopy(self.loss)  # a loss module may have trained weights
        if loss == "auto":
            loss = nn.CrossEntropyLoss() if is_classifier(self) else nn.MSELoss()
        settings = {"console": False, "parallel": None, **(self.trainer_params or {})}
        if not weighted:
            return Trainer(module, optimizer, loss, **settings)
        trainer = _WeightedTrainer(module, optimizer, loss, **settings)
        trainer.each = _each_row(loss)
        return trainer

    def _outputs(self, X: Any) -> Tensor:
        """Return the outputs of the module for rows."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=self._numpy_dtype(), reset=False)
        given = self.trainer_params or {}
        settings = {name: given[name] for name in ("device", "precision") if name in given}
        predictor = Trainer(self.module_, console=False, parallel=None, **settings)
        output: Tensor = predictor.predict(X, batch_size=max(1024, self.batch_size))
        return output

    def _numpy_dtype(self) -> Any:
        if self.dtype not in ("float32", "float64"):
            raise SettingError(f"dtype={self.dtype!r}", want='"float32" or "float64"')
        return np.dtype(self.dtype)

    def _read_target(self, y: Array) -> tuple[Array, int]:
        """Return (target in the form of the loss, number of outputs of the module)."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, with weights on the CPU, so that it loads without a GPU."""
        given: Any = super().__getstate__()
        state: dict[str, Any] = dict(given)
        module = state.get("module_")
        if module is not None and any(not tensor.is_cpu for tensor in (*module.parameters(), *module.buffers())):
            state["module_"] = copy.deepcopy(module).cpu()
        return state


class SklearnClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A network as a scikit-learn classifier.

    Grids may use all arguments, and names such as `module__width` or `trainer__clip`. Attributes after `fit`:
    `classes_`, `module_`, `history_`.

    Args:
        module: A class or function `module(n_features, n_classes, **module_params)` that returns a module with one
            score per class. "auto": a perceptron with a hidden layer of `width` 64.
        module_params: Arguments of `module`.
        loss: The loss. "auto": cross entropy.
        optimizer: A torch class, a partial of one, or a function such as `sgd`; called with `lr`. "auto": `adamw`.
        lr: The learning rate.
        epochs: The number of epochs.
        batch_size: Rows per batch, at most all rows.
        validation: Share of the rows for validation.
        trainer_params: Other arguments of the `Trainer`.
        dtype: The dtype of module and inputs.
        random_state: As in scikit-learn: an integer makes fits reproducible.
    """

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each row."""
        scores = self._scores(X)
        classes: Array = self.classes_[scores.argmax(1).numpy()]
        return classes

    @available_if(lambda self: self.loss == "auto" or isinstance(self.loss, nn.CrossEntropyLoss | nn.NLLLoss))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, in the order of `classes_`. Only for cross entropy and NLL."""
        probabilities: Array = (
            self._scores(X).softmax(1).numpy()
        )  # the softmax of log-probabilities (NLL) equals their exponential
        return probabilities

    def _scores(self, X: Any) -> Tensor:
        scores, classes = self._outputs(X), len(self.classes_)
        if scores.shape[1:] != (classes,):
            what = f"the module gives {tuple(scores.shape[1:])} for each row, and there are {classes} classes"
            raise SettingError(what, want="a score for each", fix="nn.Linear(..., outputs) in the end")
        return scores

    def _read_target(self, y: Array) -> tuple[Array, int]:
        check_classification_targets(y)
        self.classes_, target = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        return target.astype(np.int64), len(self.classes_)


class SklearnRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A network as a scikit-learn regressor with one or several outputs.

    Does not scale the target; `TransformedTargetRegressor` does. Attributes after `fit`: `module_`, `history_`.

    Args:
        module: A class or function `module(n_features, n_outputs, **module_params)` that returns a module with outputs
            (rows, n_outputs). "auto": a perceptron with a hidden layer of `width` 64.
        module_params: Arguments of `module`.
        loss: The loss. "auto": mean squared error.
        optimizer: A torch class, a partial of one, or a function such as `sgd`; called with `lr`. "auto": `adamw`.
        lr: The learning rate.
        epochs: The number of epochs.
        batch_size: Rows per batch, at most all rows.
        validation: Share of the rows for validation.
        trainer_params: Other arguments of the `Trainer`.
        dtype: The dtype of module and inputs.
        random_state: As in scikit-learn: an integer makes fits reproducible.
    """

    def predict(self, X: Any) -> Array:
        """Return predictions (rows,), or (rows, n_outputs) if `y` had columns; float64."""
        values: Array = self._outputs(X).double().numpy()
        return values.ravel() if self._is_flat else values

    def _read_target(self, y: Array) -> tuple[Array, int]:
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        self._is_flat = y.ndim == 1
        target = y.astype(self._numpy_dtype()).reshape(len(y), -1)
        return target, target.shape[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def perceptron(features: int, outputs: int, *, width: int = 64) -> nn.Module:
    """Return a perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, outputs))


class _WeightedTrainer(Trainer[Any]):
    """A trainer for batches (inputs, target, weight of each row). Its losses are weighted means."""

    each: Callable[[Tensor, Tensor], Tensor]

    def count(self, batch: Any) -> Any:
        return batch[2].sum()

    def training_step(self, batch: Any) -> Any:
        inputs, target, weight = batch
        output = self.model(inputs)
        total = (self.each(output, target) * weight).sum()
        return StepOutput(SumLoss(total, weight.sum()), output, target)


def _each_row(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss with one value per row. SettingError for a loss without a known form per row."""
    known = known_loss(loss)
    if known is None or known.reduction != "mean" or getattr(loss, "weight", None) is not None:
        fix = "loss=nn.CrossEntropyLoss(), and the weights of classes in sample_weight"
        what = f"sample_weight with loss={loss!r}"
        raise SettingError(what, want="a mean of torch's own, without weights of classes", fix=fix)
    return known.each_row
