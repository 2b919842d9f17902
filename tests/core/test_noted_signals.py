"""Signals are noted when they come and raised where nothing is half-changed; what was there before comes back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from trainwright.core.signals import Interrupted, Signals

GRACE = 0.15


def made(grace=5.0):
    signals, woken = Signals(grace=grace), []
    signals.wake = lambda: woken.append(True)
    return signals, woken


def send(number):
    os.kill(os.getpid(), number)


def raised(block, kind=Interrupted):
    with pytest.raises(kind) as caught:
        block()
    return caught.value


def test_an_error_is_not_replaced_by_a_signal_that_came_before_it():
    signals, _ = made()

    def block():
        with signals.installed():
            send(signal.SIGTERM)
            raise ZeroDivisionError

    raised(block, ZeroDivisionError)


def test_after_the_last_item_a_signal_is_noted_again():
    signals, _ = made()

    def block():
        with signals.installed():
            assert list(signals.batches(iter(range(3)))) == [0, 1, 2]
            send(signal.SIGTERM)
            assert signals.received

    raised(block)


def test_a_boundary_right_after_what_was_held_is_in_time():
    signals, _ = made(GRACE)

    def block():
        with signals.installed():
            with signals.held():
                send(signal.SIGTERM)
                time.sleep(2 * GRACE)
            signals.check()

    assert not raised(block).late


def test_a_handler_that_was_set_inside_stays_afterwards():
    def mine(*_):
        pass

    before = signal.getsignal(signal.SIGUSR1)
    try:
        signals, _ = made()
        with signals.installed():
            signal.signal(signal.SIGUSR1, mine)
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_death_of_a_worker_is_reported_only_where_data_is_waited_for():
    received = []

    def torchs(*_):
        received.append(True)

    torchs.__module__ = "torch.utils.data._utils.signal_handling"
    before = signal.signal(signal.SIGCHLD, torchs)
    try:
        signals, _ = made()
        with signals.installed():
            signals.watch_children()
            send(signal.SIGCHLD)
            assert not received  # in the midst of an update

            def waits():
                yield 1
                time.sleep(0.3)
                yield 2

            batches = signals.batches(waits())
            assert next(batches) == 1
            assert next(batches) == 2
            assert received
        assert signal.getsignal(signal.SIGCHLD) is torchs
    finally:
        signal.signal(signal.SIGCHLD, before)
