"""What the tests of the checkpoint slot start: managers, and file systems that are slow or refuse."""

from __future__ import annotations

import os
import threading

import pytest

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing.checkpoint import Checkpoint


@pytest.fixture
def start(tmp_path):
    """A function that makes a prepared manager; all are released at the end."""
    managers = []

    def make(name="run", run_id="one", *, resuming=False, **settings):
        manager = Checkpoint(tmp_path / name, **settings).bind(run_id)
        managers.append(manager)
        manager.prepare(resuming=resuming)
        return manager

    yield make
    for manager in managers:
        manager.release()


class Slow:
    """A file system whose commits wait until they are let through."""

    def __init__(self, monkeypatch):
        self.begun, self.through, self.threads = threading.Event(), threading.Event(), []
        self._commit = commits.commit
        monkeypatch.setattr(commits, "commit", self)

    def __call__(self, *args, **fields):
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.through.wait(20)
        return self._commit(*args, **fields)


@pytest.fixture
def slow(monkeypatch):
    made = Slow(monkeypatch)
    yield made
    made.through.set()


@pytest.fixture
def refuses(monkeypatch):
    """A function after which the system refuses to write, with an error number; 0 ends that."""
    write = commits.write_file

    def refuse(number):
        def refused(*args, **fields):
            raise OSError(number, os.strerror(number), "there")

        monkeypatch.setattr(commits, "write_file", refused if number else write)

    return refuse
