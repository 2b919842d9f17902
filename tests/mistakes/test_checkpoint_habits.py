"""What is given to checkpoints out of the habits of other loops: functions in metrics, files of torch.save, no slot."""

from __future__ import annotations

import re

import pytest
import torch
from refusals import entry, make, network, pieces, refused
from torch import nn

from trainwright import Checkpoint, CheckpointError, SettingError, latest_checkpoint, load_weights, save_weights


class Mean:
    """The mean of what a function makes of each batch."""

    def __init__(self, of):
        self.of, self.total, self.batches = of, 0.0, 0

    def reset(self):
        self.total, self.batches = 0.0, 0

    def update(self, output, target):
        self.total += float(self.of(output, target)) if callable(self.of) else 1.0
        self.batches += 1

    def compute(self):
        return self.total / max(1, self.batches)


def largest(output, target):
    return output.max()


@pytest.mark.parametrize("of", [largest, lambda output, target: output.max(), {"f": largest}, nn.Softmax(1), range(2)])
def test_a_metric_with_a_function_is_saved_by_the_two_methods_of_the_message(tmp_path, of):
    trainer = make(metrics={"mean": Mean(of)}, checkpoint=Checkpoint(tmp_path / "a"))
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    first = r"metric 'mean' cannot be saved with the run: its attribute of\S* (is|has|holds) .*"
    refused(call, CheckpointError, first=first, want="a Mean with state_dict and load_state_dict", trainer=trainer)

    with pytest.raises(CheckpointError) as caught:
        call()
    lines = str(caught.value).partition("  fix   in Mean: ")[2].splitlines()
    methods = [lines[0], lines[1].strip().removeprefix("and ")]
    assert re.fullmatch(r".*   # without of", methods[0])
    namespace = {"Mean": Mean}
    exec("class Fixed(Mean):\n" + "".join(f"    {method}\n" for method in methods), namespace)

    def trained(directory, *updates):
        for n in updates:
            trainer = make(metrics={"mean": namespace["Fixed"](largest)}, checkpoint=Checkpoint(tmp_path / directory))
            result = trainer.fit(pieces(), epochs=2, max_updates=n, resume="auto")
        return result.history

    assert trained("cut", 3, 8)[-1]["mean"] == trained("whole", 8)[-1]["mean"]


def test_a_metric_with_a_function_needs_no_methods_without_a_checkpoint():
    assert make(metrics={"mean": Mean(largest)}).fit(pieces(), epochs=1).history[0]["mean"] != 0


def test_a_metric_that_can_only_be_loaded_is_saved_by_its_attributes(tmp_path):
    class Loads(Mean):
        def load_state_dict(self, tree):
            raise AssertionError("there is no state_dict to load")

    slot = Checkpoint(tmp_path)
    assert make(metrics={"mean": Loads("ones")}, checkpoint=slot).fit(pieces(), epochs=1).history[0]["mean"] == 1.0


# Resume from what is no checkpoint.


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize("name", ["old.pth.tar", "epoch=3.ckpt"])
def test_a_file_of_torch_save_is_explained_and_not_resumed(tmp_path, name, slot, legacy):
    path = tmp_path / name
    torch.save({"state_dict": network().state_dict()}, path, _use_new_zipfile_serialization=not legacy)
    trainer = make(**{"checkpoint": Checkpoint(tmp_path / "run")} if slot else {})
    call = lambda: trainer.fit(pieces(), epochs=1, resume=path)  # noqa: E731
    first = re.escape(f"resume={str(path)!r} is a file, and a checkpoint is a directory")
    fix = refused(call, CheckpointError, first=first, want="directory of a checkpoint or of a run", trainer=trainer)
    assert fix == "model.load_state_dict(...) of the weights in it before fit, without resume"
    with pytest.raises(CheckpointError) as caught:
        call()
    with pytest.raises(CheckpointError) as loading:
        load_weights(path)
    assert entry(str(caught.value), "have") == str(loading.value)  # the explanation that load_weights gives
    assert "as torch.save w" in str(loading.value) and "torch.load(path, weights_only=True)" in str(loading.value)


def test_a_file_of_weights_is_loaded_by_the_line_of_the_message(tmp_path):
    path, other = tmp_path / "net.safetensors", nn.Linear(4, 3)
    save_weights(path, other.state_dict())
    trainer = make(checkpoint=Checkpoint(tmp_path / "run"))
    call = lambda: trainer.fit(pieces(), epochs=1, resume=str(path))  # noqa: E731
    fix = refused(call, CheckpointError, first="resume=.* is a file, .*", want="directory", trainer=trainer)
    eval(fix.removesuffix(" before fit, without resume"), {"load_weights": load_weights, "model": trainer.model})
    assert torch.equal(trainer.model.weight, other.weight)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_file_inside_a_checkpoint_leads_to_the_checkpoint(tmp_path, name):
    make(checkpoint=Checkpoint(tmp_path)).fit(pieces(), epochs=1)
    path = latest_checkpoint(tmp_path)
    trainer = make(checkpoint=Checkpoint(tmp_path))
    call = lambda: trainer.fit(pieces(), epochs=1, resume=path / name)  # noqa: E731
    fix = refused(call, CheckpointError, first="resume=.* is a file, .*", want="directory", trainer=trainer)
    assert fix == f"resume={str(path)!r}"


def test_resume_without_a_slot_is_refused_with_the_slot_to_write(tmp_path):
    make(checkpoint=Checkpoint(tmp_path / "run")).fit(pieces(), epochs=1)
    newest = latest_checkpoint(tmp_path / "run")
    for resume in (tmp_path / "run", newest, str(newest), "auto"):
        trainer = make()
        call = lambda: trainer.fit(pieces(), epochs=1, resume=resume)  # noqa: B023, E731
        written = '"auto"' if resume == "auto" else repr(str(resume))
        first = re.escape(f"resume={written} without a checkpoint slot")
        fix = refused(call, SettingError, first=first, want="a slot, which holds the best", trainer=trainer)
        directory = "runs/1" if resume == "auto" else tmp_path / "run"
        assert fix.startswith(f"Trainer(..., checkpoint=Checkpoint({str(directory)!r}))")
        assert ("load_weights(" in fix) == (resume != "auto")
    trainer = make(checkpoint=Checkpoint(tmp_path / "run"))
    assert trainer.fit(pieces(), epochs=2, resume=newest).updates == 8


def test_resume_without_a_slot_names_a_wrong_path_first(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        make().fit(pieces(), epochs=1, resume=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        make().fit(pieces(), epochs=1, resume=tmp_path)
