"""What the tests of mistakes share: small data and networks, and what a refusal must have in it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import trainwright
from trainwright import Trainer


def pieces(number=4):
    """Batches of 4 rows with 4 features and one of 3 classes."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(number)
    ]


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def make(cls=Trainer, model=None, loss=None, **settings):
    """A quiet trainer with SGD."""
    model = network() if model is None else model
    loss = nn.CrossEntropyLoss() if loss is None else loss
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, console=False, **settings)


def refused(call, error, *, first, want="", trainer=None, where=True):
    """`call` raises exactly `error`: its first line, what it wants, the caller's line, no update; returns the fix."""
    before = [] if trainer is None else [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is error
    assert re.fullmatch(first, text.splitlines()[0]), text
    assert want in entry(text, "want")
    assert not re.search(r"\b[A-Z]{2}\d{3}\b", text)
    if where:
        assert entry(text, "where") == f"{call.__code__.co_filename.rpartition('/')[2]}:{call.__code__.co_firstlineno}"
    if trainer is not None:
        assert_untouched(trainer, before)
    return entry(text, "fix")


def noted(trainer, data, error):
    """`fit` raises `error` with one note of at most 8 lines; no update has run; returns the note."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(error) as caught:
        trainer.fit(data, epochs=1)
    (note,) = caught.value.__notes__
    assert type(caught.value) is error
    assert len(note.splitlines()) <= 8
    assert_untouched(trainer, before)
    return note


def assert_untouched(trainer, before):
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.progress.updates == 0


def entry(text, label):
    """The text of one labeled line, or ""."""
    found = re.search(rf"^  {label} +(.*)$", text, re.M)
    return found[1] if found else ""


def settings(code, **names):
    """`Trainer(..., a=1)`, `fit(..., a=1)` or `a=1` as a dict of its settings: the fix, run as it is written."""
    inside = re.sub(r"^\w+\(\.\.\., (.*)\)$", r"\1", code)
    packages = [trainwright, trainwright.data, trainwright.metrics, trainwright.optim, trainwright.schedules]
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    return eval(f"dict({inside})", public | {"nn": nn, "torch": torch} | names)


def with_method(code):
    """A Trainer with the method that a fix tells to write."""
    namespace = {"Trainer": Trainer}
    exec(f"class Fixed(Trainer):\n    {code}\n", namespace)
    return namespace["Fixed"]
