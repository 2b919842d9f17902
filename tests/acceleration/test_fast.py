"""`Fast(...)` is checked when it is given, and says what it would compile with what."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from torch import nn

from trainwright import Fast, SettingError
from trainwright.acceleration.fast import as_fast


class Block(nn.Module):
    pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compile": "ful"}, 'fix   Fast(compile="regional")'),
        ({"compile": True}, 'fix   Fast(compile="regional")'),
        ({"compile": False}, "fix   leave compile out"),
        ({"compile": {"bakend": "inductor"}}, "Did you mean 'backend'?"),
        ({"compile": {"backend": "inducter"}}, "Did you mean 'inductor'?"),
        ({"compile": {"backend": 3}}, "want  a name, or a function"),
        ({"compile": {"backend": Block}}, "want  a name, or a function"),
        ({"compile": {"backend": "cudagraphs"}}, "replays CUDA graphs"),
        ({"compile": {"mode": "reduce-overhead"}}, "max-autotune-no-cudagraphs"),
        ({"compile": {"mode": "default", "options": {}}}, "torch takes one of them"),
        ({"compile": {"regions": "blocks"}}, "fix   Fast(compile={'regions': {Block}})"),
        ({"compile": {"regions": []}}, "fix   Fast(compile={'regions': {Block}})"),
        ({"compile": {"regions": {3}}}, 'want  "regional", "full", or classes'),
        ({"channels_last": 1}, 'want  True, False or "auto"'),
        ({"channels_last": None}, 'want  True, False or "auto"'),
        ({"device_data": "yes"}, 'want  True, False or "auto"'),
        ({"defaults": "auto"}, "want  True or False"),
    ],
)
def test_what_a_setting_cannot_be_is_refused_when_it_is_given(given, said):
    with pytest.raises(SettingError) as caught:
        Fast(**given)
    name = next(iter(given))
    assert said in str(caught.value) and name in str(caught.value)


def test_a_misspelt_setting_is_reported():
    with pytest.raises(TypeError) as caught:
        Fast(chanels_last=True)
    assert "Did you mean 'channels_last'?" in caught.value.__notes__[0]
    with pytest.raises(TypeError):
        Fast("regional")


def test_it_is_a_plain_record():
    fast = Fast(compile="full", channels_last=False)
    assert fast == pickle.loads(pickle.dumps(fast)) == replace(fast) != Fast()
    assert hash(fast) == hash(replace(fast)) and eval(repr(fast)) == fast
    assert list(inspect.signature(Fast).parameters) == [one.name for one in fields(fast)]
    with pytest.raises(FrozenInstanceError):
        fast.compile = None
    with pytest.raises(SettingError):
        replace(fast, compile="half")


def test_a_dict_goes_to_torch_but_for_the_keys_that_are_ours():
    fast = Fast(compile={"backend": "aot_eager", "fullgraph": True, "regions": Block})
    assert fast.options == {"backend": "aot_eager", "fullgraph": True} and fast.regions == (Block,)
    assert Fast(compile={}).regions == "regional" and Fast(compile="full").regions == "full"
    assert Fast(compile="full").options == {}


def test_a_dict_that_is_changed_later_changes_nothing():
    given = {"backend": "aot_eager"}
    fast = Fast(compile=given)
    given["backend"] = "eager"
    assert fast.options == {"backend": "aot_eager"}


def test_none_is_the_defaults_and_anything_else_is_refused():
    assert as_fast(None) == Fast()
    with pytest.raises(TypeError, match=r"fix   fast=Fast\(compile='full'\)"):
        as_fast("full")
    with pytest.raises(TypeError, match="fast=True"):
        as_fast(True)
