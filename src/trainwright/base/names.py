"""Help with names: did you mean, and refusing methods that nearly match a hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from trainwright.base.errors import NOTE, SettingError, message, user_line

C = TypeVar("C", bound=Callable[..., Any])

RESERVED = frozenset({"epoch", "grad_norm", "loss", "lr", "rows", "skipped", "update"})
"""Numbers that the run itself reports; no metric, logged number or named loss may have such a name."""

_BEGIN, _END, _AFTER = "def begin_epoch(self, epoch):", "def end_epoch(self, metrics):", "def after_update(self):"
_VALIDATE = 'def validation_step(self, batch):   # evaluate(data, name="test") calls it too'
FOREIGN_METHODS = {
    "configure_optimizers": "Trainer(model, torch.optim.AdamW(model.parameters()), loss)   # given, not returned",
    "forward": "def predict_step(self, batch):   # forward is the model's own",
    "train_epoch": "def update(self, window):   # fit makes the epochs; begin_epoch and end_epoch are around each",
    "before_update": "def update(self, window):   # first what is yours, then return super().update(window)",
    "epoch_start": _BEGIN,
    **dict.fromkeys(("epoch_end", "training_epoch_end", "validation_epoch_end", "test_epoch_end"), _END),
    **dict.fromkeys(("val_step", "valid_step", "eval_step", "test_step"), _VALIDATE),
}
"""Methods that other libraries call, and what to write here instead."""

_VAL = "fit(train, val, ...)"
_BEST, _RESTORED = 'Checkpoint(..., best="val_loss")', 'Checkpoint(..., best="val_loss", restore_best=True)'
FOREIGN_ARGUMENTS = {
    "callbacks": "observers=[...], early_stopping=EarlyStopping(...), checkpoint=Checkpoint(...)",
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "nb_epoch"), "fit(..., epochs=10)"),
    **dict.fromkeys(("max_steps", "num_steps"), "fit(..., max_updates=1000)"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "grad_clip", "clip_grad_norm"), "Trainer(..., clip=1.0)"),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum_steps"), "Trainer(..., accumulate=4)"
    ),
    "shuffle": "fit(batches(data, 64, shuffle=True), ...)",
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), "Trainer(model, torch.optim.AdamW(parameters, lr=1e-3))"),
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "train_dataset"), "fit(train, ...)"),
    **dict.fromkeys(("val_dataloader", "val_dataloaders", "validation_data", "valid_data", "eval_dataset"), _VAL),
    **dict.fromkeys(("verbose", "enable_progress_bar", "progress_bar"), "Trainer(..., console=False)"),
    "logger": "Trainer(..., observers=[Journal(...)])",
    "scheduler": "Trainer(..., schedule=Cosine())",
    **dict.fromkeys(("amp", "fp16", "bf16", "mixed_precision"), 'Trainer(..., precision="auto")'),
    **dict.fromkeys(("accelerator", "gpus"), "Trainer(..., device=...)"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), 'fit(..., resume="auto")'),
    **dict.fromkeys(("dirpath", "output_dir", "save_dir", "default_root_dir"), 'Checkpoint("runs/1", ...)'),
    **dict.fromkeys(("monitor", "metric_for_best_model", "save_best_only"), _BEST),
    **dict.fromkeys(("load_best_model_at_end", "restore_best_weights"), _RESTORED),
    "save_top_k": 'Checkpoint(..., best="val_loss", top=3)',
    **dict.fromkeys(("save_last", "save_total_limit", "max_to_keep"), "Checkpoint(..., keep=3)"),
    **dict.fromkeys(("every_n_train_steps", "save_steps"), "Checkpoint(..., every=Updates(500))"),
    "every_n_epochs": "Checkpoint(..., every=Epochs(1))",
}
"""Arguments of other libraries, and what to write here instead."""


def check_name(name: str, what: str = "metric") -> None:
    """Refuse a name that the run itself reports under, or that starts with `val_`."""
    if not isinstance(name, str) or not name:
        raise SettingError(message(f"{what} name {name!r}", want="a string that is not empty"))
    if name in RESERVED:
        raise SettingError(
            message(
                f"{what} name {name!r} is reserved",
                want=f"another name than {', '.join(sorted(RESERVED))}",
                fix=f'"my_{name}"',
            )
        )
    if name.startswith("val_"):
        raise SettingError(
            message(
                f"{what} name {name!r} starts with val_, which validation puts there itself",
                fix=f'"{name.removeprefix("val_")}"',
            )
        )


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest known name, or an empty string where none is near."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The nearest known name, or None where none is near."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def suggests(given: C) -> C:
    """Let a call with an argument that a function, or a class, does not take say which one was meant.

    The TypeError of the call itself gains a note; one that is raised inside the function passes untouched. A method
    of an object whose class forgot `super().__init__(...)` says so.
    """
    if isinstance(given, type):
        cls: Any = given
        cls.__init__ = suggests(cls.__init__)
        return cast(C, cls)

    @functools.wraps(given)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return given(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # no frame of the function
                _suggest(error, given, kwargs)
            raise
        except AttributeError as error:
            if args and error.obj is args[0] and _is_unmade(error.obj, error.name):
                raise _unmade(type(error.obj)) from error
            raise

    return cast(C, called)


KEPT = frozenset({"between", "counters", "fast_path", "history", "hold", "hooks", "ledger", "result", "world"})
"""What a Trainer keeps for its run: no method of a subclass may hide it."""


def refuse_near_names(
    cls: type, known: Collection[str], *, base: type | None = None, cutoff: float = 0.85, prefix: str = ""
) -> None:
    """Raise TypeError where a method defined in `cls`, or in a mixin beside `base`, nearly has a `known` name.

    So it is for one that `base` takes as an argument of this name, which would hide it. With a `prefix` every method
    that starts with it must be known.
    """
    arguments = set() if base is None else set(inspect.signature(base).parameters)
    inherited = set() if base is None else set(base.__mro__)
    own = [cls] if base is None else [one for one in cls.__mro__ if one not in inherited]
    for name, value in [item for one in own for item in vars(one).items()]:
        if name in known or name.startswith("_") or not callable(value):
            continue
        if not prefix and (instead := _instead_of(name)):
            raise TypeError(
                f"{cls.__name__}.{name} is a method of other libraries, and is never called here\n"
                f"  want  one of {', '.join(sorted(known))}\n"
                f"  fix   {instead}"
            )
        if not prefix:
            _refuse_kept(cls, name)
        if base is not None and name in arguments:
            raise TypeError(
                f"{cls.__name__}.{name} is never called: the argument {name}= of {base.__name__} has its name\n"
                f"  want  {base.__name__}(..., {name}=...)\n"
                f"  fix   rename it, and give it as {name}="
            )
        near = get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
        if near or (prefix and name.startswith(prefix)):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{cls.__name__}.{name} is not a method that is ever called.{hint}\n"
                f"  want  one of {', '.join(sorted(known))}\n"
                f"  fix   rename it; a helper of your own may start with an underscore"
            )


def _refuse_kept(cls: type, name: str) -> None:
    """Raise TypeError for a method that would hide what a Trainer keeps."""
    if name in KEPT:
        raise TypeError(
            f"{cls.__name__}.{name}: the Trainer keeps something of its own under this name\n"
            f"  fix   rename it; what belongs in a checkpoint goes into self.state"
        )


def _suggest(error: TypeError, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    parameters = [one for name, one in inspect.signature(function).parameters.items() if name != "self"]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    name = function.__qualname__.removesuffix(".__init__")
    known = {one.name for one in parameters}
    unknown = [f"{name} takes no {wrong!r}.{_meant(wrong, known)}" for wrong in given if wrong not in known]
    by_name = ", ".join(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
    by_position = ", ".join(one.name for one in parameters if one.kind is not one.KEYWORD_ONLY)
    lines = [f"{NOTE}{'; '.join(unknown) or f'{name} was called with other arguments than it takes.'}"]
    entries = {"by position": by_position, "by name": by_name, "where": user_line()}
    error.add_note("\n".join([*lines, *(f"  {label:<13}{text}" for label, text in entries.items() if text)]))


def _meant(wrong: str, known: Collection[str]) -> str:
    instead = FOREIGN_ARGUMENTS.get(wrong)
    return did_you_mean(wrong, known) if instead is None else f" Write {instead}"


def _instead_of(name: str) -> str:
    """What to write instead of a method that another library calls, or ""."""
    if name in FOREIGN_METHODS or not name.startswith("on_"):
        return FOREIGN_METHODS.get(name, "")
    if "epoch" in name:
        return _BEGIN if name.endswith(("start", "begin")) else _END
    if name.endswith("end") and ("batch" in name or "step" in name):
        return _AFTER
    return f"{_BEGIN} or end_epoch(self, metrics), after_update(self); on_... are methods of an Observer"


def _is_unmade(made: Any, name: str | None) -> bool:
    """Whether an object lacks what its base's `__init__` sets."""
    for cls in type(made).__mro__[1:]:
        base = getattr(vars(cls).get("__init__"), "__wrapped__", None)
        if base is not None:
            return name in base.__code__.co_names and type(made) is not cls
    return False


def _unmade(cls: type) -> TypeError:
    fix = "super().__init__(model, optimizer, ...) in it"
    return TypeError(message(f"{cls.__name__}.__init__ does not call the one of its base", fix=fix))
