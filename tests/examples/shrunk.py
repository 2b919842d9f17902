"""Runs an example cut short from outside, so that its code has no switch for tests.

    python tests/examples/shrunk.py EXAMPLE [ARGUMENT ...]

Every `fit` ends after two epochs or twenty updates, a search after three trials, `advise` after two seconds. Compilers
are not found. An example that starts itself starts the complete one.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import trainwright
from trainwright.tools import advising

EPOCHS, UPDATES, TRIALS, SECONDS = 2, 20, 3, 2.0


def shrink(owner: Any, name: str, limits: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace a function by one whose keyword arguments are changed by `limits`."""
    original = getattr(owner, name)

    @wraps(original)
    def shorter(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, **limits(kwargs)})

    setattr(owner, name, shorter)


def fit_limits(given: dict[str, Any]) -> dict[str, Any]:
    limits = {"max_updates": min(given.get("max_updates") or UPDATES, UPDATES)}
    if given.get("epochs") is not None:
        limits["epochs"] = min(given["epochs"], EPOCHS)
    return limits


def main() -> None:
    shrink(trainwright.Trainer, "fit", fit_limits)
    shrink(advising, "advise", lambda given: {"seconds": SECONDS})
    trainwright.advise = advising.advise
    try:
        import optuna
    except ImportError:
        pass
    else:
        shrink(optuna.Study, "optimize", lambda given: {"n_trials": min(given.get("n_trials") or TRIALS, TRIALS)})
    os.environ["CXX"] = "no-compiler"
    _, path, *sys.argv[1:] = sys.argv
    sys.argv[0] = path
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
