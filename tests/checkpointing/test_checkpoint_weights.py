"""Saved weights are loaded into a model, or refused without running code of the file."""

from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch
from checkpoints import NAN, Tied, flip, save, tree_of
from torch import nn

from trainwright.checkpointing.format import encode
from trainwright.checkpointing.load import load_weights
from trainwright.checkpointing.weights import save_weights
from trainwright.core.errors import CheckpointError, SettingError


def test_saved_weights_come_back_into_a_model_tied_ones_too(tmp_path):
    one, other = Tied(), Tied()
    save_weights(tmp_path / "deep" / "w.safetensors", one.state_dict())
    weights = load_weights(tmp_path / "deep" / "w.safetensors", other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert other.head.weight is other.embed.weight and weights.keys() == one.state_dict().keys()
    assert safetensors.torch.load_model(Tied(), tmp_path / "deep" / "w.safetensors") == (set(), [])
    assert (tmp_path / "deep" / "w.safetensors").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "deep") == ["w.safetensors"]


def test_files_of_the_safetensors_package_are_loaded_into_tied_models(tmp_path):
    one, other = Tied(), Tied()
    safetensors.torch.save_model(one, str(tmp_path / "w"))
    load_weights(tmp_path / "w", other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    untied = one.state_dict() | {"head.weight": torch.zeros(5, 4)}
    save_weights(tmp_path / "w", untied)
    with pytest.raises(CheckpointError, match=r"tied +embed\.weight and head\.weight"):
        load_weights(tmp_path / "w", other)


def test_overlapping_tensors_and_other_layouts_keep_their_values(tmp_path):
    flat = torch.arange(12.0)
    state = {"flat": flat, "part": flat[:6].view(2, 3), "turned": flat.view(3, 4).t(), "half": flat.to(torch.bfloat16)}
    state |= {"empty": torch.empty(0), "also_empty": torch.empty(0), "none": torch.tensor(3)}
    save_weights(tmp_path / "w", state)
    back = safetensors.torch.load_file(tmp_path / "w")
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    for value in (torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.complex128), torch.empty(1, device="meta")):
        with pytest.raises(CheckpointError, match=r"model\['x'\]"):
            save_weights(tmp_path / "w", {"x": value})


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path):
    state = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    state["2.weight"] = state.pop("1.weight")
    save_weights(tmp_path / "w", state)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 2))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path / "w", model)
    text = str(caught.value)
    assert "missing  1.weight" in text and "not used 2.weight" in text
    assert "0.weight (4, 3), the model's is (5, 3), 0.bias (4,), the model's is (5,)" in text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_best_or_the_last_weights_of_a_run_are_loaded(start, tmp_path):
    manager = start(best="acc", mode="max")
    models = {update: Tied() for update in (1, 2, 3)}
    for update, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
        manager.save(tree_of(models[update]), update=update, epoch=0, metrics={"acc": value})
    manager.completed(wait=True)
    for which, update in (("best", 2), ("last", 3)):
        weights = load_weights(tmp_path / "run", which=which)
        assert torch.equal(weights["embed.weight"], models[update].embed.weight)
    model = Tied()
    load_weights(tmp_path / "run" / "update-0000000001", model)
    assert torch.equal(model.head.weight, models[1].head.weight)
    flip(tmp_path / "run" / "update-0000000002" / "model.safetensors")
    with pytest.warns(UserWarning, match="the next best is taken"):
        weights = load_weights(tmp_path / "run")
    assert torch.equal(weights["embed.weight"], models[3].embed.weight)


def test_without_a_best_the_last_is_taken_and_said(start, tmp_path):
    manager = start()
    save(manager, 1)
    save(manager, 2, loss=NAN)
    with pytest.warns(UserWarning, match="update-0000000002, is taken for the best"):
        load_weights(tmp_path / "run")


def test_other_files_are_refused_and_never_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"w": Payload()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt is no complete safetensors file"):
        load_weights(tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"does not exist\n.*w\.pt"):
        load_weights(tmp_path / "w")
    with pytest.raises(SettingError, match='"best" or "last"'):
        load_weights(tmp_path / "w.pt", which="newest")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_weights(tmp_path / "empty")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("x", r"the model is 'x'\n  want  a torch\.nn\.Module, or none\n  fix   load_weights\(path, model\)"),
        ("last", r"fix   load_weights\(path, which='last'\)"),
        ({"weight": 1}, r"the model is a dict\n  want  a torch\.nn\.Module"),
        (nn.Linear, r"the model is a type\n"),
    ],
)
def test_weights_are_loaded_into_a_module_only(model, said, tmp_path):
    save_weights(tmp_path / "w", nn.Linear(1, 1).state_dict())
    with pytest.raises(TypeError, match=said):
        load_weights(tmp_path / "w", model)


def test_an_expanded_buffer_is_refused_when_it_is_saved_for_it_could_not_be_loaded():
    module = nn.Linear(2, 1)
    module.register_buffer("ones", torch.ones(1).expand(5))
    with pytest.raises(CheckpointError, match=r"model\['ones'\] is expanded"):
        encode({"model": module.state_dict()})
