"""Devices: the cores that a process may use."""

from __future__ import annotations

import os

import pytest

from trainwright.core import device


def test_the_limit_of_the_control_group_bounds_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(device, "_quota", lambda: 2.5)
    assert device.usable_cores() == 2
    monkeypatch.setattr(device, "_quota", lambda: None)
    assert device.usable_cores() == 8
