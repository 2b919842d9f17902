"""Signals are noted when they come and raised where nothing is half-changed; what was there before comes back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from trainwright.core.signals import ENDING, Interrupted, Signals

GRACE = 0.15


def made(grace=5.0):
    woken = []
    return Signals(grace=grace, wake=lambda: woken.append(True)), woken


def send(number):
    os.kill(os.getpid(), number)


def raised(block, kind=Interrupted):
    with pytest.raises(kind) as caught:
        block()
    return caught.value


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (2, "Ctrl-C")])
def test_a_signal_is_noted_wakes_the_loop_and_is_raised_at_the_boundary(number, name):
    signals, woken = made()
    with pytest.raises(Interrupted) as caught, signals.installed():
        signals.check()
        send(number)
        assert signals.received == number and woken == [True]
        signals.check()
    assert (caught.value.name, caught.value.number, caught.value.late) == (name, number, False)
    assert not any(isinstance(one, threading.Timer) and not one.finished.is_set() for one in threading.enumerate())


def test_a_signal_that_no_boundary_has_followed_is_raised_at_the_end():
    signals, _ = made()
    before = signal.getsignal(signal.SIGTERM)

    def block():
        with signals.installed():
            send(signal.SIGTERM)

    assert raised(block).number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_is_not_replaced_by_a_signal_that_came_before_it():
    signals, _ = made()

    def block():
        with signals.installed():
            send(signal.SIGTERM)
            raise ZeroDivisionError

    raised(block, ZeroDivisionError)


def test_a_wait_for_data_is_ended_at_once_and_a_batch_in_hand_is_not():
    signals, _ = made()
    asked = []

    def data():
        for n in range(3):
            asked.append(n)
            if n == 1:
                send(signal.SIGTERM)
                raise AssertionError("the wait went on")
            yield n

    def block():
        with signals.installed():
            for _ in signals.batches(data()):
                assert asked == [0]

    assert not raised(block).late
    assert asked == [0, 1]


def test_what_came_while_a_batch_was_in_hand_ends_the_run_before_the_next_is_asked_for():
    signals, _ = made()
    asked, used = [], []

    def block():
        with signals.installed():
            for item in signals.batches(asked.append(n) or n for n in range(3)):
                send(signal.SIGTERM)
                used.append(item)

    raised(block)
    assert asked == used == [0]


def test_an_iterator_that_ends_or_raises_does_so():
    signals, _ = made()

    def bad():
        yield 1
        raise ZeroDivisionError

    with signals.installed():
        assert list(signals.batches(iter(range(3)))) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            list(signals.batches(bad()))
        assert not signals.received


def test_after_the_last_item_a_signal_is_noted_again():
    signals, _ = made()

    def block():
        with signals.installed():
            assert list(signals.batches(iter(range(3)))) == [0, 1, 2]
            send(signal.SIGTERM)
            assert signals.received

    raised(block)


def test_after_its_grace_a_signal_cuts_off_what_is_under_way():
    signals, _ = made(GRACE)

    def block():
        with signals.installed():
            send(signal.SIGTERM)
            time.sleep(60)

    began = time.monotonic()
    assert raised(block).late
    assert GRACE <= time.monotonic() - began < 40


def test_what_is_held_is_not_cut_off_and_the_grace_begins_anew_after_it():
    signals, _ = made(GRACE)
    held = []

    def block():
        with signals.installed():
            send(signal.SIGTERM)
            with signals.held(), signals.held():
                time.sleep(3 * GRACE)
                held.append(time.monotonic())
            time.sleep(60)

    assert raised(block).late
    assert GRACE <= time.monotonic() - held[0] < 40


def test_a_boundary_right_after_what_was_held_is_in_time():
    signals, _ = made(GRACE)

    def block():
        with signals.installed():
            with signals.held():
                send(signal.SIGTERM)
                time.sleep(2 * GRACE)
            signals.check()

    assert not raised(block).late


@pytest.mark.parametrize("held", [False, True])
def test_a_second_ctrl_c_is_raised_anywhere_and_two_at_once_are_one(held):
    signals, _ = made()

    def block():
        with signals.installed():
            send(signal.SIGINT)
            send(signal.SIGINT)  # a terminal and a launcher
            time.sleep(0.12)
            if held:
                with signals.held():
                    send(signal.SIGINT)
            send(signal.SIGINT)
            raise AssertionError("it went on")

    raised(block, KeyboardInterrupt)


def test_a_second_sigterm_changes_nothing_and_a_ctrl_c_after_it_is_a_second_one():
    signals, _ = made()

    def block():
        with signals.installed():
            send(signal.SIGTERM)
            time.sleep(0.12)
            send(signal.SIGTERM)
            send(signal.SIGUSR1)
            assert signals.received == signal.SIGTERM
            send(signal.SIGINT)

    raised(block, KeyboardInterrupt)


def test_handlers_of_others_stay():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGUSR1, mine), signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signals, _ = made()
        with signals.installed():
            assert signal.getsignal(signal.SIGUSR1) is mine
            send(signal.SIGTERM)
            assert not signals.received
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGTERM, before[1])


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


def test_another_thread_installs_nothing():
    before, found = [signal.getsignal(number) for number in ENDING], []

    def inside():
        with made()[0].installed():
            found.extend(signal.getsignal(number) for number in ENDING)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == before


def test_a_forked_child_does_as_if_nothing_had_been_installed():
    signals, _ = made()
    with signals.installed():
        child = os.fork()
        if not child:
            send(signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not signals.received


def test_the_death_of_a_worker_is_heard_only_where_data_is_waited_for():
    heard = []

    def torchs(*_):
        heard.append(True)

    torchs.__module__ = "torch.utils.data._utils.signal_handling"
    before = signal.signal(signal.SIGCHLD, torchs)
    try:
        signals, _ = made()
        with signals.installed():
            signals.watch_children()
            send(signal.SIGCHLD)
            assert not heard  # in the midst of an update

            def waits():
                yield 1
                time.sleep(0.3)
                yield 2

            batches = signals.batches(waits())
            assert next(batches) == 1
            assert next(batches) == 2
            assert heard
        assert signal.getsignal(signal.SIGCHLD) is torchs
    finally:
        signal.signal(signal.SIGCHLD, before)
