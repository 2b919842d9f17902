"""The pools of processes, one for the session: `ranks2.run(function, *args)` runs a function on both ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.pool import Pool, pool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Pool]:
    """Two processes with a gloo group."""
    yield pool(2)
    pool(2).close()


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Pool]:
    """Three processes with a gloo group."""
    yield pool(3)
    pool(3).close()
