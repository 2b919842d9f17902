"""One thread for every test: two are slower on small machines, and sums stay in one order. Ctrl-C is heard."""

import gc
import signal

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as where a shell has started this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def no_garbage():
    """For a test that counts Python calls: what earlier tests have left is not collected, and called, inside it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
