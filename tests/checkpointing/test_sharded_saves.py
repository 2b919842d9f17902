"""Checkpoints of sharded models: written by all ranks, complete or absent, read on any number of them."""

from __future__ import annotations

import json
import os

import pytest
import sharded_runs
import torch

from distributed.pool import pool
from trainwright.checkpointing import format as formats
from trainwright.checkpointing.format import load_tree
from trainwright.checkpointing.load import latest_checkpoint, load_weights


def on_all(size, function, *given, **named):
    return pool(size).run(function, *given)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory that two ranks have saved into, the complete state at the last save, and the state at the end."""
    directory = tmp_path_factory.mktemp("sharded") / "run"
    first, second = on_all(2, sharded_runs.run, directory)
    assert equal(first[0], second[0])
    return directory, first


def test_a_checkpoint_of_two_ranks_is_one_like_any_other(written):
    directory, _ = written
    (newest, _) = formats.list_checkpoints(directory)
    manifest = formats.verify(newest)
    shards = {"shard-00000.safetensors", "shard-00001.safetensors"}
    assert set(manifest["files"]) == {"state.json", "state.safetensors", "shards.json", *shards}
    assert {path.name for path in newest.iterdir()} == {*manifest["files"], "manifest.json"}
    assert latest_checkpoint(directory) == newest
    sizes = [os.stat(newest / name).st_size for name in sorted(shards)]
    assert max(sizes) < 2 * min(sizes)  # each has written its part, and no other's
    listed = json.loads((newest / "shards.json").read_text())["tensors"]
    assert "optimizer.state.0.exp_avg" in listed and "model.norm.running_mean" not in listed


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shards", [True, False])
def test_a_resume_on_any_number_of_ranks_is_exact_sharded_or_not(written, size, shards):
    directory, (model, optimizer) = written
    answers = on_all(size, resume, directory, shards)
    name, first, later, plain = answers[0]
    assert name == formats.update_name(4) and plain == [0, 1, 2]
    assert equal(first, (model, optimizer))
    assert all(equal(answer[1:3], answers[0][1:3]) for answer in answers)
    (_, _, undisturbed, _) = on_all(2, resume, directory, True)[0]
    assert later.keys() == undisturbed.keys()
    for key in later:
        assert torch.allclose(later[key], undisturbed[key], rtol=0, atol=1e-9), key


def resume(directory, shards):
    return sharded_runs.resume(directory, shards=shards)


def test_one_process_without_a_group_reads_complete_tensors(written):
    directory, (model, optimizer) = written
    tree = load_tree(latest_checkpoint(directory))
    assert equal(dict(tree["model"]), model) and equal(tree["optimizer"]["state"], optimizer)
    assert tree["model"]._metadata[""]["version"] == 1
    weights = load_weights(directory, sharded_runs.Model().double(), which="last")
    assert equal(dict(weights), model)


def test_weights_are_loaded_into_a_sharded_model(written):
    directory, (model, _) = written
    for answer in on_all(2, sharded_runs.weights_into, directory):
        assert equal(answer, model)


def plain_into_shards(directory):
    from trainwright.checkpointing.checkpoint import Checkpoint

    world = sharded_runs.ProcessGroupWorld()
    model, optimizer = sharded_runs.made(shards=False)
    sharded_runs.train(model, optimizer, 3)
    if world.is_main:
        manager = Checkpoint(directory).bind("one")
        manager.prepare(resuming=False)
        manager.save(sharded_runs.tree_of(model, optimizer, 3), update=3, epoch=0)
        manager.completed(wait=True)
        manager.release()
    world.sum_numbers(0)
    state = sharded_runs.whole(model.state_dict()), sharded_runs.whole(optimizer.state_dict()["state"])
    sharded_runs.train(model, optimizer, 2, start=3)
    return state, sharded_runs.whole(model.state_dict()), sharded_runs.resume(directory)


def test_a_plain_checkpoint_is_resumed_by_a_sharded_model(tmp_path):
    for state, later, (_, first, resumed, _) in on_all(2, plain_into_shards, tmp_path):
        assert equal(first, state)
        assert all(torch.allclose(resumed[key], later[key], rtol=0, atol=1e-9) for key in later)


@pytest.mark.parametrize("async_save", [True, False])
def test_only_the_retained_checkpoints_stay(tmp_path, async_save):
    on_all(2, three_saves, tmp_path, async_save)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", formats.update_name(2), formats.update_name(3)]
    for path in formats.list_checkpoints(tmp_path):
        formats.verify(path)


def three_saves(directory, async_save):
    return sharded_runs.run(directory, (1, 2, 3), keep=2, async_save=async_save)


def test_it_holds_the_state_of_its_boundary_while_training_continues(tmp_path):
    assert on_all(2, sharded_runs.trained_meanwhile, tmp_path) == [True, True]
