"""Learning rates for another batch size: the linear rule, and the square-root rule."""

from __future__ import annotations

import math

from trainwright.core.checks import check_number, check_whole
from trainwright.core.suggestions import suggests


@suggests
def linear_scaled(lr: float, *, batch: int, to: int) -> float:
    """The rate for batches of `to` rows, where `lr` is right for `batch` rows: lr * to / batch.

    For SGD (Goyal et al. 2017, arXiv 1706.02677), with a warm-up where batches get much larger, and up to a size from
    which on it no longer holds. Rows are those of a whole update: accumulation and all processes included.
    """
    return _checked("linear_scaled", lr, batch=batch, to=to) * to / batch


@suggests
def sqrt_scaled(lr: float, *, batch: int, to: int) -> float:
    """The rate for batches of `to` rows, where `lr` is right for `batch` rows: lr * sqrt(to / batch).

    It keeps the variance of an update (Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017, arXiv 1705.08741). For
    Adam and RMSprop it is the rule of Malladi et al. 2022 (arXiv 2205.10287), which with k = to / batch also has
    1 - beta times k for both betas, and eps over sqrt(k).
    """
    return _checked("sqrt_scaled", lr, batch=batch, to=to) * math.sqrt(to / batch)


def _checked(name: str, lr: float, *, batch: int, to: int) -> float:
    check_number(lr, f"{name}({lr!r})", least=0, what="a rate of", fix=f"{name}(1e-3, ...)")
    for key, rows in (("batch", batch), ("to", to)):
        fix = f"{name}({lr!r}, batch=64, to=512)"
        check_whole(rows, f"{name}({key}={rows!r})", what="rows of an update", fix=fix)
    return lr
