"""The example of a test file."""

from __future__ import annotations

import pytest
from loading import load


@pytest.fixture(scope="module")
def example(request):
    """The example that the test file is named after."""
    return load(request.path.stem.removeprefix("test_"))
