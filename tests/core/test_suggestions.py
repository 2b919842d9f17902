"""Help with names: a call with a wrong argument says which one was meant, and hides nothing of the function."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, TypeVar

import pytest

import trainwright
from trainwright.core.suggestions import suggests

M = TypeVar("M")


class Box(Generic[M]):
    """Takes arguments like a Trainer does."""

    @suggests
    def __init__(self, model: M, loss: object = None, *, precision: str | None = None) -> None:
        self.model = model

    @suggests
    def fit(self, train: list[int], *, epochs: int | None = None, max_updates: int | None = None) -> int:
        """Train."""
        return len(train) if epochs is None else self._run(epochs=epochs)

    def _run(self, *, epochs: int) -> int:
        return self._run(epoch=epochs)  # type: ignore[call-arg]


def notes_of(call: Any) -> tuple[TypeError, list[str]]:
    with pytest.raises(TypeError) as caught:
        call()
    return caught.value, getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(("wrong", "meant"), [("epoch", "epochs"), ("epohcs", "epochs"), ("max_update", "max_updates")])
def test_a_misspelt_argument_keeps_its_error_and_gains_what_was_meant(wrong, meant):
    line = inspect.currentframe().f_lineno + 1
    error, (note,) = notes_of(lambda: Box(1).fit([1], **{wrong: 3}))
    assert str(error).startswith(f"Box.fit() got an unexpected keyword argument '{wrong}'")
    assert note.splitlines() == [
        f"trainwright: Box.fit takes no '{wrong}'. Did you mean '{meant}'?",
        "  by position  train",
        "  by name      epochs, max_updates",
        f"  where        test_suggestions.py:{line}",
    ]
    assert Box(1).fit([1], max_updates=3) == 1


def test_the_class_itself_is_named_where_it_is_built():
    _, (note,) = notes_of(lambda: Box(1, presicion="bf16"))
    assert note.startswith("trainwright: Box takes no 'presicion'. Did you mean 'precision'?\n")


def test_a_name_that_is_near_to_none_is_not_guessed():
    _, (note,) = notes_of(lambda: Box(1, zzz=1))
    assert note.startswith("trainwright: Box takes no 'zzz'\n")


def test_too_many_by_position_says_what_goes_by_name():
    _, (note,) = notes_of(lambda: Box(1).fit([1], 3))
    assert "other arguments than it takes" in note
    assert "by name      epochs, max_updates" in note


def test_an_error_inside_the_function_passes_untouched():
    error, notes = notes_of(lambda: Box(1).fit([1], epochs=2))
    assert "_run() got an unexpected keyword argument 'epoch'" in str(error)
    assert notes == []
    assert traceback.extract_tb(error.__traceback__)[-1].name == "_run"


def test_a_function_that_takes_any_name_is_left_alone():
    @suggests
    def free(first: int, **rest: int) -> int:
        return first

    assert notes_of(lambda: free(frist=1))[1] == []


def test_signature_name_and_docstring_stay():
    assert list(inspect.signature(Box.fit).parameters) == ["self", "train", "epochs", "max_updates"]
    assert (Box.fit.__name__, Box.fit.__doc__) == ("fit", "Train.")
    assert list(inspect.signature(Box).parameters) == ["model", "loss", "precision"]


def test_a_class_says_so_too_and_stays_the_class_that_it_is():
    @suggests
    @dataclass(frozen=True, slots=True)
    class Setting:
        width: int
        _: KW_ONLY
        depth: int = 1

    assert isinstance(Setting, type) and Setting(2, depth=3) == replace(Setting(2), depth=3)
    error, (note,) = notes_of(lambda: Setting(2, dept=3))
    assert "unexpected keyword argument 'dept'" in str(error)
    assert "takes no 'dept'. Did you mean 'depth'?" in note


@pytest.mark.parametrize(
    "setting", [trainwright.optim.Lars, trainwright.batches, trainwright.EarlyStopping, trainwright.launch]
)
def test_settings_and_functions_that_users_call_say_what_was_meant(setting):
    known = [one for one in inspect.signature(setting).parameters.values() if one.kind is one.KEYWORD_ONLY]
    _, (note,) = notes_of(lambda: setting(None, **{f"{known[0].name}s": 1}))
    assert f"Did you mean '{known[0].name}'?" in note
