"""A device that cannot be used, and a model without data, are refused when the Trainer is made."""

from __future__ import annotations

import pytest
import torch
from refusals import entry, make, network, pieces
from torch import nn

from trainwright import SettingError, Trainer, load_weights, save_weights


def refusal(**settings):
    with pytest.raises(SettingError) as caught:
        make(**settings)
    return str(caught.value)


@pytest.mark.skipif(torch.xpu.is_available(), reason="a device of Intel's is there")
def test_a_backend_that_this_torch_lacks_is_refused_by_name():
    text = refusal(device="xpu")
    assert text.startswith("device='xpu', and this torch cannot use it\n") and entry(text, "fix") == 'device="auto"'
    assert len(entry(text, "have")) <= 100


@pytest.mark.parametrize("device", ["xla", "hpu", "privateuseone", torch.device("vulkan")])
def test_neighbors_of_it_too(device):
    assert f"device={str(device)!r}, and this torch cannot use it\n" in refusal(device=device)


@pytest.mark.parametrize(("given", "fix"), [("gpu", "cuda"), ("tpu", "auto"), (None, "auto"), ("cuda:x", "auto")])
def test_what_names_no_device_gets_one_that_does(given, fix):
    assert entry(refusal(device=given), "fix") == f'device="{fix}"'


def test_weights_are_not_sent_to_the_meta_device_where_they_would_be_lost():
    model = network()
    text = refusal(model=model, device="meta")
    assert "the weights would be lost" in text and entry(text, "fix") == 'device="auto"'
    assert model.weight.device.type == "cpu"


def on_meta():
    return nn.Linear(4, 3, device="meta")


def partly():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, device="meta"))


@pytest.mark.parametrize(
    ("model", "have"), [(on_meta, "all of its tensors: weight, bias"), (partly, "2 of its 4 tensors: 1.weight, 1.bias")]
)
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_model_on_the_meta_device_is_refused_with_the_lines_to_write(model, have, device):
    text = refusal(model=model(), device=device) if device == "auto" or model is on_meta else refusal(model=model())
    assert text.startswith("the model lies on the meta device, without data\n")
    assert entry(text, "have") == have and "FSDP" in entry(text, "want")
    assert 'model.to_empty(device="cpu") and load_weights(path, model)' in entry(text, "fix")


def test_the_lines_to_write_work(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, network().state_dict())
    model = on_meta().to_empty(device="cpu")
    load_weights(path, model)
    assert torch.equal(model.weight, network().weight)
    assert make(model=model).fit(pieces(), epochs=1).updates == 4


def test_a_teacher_or_a_loss_on_the_meta_device_is_refused_too():
    text = refusal(frozen={"teacher": on_meta()})
    assert text.startswith("Linear, given beside the model, lies on the meta device, without data\n")
    assert "CrossEntropyLoss" in refusal(loss=nn.CrossEntropyLoss(torch.ones(3, device="meta")))


def test_weights_cannot_be_loaded_into_a_model_without_data(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, network().state_dict())
    with pytest.raises(SettingError, match="cannot be loaded: weight, bias of this Linear have no data") as caught:
        load_weights(path, on_meta())
    assert entry(str(caught.value), "fix").startswith('model.to_empty(device="cpu")')


def test_a_dry_run_on_the_meta_device_is_possible_where_it_is_asked_for():
    model = on_meta()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), device="meta", console=False)
    assert trainer.device.type == "meta"
