"""An error of the library lays out what was given, what was expected and what to write instead."""

from __future__ import annotations

import copy
import pickle

import pytest

from trainwright import DataError, SettingError
from trainwright.core.errors import TrainwrightError


def test_each_keyword_adds_a_line_and_so_does_the_line_of_the_user():
    lines = str(SettingError("clip=-1", have="-1", want="a number above 0", fix="clip=1.0")).splitlines()
    assert lines[:4] == ["clip=-1", "  have  -1", "  want  a number above 0", "  fix   clip=1.0"]
    assert lines[4].startswith("  where test_errors.py:")


def test_an_empty_text_adds_no_line_of_its_own():
    first, where = str(DataError("no rows", fix="")).splitlines()
    assert (first, where[:8]) == ("no rows", "  where ")
    assert str(DataError("no rows", fix="shuffle=True", where=False)).splitlines()[1:] == ["  fix   shuffle=True"]
    assert str(DataError("no rows", where=True)).splitlines()[1].startswith("  where ")


def test_a_text_alone_stays_as_it_is():
    assert str(SettingError("planted\x1b")) == "planted\x1b"
    assert str(SettingError("planted\x1b", where=False)) == "planted\\x1b"


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_that_was_pickled_has_the_same_text(again):
    error = SettingError("clip=-1", want="a number above 0")
    error.add_note("mine")
    made = again(error)
    assert (type(made), str(made), made.__notes__) == (SettingError, str(error), ["mine"])
    assert isinstance(made, TrainwrightError)
