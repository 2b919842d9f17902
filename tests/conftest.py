"""Two tiers: `pytest` runs the quick one, `pytest --full` everything. One thread for every test.

`tiers.py` says which test is in which tier. A complete tier runs on two workers where pytest-xdist is installed;
files and tests that are named on the command line run in this process, slow or not. Tests marked `gpu` are deselected
by default (pyproject.toml); asked for by `-m gpu`, they are skipped without a device.
"""

import gc
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import tiers

WORKERS = 2
"""Workers of a complete tier: the tests are written for two cores."""
DESELECTED = Counter()
torch.set_num_threads(1)  # two are slower on small machines, and sums stay in one order
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the default of a process that a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    """Add `--full`."""
    parser.addoption("--full", action="store_true", help="run both tiers: the quick tests and the slow ones")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Choose the tier and the number of workers before pytest-xdist reads its options."""
    option = config.option
    if hasattr(config, "workerinput"):
        return
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    option.full = option.full or named or option.markexpr == "gpu"
    whole_tier = not (named or option.keyword or option.collectonly or option.usepdb or option.markexpr == "gpu")
    if whole_tier and config.pluginmanager.has_plugin("xdist") and option.numprocesses is None:
        option.numprocesses, option.dist = WORKERS, "worksteal"


def pytest_ignore_collect(collection_path, config):
    """Leave the folders of the full tier out of the quick one, without importing their files."""
    return True if not config.option.full and tiers.is_full_folder(collection_path) else None


@pytest.hookimpl(trylast=True)  # after `-m` has deselected
def pytest_collection_modifyitems(config, items):
    """Deselect the full tier unless it is asked for; skip tests that need a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.option.full:
        slow = tiers.slow(items)
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=list(slow))


def pytest_deselected(items):
    """Count the deselected tests: pytest-xdist does not."""
    DESELECTED.update("gpu" if item.get_closest_marker("gpu") else "slow" for item in items)


def pytest_sessionfinish(session):
    """Hand the counts of a worker to the process that reports; all workers collect the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(DESELECTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the counts of a worker."""
    DESELECTED.update(getattr(node, "workeroutput", {}).get("deselected", {}) if not DESELECTED else {})


def pytest_terminal_summary(terminalreporter, config):
    """Say how many tests did not run, and by what command they do."""
    if DESELECTED["gpu"]:
        terminalreporter.write_line(f"{DESELECTED['gpu']} tests that need a GPU were deselected: pytest -m gpu")
    if not config.option.full:
        folders = ", ".join(sorted(tiers.FULL_FOLDERS))
        slow = f"{DESELECTED['slow']} slow tests and the folders {folders} were left out: pytest --full"
        terminalreporter.write_line(slow)


@pytest.fixture
def directory():
    """A directory in memory, where there is one: for runs of which nothing depends on a drive."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        yield Path(made)


@pytest.fixture
def no_garbage():
    """For a test that counts Python calls: what earlier tests have left is not collected, and called, inside it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
