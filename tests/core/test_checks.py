"""Checks of single settings: what is refused, and that True is no number, nor 1 a flag."""

from __future__ import annotations

import math

import pytest

from trainwright.core.checks import check_choice, check_flag, check_number, check_whole
from trainwright.core.errors import SettingError


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_what_is_no_whole_number_or_below_the_least_is_refused(value):
    with pytest.raises(SettingError, match=r"f\(n\)\n  want  a whole number, at least 1\n  fix   n=2"):
        check_whole(value, "f(n)", fix="n=2")


def test_a_whole_number_without_a_least_may_be_any():
    check_whole(-3, "f(n)", least=None)
    with pytest.raises(SettingError, match="want  a whole number\n"):
        check_whole(True, "f(n)", least=None)


@pytest.mark.parametrize("value", [0, 1, 2, -0.5, math.nan, math.inf, False, "0.5", None])
def test_what_is_no_finite_number_between_the_bounds_is_refused(value):
    with pytest.raises(SettingError, match="want  a share above 0 and below 1"):
        check_number(value, "f(x)", above=0, below=1, what="a share")


def test_a_number_without_end_is_marked():
    with pytest.raises(SettingError, match="want  seconds above 0 and finite"):
        check_number(math.inf, "f(x)", above=0, what="seconds")
    with pytest.raises(SettingError, match=r"want  seconds above 0(\n|$)"):
        check_number(-1, "f(x)", above=0, what="seconds")


def test_bounds_that_are_reached_are_within():
    check_number(0, "f(x)", least=0, most=1)
    check_number(1.0, "f(x)", least=0, most=1)


@pytest.mark.parametrize("value", [0, 1, None, "True"])
def test_a_flag_is_true_or_false_and_a_choice_is_one_of_its_kind(value):
    with pytest.raises(SettingError, match="want  True or False"):
        check_flag(value, "f(on)")
    with pytest.raises(SettingError, match=r'f\(on=.*\)\n  want  True, False or "auto"'):
        check_choice(value, "f", "on", choices=(True, False, "auto"))
