"""`full_digits.py` and its plain PyTorch twin `bare_digits.py` end with the same numbers and weights, bit for bit."""

from __future__ import annotations

import ast

import pytest
import torch
from loading import EXAMPLES, load

from trainwright import load_weights


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """The Result and directory of the one, history and file of the other, of the runs as they are documented."""
    directory = tmp_path_factory.mktemp("twins")
    result = load("full_digits").train(directory / "full", epochs=12)
    history = load("bare_digits").train(directory / "bare.pt", epochs=12)
    return result, directory / "full", history, directory / "bare.pt"


def test_every_epoch_of_the_twins_has_the_same_numbers(twins):
    result, _, history, _ = twins
    assert [{name: row[name] for name in history[0]} for row in result.history] == history


def test_the_best_weights_of_the_twins_are_the_same_bit_for_bit(twins):
    _, directory, _, file = twins
    full, bare = load_weights(directory, which="best"), torch.load(file)
    assert full.keys() == bare.keys()
    assert all(torch.equal(full[name], bare[name]) for name in bare)


def test_the_twins_keep_the_promise_of_their_headers(twins):
    result, _, history, _ = twins
    assert result.best.value >= 0.98
    assert result.best.value == max(row["val_accuracy"] for row in history)


def test_started_again_the_finished_example_gives_its_result_at_once(twins):
    result, directory, _, _ = twins
    again = load("full_digits").train(directory, epochs=12)
    assert again == result


def test_the_full_example_has_at_most_20_lines_of_code_beside_data_and_model():
    source = (EXAMPLES / "full_digits.py").read_text()
    code = [node for node in ast.parse(source).body if getattr(node, "name", "") in {"train", "main"}]
    lines = sum(len(ast.get_source_segment(source, node).splitlines()) for node in code)
    assert [node.name for node in code] == ["train", "main"]
    assert lines <= 20, f"{lines} lines"
