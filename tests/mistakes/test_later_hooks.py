"""A hook that is not built yet is refused when the class is defined: it would never be called."""

from __future__ import annotations

import pytest

from trainwright import SettingError, Trainer


@pytest.mark.parametrize("name", ["begin_epoch", "end_epoch", "after_update"])
def test_a_hook_that_is_not_built_yet_is_refused_by_name(name):
    with pytest.raises(SettingError, match=rf"the hook Mine\.{name} is not built yet"):
        type("Mine", (Trainer,), {name: lambda self, *arguments: None})
