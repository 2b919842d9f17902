"""What the environment says about processes: torchrun's variables, Slurm's under `srun`, contradictions of both."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from trainwright import DDP, launch
from trainwright.core.errors import DistributedError, SettingError
from trainwright.distributed.environment import Place, first_host, read_environment
from trainwright.distributed.start import as_world

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "node[01-02]",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
    "PMIX_RANK": "1",
}
AT = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3"}
LAUNCHERS = ("SLURM", "OMPI", "PMI", "MV2", "MPI_", "PALS", "JSM", "FLUX", "LOCAL_WORLD", "TORCHELASTIC")


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch):
    """Have the environment say this and nothing else about processes."""

    def say(variables: dict[str, str]) -> None:
        for name in [*TORCHRUN, *(name for name in os.environ if name.startswith(LAUNCHERS))]:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return say


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (TORCHRUN, Place(1, 2, 1, "node1:29500", "torchrun")),
        ({**TORCHRUN, "MASTER_ADDR": "fd00::7"}, Place(1, 2, 1, "[fd00::7]:29500", "torchrun")),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, Place(1, 2, None, "node1:29500", "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({**SRUN, **TORCHRUN}, Place(1, 2, 1, "node1:29500", "torchrun")),
        (SRUN, Place(3, 4, 1, "node01:23254", "srun")),
        ({**SRUN, "SLURM_STEP_ID": "2"}, Place(3, 4, 1, "node01:23256", "srun")),
        ({**SRUN, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "4"}, Place(3, 4, 1, "node01:23254", "srun")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({**SRUN, "SLURM_STEP_NODELIST": "b[3,5],a1"}, Place(3, 4, 1, "b3:23254", "srun")),
        ({**SRUN, "MASTER_ADDR": "m", "MASTER_PORT": "5"}, Place(3, 4, 1, "m:5", "srun")),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "1"}, None),
        (OMPI, Place(1, 2, 1, "127.0.0.1:28487", "mpirun")),
        ({**OMPI, **AT}, Place(1, 2, 1, "node1:29500", "mpirun")),
        ({**OMPI, "MASTER_PORT": "5"}, Place(1, 2, 1, "127.0.0.1:5", "mpirun")),
        ({**OMPI, **SRUN}, Place(1, 2, 1, "127.0.0.1:28487", "mpirun")),  # mpirun starts its daemons by srun
        ({**OMPI, "SLURM_NTASKS": "2"}, Place(1, 2, 1, "127.0.0.1:28487", "mpirun")),  # in the job's shell
        ({**OMPI, **TORCHRUN, "WORLD_SIZE": "4"}, Place(1, 4, 1, "node1:29500", "torchrun")),  # one per node
        ({**OMPI, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"}, None),  # a torchrun of each alone
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, None),
        ({**PMI, **AT}, Place(2, 3, None, "node1:29500", "mpirun")),
        ({**PMI, **AT, "MPI_LOCALRANKID": "1"}, Place(2, 3, 1, "node1:29500", "mpirun")),
        ({**PMI, "PMI_LOCAL_SIZE": "3", "PMI_JOBID": "7"}, Place(2, 3, None, "127.0.0.1:26346", "mpirun")),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({**SRUN, "PMI_SIZE": "4", "PMI_RANK": "3"}, Place(3, 4, 1, "node01:23254", "srun")),  # srun --mpi=pmi2
        ({**SRUN, "PMIX_RANK": "3"}, Place(3, 4, 1, "node01:23254", "srun")),  # srun --mpi=pmix
        ({**SRUN, **PMI, **AT}, Place(2, 3, None, "node1:29500", "mpirun")),  # a proxy per node, started by srun
        ({**AT, "MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, Place(0, 2, None, "node1:29500", "mpirun")),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PMIX_RANK": "0"}, None),
    ],
)
def test_the_environment_says_where_this_process_is(says, variables, place) -> None:
    says(variables)
    assert read_environment() == place


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node[01-03,7]", "node01"),
        ("node[7,01-03]", "node7"),
        ("a,b[1-2]", "a"),
        ("gpu-a[010-012]-ib,x", "gpu-a010-ib"),
        ("rack[1-2]node[05-09]", "rack1node05"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not\n  have  RANK=0\n  fix   start the script with torchrun"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and RANK is not set"),
        ({**TORCHRUN, "RANK": "2"}, "RANK is 2, and there are 2 processes\n.*\n  want  RANK from 0 to 1"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2, and there are 2 processes"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'\n.*\n  want  a whole number, at least 1"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "WORLD_SIZE is 2 and MASTER_ADDR is not set\n.*\n.*\n.*export MASTER_ADDR"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000\n"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1, and there are 1 processes"),
        (
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            "this Slurm job has 4 tasks, .* outside `srun`\n.*\n  fix   .*srun",
        ),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, "this Slurm job has 4 tasks"),
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4, and there are 4 processes"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_PROCID"}, "SLURM_PROCID is not set"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_NODELIST"}, "Slurm names no hosts"),
        (without(OMPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set"),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK is 2, and there are 2 processes"),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "OMPI_COMM_WORLD_SIZE is 2, not all are .*MASTER_ADDR is not set\n.*\n.*\n  fix   export MASTER_ADDR=",
        ),
        (PMI, "PMI_SIZE is 3, not all are known to be on this machine, and MASTER_ADDR is not set"),
        (without(OMPI, "PMIX_NAMESPACE"), "OMPI_COMM_WORLD_SIZE is 2, and MASTER_PORT is not set"),
        ({**OMPI, "RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1, and OMPI_COMM_WORLD_SIZE is 2: several processes"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1, and SLURM_NTASKS is 4: several processes"),
        (
            {"PMIX_RANK": "1"},
            "WORLD_SIZE is not set, and PMIX_RANK is 1: .*\n  have  PMIX_RANK=1\n  want  RANK, ",
        ),
        ({"PALS_RANKID": "1"}, "PALS_RANKID is 1"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_SIZE is 2"),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE is 2"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is 2"),
    ],
)
def test_what_contradicts_itself_is_refused_at_once(says, variables, text) -> None:
    says(variables)
    with pytest.raises(SettingError, match=text):
        as_world("auto")
    assert as_world(None).size == 1


@pytest.mark.parametrize("settings", ["auto", DDP()])
def test_a_group_of_one_process_is_refused_where_mpirun_has_started_two(says, settings) -> None:
    says(OMPI)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SettingError, match="the initialized process group has 1 process, and OMPI_COMM_WORLD_SIZE"):
            as_world(settings)
        assert as_world(None).size == 1
    finally:
        torch.distributed.destroy_process_group()


def test_launch_is_refused_inside_processes_that_mpirun_has_started(says) -> None:
    says(PMI)
    with pytest.raises(SettingError, match="PMI_SIZE is 3"):
        launch(print, processes=2)
    says({**PMI, **AT})
    with pytest.raises(SettingError, match="rank 2 of 3, by mpirun"):
        launch(print, processes=2)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (
            "ddp",
            r"parallel='ddp' is no setting\n  want  .auto., None, DDP\(...\) or FSDP\(...\)\n  fix   parallel=DDP\(\)",
        ),
        (2, "parallel=2 is no setting"),
        (True, "parallel=True is no setting"),
        (object(), "is no setting"),
    ],
)
def test_a_wrong_setting_is_refused_on_one_process_too(says, parallel, text) -> None:
    says({})
    with pytest.raises(SettingError, match=text):
        as_world(parallel)


def test_a_class_in_place_of_settings_gets_the_line_with_parentheses(says) -> None:
    says({})
    with pytest.raises(SettingError, match=r"fix   parallel=DDP\(\)"):
        as_world(DDP)
    assert as_world(DDP()).size == 1


def test_processes_that_never_come_are_an_error_and_no_hang(says) -> None:
    says({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    with pytest.raises(
        DistributedError, match=r"rank 0: not all of the 2 processes .*\n.*missing: rank 1\n.*within 1 s"
    ):
        as_world(DDP(timeout=1.0))


def test_one_process_looks_at_the_environment_alone(says, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group takes imports and threads; nothing of that for a run of one process."""
    says({})
    for name in ("peer_watch", "launch"):
        monkeypatch.delitem(sys.modules, f"trainwright.distributed.{name}", raising=False)
    world = as_world("auto")
    assert (world.rank, world.size, world.local_rank, world.is_main, world.device_index) == (0, 1, 0, True, None)
    error = ValueError()
    assert world.cause_of(error) is error
    with world.watch(lambda: "here"):
        world.report_error(error)
    assert not [name for name in ("peer_watch", "launch") if f"trainwright.distributed.{name}" in sys.modules]
