"""An import of a name that is elsewhere, or that other libraries have, says what to write."""

from __future__ import annotations

import pytest
from refusals import entry

import trainwright
import trainwright.observers
from trainwright.core.suggestions import FOREIGN_NAMES


def refused(line):
    with pytest.raises(ImportError) as caught:
        exec(compile(line, "script.py", "exec"), {})
    text = str(caught.value)
    assert entry(text, "where") == "script.py:1"
    return text.splitlines()[0], entry(text, "fix")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("from trainwright import WandbLogger", "from trainwright.observers import WandbLogger"),
        ("from trainwright import Trainer, Lars", "from trainwright.optim import Lars"),
        ("from trainwright import OneCycel", "from trainwright import OneCycle"),
        ("from trainwright.observers import Checkpoint", "from trainwright import Checkpoint"),
    ],
)
def test_a_name_that_is_elsewhere_is_refused_with_the_import_to_write(line, fix):
    first, said = refused(line)
    assert first.startswith("cannot import name") and said == fix
    exec(said, {})


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_name_of_another_library_is_refused_with_what_to_write(name):
    first, fix = refused(f"from trainwright import {name}")
    assert first == f"cannot import name {name!r} from 'trainwright'"
    assert fix == FOREIGN_NAMES[name]
    if fix.startswith("from "):
        exec(fix, {})
    assert not hasattr(trainwright, name) and name not in dir(trainwright)


def test_a_name_that_is_near_to_none_is_not_guessed():
    with pytest.raises(ImportError, match=r"^cannot import name 'zzz' from 'trainwright'$"):
        exec("from trainwright import zzz", {})
    with pytest.raises(AttributeError, match=r"^module 'trainwright.observers' has no attribute 'zzz'$"):
        _ = trainwright.observers.zzz
