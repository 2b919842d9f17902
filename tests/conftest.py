"""One thread for every test: two are slower on small machines, and sums stay in one order. Ctrl-C is heard.

Tests marked `gpu` are left out by default (pyproject.toml); asked for by `-m gpu`, they are skipped without a device.
"""

import gc
import signal

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as where a shell has started this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def no_garbage():
    """For a test that counts Python calls: what earlier tests have left is not collected, and called, inside it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
