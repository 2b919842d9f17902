"""The commands and files of three guides (distributed, launching, fsdp) run; every way to start a file prints the same.

What a cluster would set is set by hand: Slurm's and Kubeflow's variables, and the process group that Ray Train makes.
"""

from __future__ import annotations

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.launched.programs_run import Ended, ended, free_port
from test_docs import FENCE, ROOT

PAGE = "".join((ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in ("distributed", "launching", "fsdp"))
SECONDS = 120
LAST = re.compile(r"^test_loss \d\.\d{4}, test_accuracy \d\.\d{4}$", re.M)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

RAY = '''
"""Stands in for ray.train.torch: its workers have a process group when the function is called."""
import os
import torch.distributed as dist

class TorchTrainer:
    def __init__(self, work, *, scaling_config):
        assert scaling_config.num_workers == int(os.environ["WORLD_SIZE"])
        self.work = work

    def fit(self):
        dist.init_process_group("gloo")
        self.work()
        assert dist.is_initialized(), "it was not made by the Trainer, and is not taken down by it"
        dist.destroy_process_group()
'''
SCALING = "class ScalingConfig:\n    def __init__(self, num_workers):\n        self.num_workers = num_workers\n"


def blocks(language: str) -> list[str]:
    return [match["code"] for match in FENCE.finditer(PAGE) if match["language"] == language]


def block(language: str, with_: str) -> str:
    [found] = [code for code in blocks(language) if with_ in code]
    return found


def commands(with_: str) -> list[list[str]]:
    """The commands of a block of the page, without their comments."""
    return [shlex.split(line, comments=True) for line in block("sh", with_).splitlines()]


def runnable(command: list[str]) -> list[str]:
    """The command of the page for this machine: its Python, a free port."""
    start = TORCHRUN if command[0] == "torchrun" else [sys.executable]
    if "--master-port" not in command and command[0] == "torchrun":
        start = [*start, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [*start, *command[1:]]


def last_line(done: list[Ended]) -> str:
    """What the first process has printed at its end; nobody else prints it."""
    assert [process.code for process in done] == [0] * len(done), done
    [line] = [line for process in done for line in LAST.findall(process.out)]
    return line


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `python train.py` prints."""
    directory = tmp_path_factory.mktemp("alone")
    (directory / "train.py").write_text(block("python", "# train.py"))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=directory, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    [line] = LAST.findall(done.stdout)
    return line


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with `train.py`, in which all runs."""
    (tmp_path / "train.py").write_text(block("python", "# train.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # `started` hands sys.path on


@pytest.mark.slow
def test_torchrun_prints_what_python_prints(expected: str) -> None:
    alone, several = commands("# one process")
    assert alone == ["python", "train.py"]
    done = ended([runnable(several)], seconds=SECONDS)
    assert last_line(done) == expected
    assert "2 processes by DDP on gloo: 64 = 2 x 32 rows in a micro-batch" in done[0].out
    assert "`2 processes by DDP on gloo: 64 = 2 x 32 rows in a micro-batch`" in PAGE


@pytest.mark.slow
def test_two_agents_print_what_python_prints(expected: str) -> None:
    here = {"node0": "127.0.0.1", "29500": str(free_port()), "4": "1"}
    nodes = [[here.get(word, word) for word in command] for command in commands("--nnodes")]
    assert last_line(ended([runnable(node) for node in nodes], seconds=SECONDS)) == expected


@pytest.mark.slow
def test_a_job_with_restarts_prints_what_python_prints(expected: str) -> None:
    [command] = commands("--max-restarts")
    assert last_line(ended([runnable(command)], seconds=SECONDS)) == expected


@pytest.mark.slow
def test_tasks_of_srun_print_what_python_prints(expected: str) -> None:
    job = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "localhost"}
    job["SLURM_JOB_ID"] = str(random.SystemRandom().randrange(10_000))
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    [line] = [line for line in block("slurm", "srun").splitlines() if line.startswith("srun ")]
    command = runnable(line.removeprefix("srun ").split())
    assert last_line(ended([command] * 2, tasks, seconds=SECONDS)) == expected


def test_the_script_for_slurm_is_one_that_bash_reads(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(block("slurm", "srun"))
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_for_slurm_waits_for_the_codes_that_a_stopped_fit_ends_with() -> None:
    from trainwright import Stopped

    codes = [int(code) for code in re.findall(r"\$code = (\d+)", block("slurm", "srun"))]
    assert codes == [128 + 10, 128 + 15]
    assert issubclass(Stopped, SystemExit)


@pytest.mark.slow
def test_pods_of_kubeflow_print_what_python_prints(expected: str) -> None:
    """Each has its rank, and nothing that says which process of its machine it is."""
    [command] = re.findall(r"command: \[(.+)\]", blocks("yaml")[0])
    pod = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pods = [{**pod, "RANK": str(rank)} for rank in range(2)]
    assert last_line(ended([runnable(command.split(", "))] * 2, pods, seconds=SECONDS)) == expected


def test_the_yaml_is_a_job_of_four_pods() -> None:
    yaml: Any = pytest.importorskip("yaml")
    [text] = blocks("yaml")
    job = yaml.safe_load(text)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert job["kind"] == "PyTorchJob"
    assert [spec["replicas"] for spec in replicas.values()] == [1, 3]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    [container] = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "train.py"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.slow
def test_the_recipe_for_ray_train_calls_fit_in_a_group_that_is_there(tmp_path: Path, expected: str) -> None:
    package = tmp_path / "ray" / "train"
    package.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (package / "__init__.py").write_text(SCALING)
    (package / "torch.py").write_text(RAY)
    (tmp_path / "recipe.py").write_text(block("python", "TorchTrainer"))
    command = [*TORCHRUN, "--master-port", str(free_port()), "--nproc-per-node", "2", "recipe.py"]
    assert last_line(ended([command], seconds=SECONDS)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("how", ["imported", "-c", "stdin"])
def test_launch_prints_what_python_prints(how: str, expected: str) -> None:
    """`main` from a file, from `python -c`, and from what is typed: the latter two run in copies of the process."""
    call = block("python", "launch(main")
    typed = block("python", "# train.py").partition("if __name__")[0] + call
    code, given = {
        "imported": ("from train import main\n" + f"if __name__ == '__main__':\n{re.sub('(?m)^', '    ', call)}", None),
        "-c": (typed, None),
        "stdin": ("", typed),
    }[how]
    command = [sys.executable, *(["-"] if given else ["-c", code])]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert LAST.findall(done.stdout) == [expected]


@pytest.mark.slow
def test_a_stream_of_the_page_is_read_once_by_two_processes(tmp_path: Path) -> None:
    head = block("python", "# train.py").partition("def main")[0]
    tail = "\ntrainer.print('updates', trainer.result.updates, 'rows', trainer.progress.rows)\n"
    (tmp_path / "stream.py").write_text(head + block("python", "islice") + tail)
    command = [*TORCHRUN, "--master-port", str(free_port()), "--nproc-per-node", "2", "stream.py"]
    [process] = ended([command], seconds=SECONDS)
    assert process.code == 0, process.err
    assert "updates 14 rows 200" in process.out  # two epochs of 100 rows, 8 and 8 at a time


@pytest.mark.slow
def test_the_model_in_shards_is_loaded_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "fsdp.py").write_text(block("python", "# fsdp.py"))
    compare = "\nprint(len(load_weights('net.safetensors')), model[0].weight.double().sum().item())\n"
    (tmp_path / "load.py").write_text(block("python", "from fsdp import") + compare)
    command = [*TORCHRUN, "--master-port", str(free_port()), "--nproc-per-node", "2", "fsdp.py"]
    [process] = ended([command], seconds=SECONDS)
    assert process.code == 0, process.err
    assert "2 processes by FSDP on gloo" in process.out
    [process] = ended([[sys.executable, "load.py"]], seconds=SECONDS)
    assert process.code == 0, process.err
    number, _ = process.out.split()
    assert int(number) == 16
