"""What is written for `fast` where something else was meant: refused when it is given, with what to write."""

from __future__ import annotations

import pytest
import torch
from refusals import entry, make, network, pieces
from torch import nn

from trainwright import Fast, SettingError, Trainer


@pytest.mark.parametrize(
    ("given", "error", "fix"),
    [
        (lambda: make(fast="regional"), TypeError, "fast=Fast(compile='regional')"),
        (lambda: make(fast=True), TypeError, 'fast=Fast(compile="regional")'),
        (lambda: make(fast={"compile": "full"}), TypeError, 'fast=Fast(compile="regional")'),
        (lambda: make(fast=Fast), TypeError, 'fast=Fast(compile="regional")'),
        (lambda: Fast(compile="default"), SettingError, 'Fast(compile="regional")'),
        (lambda: Fast(compile="reduce-overhead"), SettingError, 'Fast(compile="regional")'),
        (lambda: Fast(compile={"regions": "Block"}), SettingError, "Fast(compile={'regions': {Block}})"),
        (lambda: Fast(channels_last="yes"), SettingError, 'Fast(channels_last="auto")'),
    ],
)
def test_a_setting_of_another_kind(given, error, fix):
    with pytest.raises(error) as caught:
        given()
    assert entry(str(caught.value), "fix") == fix


def test_fast_and_compile_as_arguments_of_the_trainer():
    with pytest.raises(TypeError) as caught:
        Trainer(network(), fst=Fast())
    assert "Did you mean 'fast'?" in caught.value.__notes__[0]


def test_a_model_that_is_wrapped_by_torch_compile_beside_compile():
    model = torch.compile(network(), backend="eager")
    trainer = Trainer(model, torch.optim.SGD, nn.CrossEntropyLoss(), fast=Fast(compile="full"), console=False)
    with pytest.raises(SettingError, match="compiled already") as caught:
        trainer.fit(pieces(), epochs=1)
    assert entry(str(caught.value), "have") == "torch.compile(model)" and trainer.progress.updates == 0


def test_classes_that_the_model_does_not_hold():
    trainer = make(fast=Fast(compile={"regions": {nn.Conv2d}}))
    with pytest.raises(SettingError, match="holds no Conv2d") as caught:
        trainer.fit(pieces(), epochs=1)
    assert entry(str(caught.value), "fix") == 'Fast(compile="full")' and trainer.progress.updates == 0
