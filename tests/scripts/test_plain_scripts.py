"""The counting of lines that compares scripts with their plain loops."""

from __future__ import annotations

import pytest
from plain_scripts import assert_no_longer, code_lines


def short():
    """A docstring is no code.

    However long.
    """
    # Nor is a comment.

    return [
        1,  # every line of a statement is
    ]


def longer():
    class Inner:
        """Not this."""

        text = """but
        this"""

    return Inner


def test_lines_with_code_are_counted_and_no_others():
    assert (code_lines(short), code_lines(longer)) == (4, 5)


def test_a_script_that_is_longer_than_its_plain_loop_is_refused():
    assert_no_longer([short], [longer])
    with pytest.raises(AssertionError, match="5 lines by the Trainer, 4 by hand"):
        assert_no_longer([longer], [short])
