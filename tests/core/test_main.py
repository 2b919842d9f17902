"""`python -m trainwright`: the demo says what it did, keeps its promise, and leaves the process as it was."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from trainwright.__main__ import main


def test_the_demo_shows_the_table_and_gets_97_percent_of_the_test_digits(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "1200 to train on, 200 to validate with, 397 held out" in shown
    assert re.search(r"epoch +update .* val_loss .* val_accuracy", shown)
    assert float(re.search(r"([\d.]+)% of the 397 held-out digits are right", shown)[1]) >= 97


def test_the_demo_ends_with_the_report_on_the_test_digits(capsys):
    main(["--epochs", "2"])
    shown = capsys.readouterr().out
    right = float(re.search(r"([\d.]+)% of the 397 held-out digits are right", shown)[1])
    report = shown.partition("digits are right.\n\n")[2]
    assert [line.split()[0] for line in report.splitlines() if line][:11] == ["precision", *map(str, range(10))]
    assert abs(float(re.search(r"accuracy +([\d.]+) +397", report)[1]) - right / 100) <= 0.0056
    assert report.splitlines()[-1].startswith("weighted avg")


def test_the_demo_gives_the_same_numbers_each_time_and_moves_no_state_of_the_process(capsys):
    numbers = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        threads, rng = torch.get_num_threads(), torch.get_rng_state()
        main(["--epochs", "1"])
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), rng)
        numbers.append(re.search(r"^ +1 +19( +\S+){4}", capsys.readouterr().out, re.M)[0])
    assert numbers[0] == numbers[1]


@pytest.mark.slow
def test_the_demo_writes_no_file_and_no_control_characters_where_there_is_no_terminal(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "trainwright", "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1 epoch, 19 updates" in done.stdout and "\r" not in done.stdout and done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_number_of_epochs_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--epochs", text])
    assert ended.value.code == 2 and "--epochs" in capsys.readouterr().err
