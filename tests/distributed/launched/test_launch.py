"""`launch`: a function in several processes, from wherever it was written; how it fails, and what is left of it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.launched import programs
from distributed.launched.programs_run import how_it_ends, read_lines, started
from trainwright.core.errors import DistributedError, SettingError
from trainwright.distributed.launch import launch
from trainwright.distributed.start import as_world

SECONDS = 60

SCRIPT = """
import os, signal, sys, time
from trainwright.distributed.launch import launch
from trainwright.distributed.start import as_world

def main(kind):
    world = as_world("auto")
    try:
        os.write(1, f"rank {world.rank} is {os.getpid()}\\n".encode())
        while kind == "wait":  # one long sleep would miss a signal that comes just before it
            time.sleep(0.1)
    except KeyboardInterrupt:
        time.sleep(0.7)  # a second one would break it off
        os.write(1, f"rank {world.rank} saves\\n".encode())
        raise
    return world.sum_numbers(world.rank + 1)

GUARD:
    print(launch(main, sys.argv[1], processes=2))
"""


AT_A_PROMPT = ["-c", SCRIPT.replace("GUARD", "if True")]


def as_script(path: Path, guard: str = 'if __name__ == "__main__"') -> str:
    path.write_text(SCRIPT.replace("GUARD", guard))
    return str(path)


def run_script(*command: str) -> tuple[int, str, str]:
    with started([[sys.executable, *command]]) as [process]:
        end = how_it_ends(process, SECONDS)
    return end.code, end.out, end.err


def pids(out: str) -> list[int]:
    return [int(line.split()[-1]) for line in out.splitlines() if line.startswith("rank") and " is " in line]


def gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_function_that_can_be_imported_runs_in_new_processes_and_gives_rank_0s_value() -> None:
    assert launch(programs.main, "total", processes=2, timeout=SECONDS) == 3.0


def test_a_closure_runs_in_copies_of_this_process() -> None:
    here, weights = os.getpid(), torch.ones(3)

    def main(times: float) -> tuple[bool, list[float], torch.Tensor]:
        world = as_world("auto")
        alone = os.getpgrp() == os.getpid()  # Ctrl-C comes once, from the launcher, and not from the terminal too
        return os.getppid() == here and alone, world.sum_numbers(world.rank + 1), weights * times

    copied, total, value = launch(main, 2.0, processes=3, timeout=SECONDS)
    assert copied
    assert total == [6.0]
    assert value.tolist() == [2.0, 2.0, 2.0]


def test_a_copy_computes_on_after_threads_and_a_backward_here() -> None:
    """OpenMP's threads do not come along: without care the first large product of a copy never ends."""
    code = """
import torch
from trainwright.distributed.launch import launch
torch.set_num_threads(2)
layer, rows = torch.nn.Linear(512, 512), torch.randn(2048, 512)
layer(rows).sum().backward()
def main():
    layer(rows).sum().backward()
    return torch.get_num_threads()
print(launch(lambda: main(), processes=2, timeout=40))
"""
    assert run_script("-c", code) == (0, "1\n", "")


def test_a_script_from_stdin_is_launched_too() -> None:
    with subprocess.Popen([sys.executable, "-", "go"], stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        out, err = process.communicate(SCRIPT.replace("GUARD", "if True"), timeout=SECONDS)
    assert out.splitlines()[-1] == "[3.0]", err
    assert all(gone(pid) for pid in pids(out))


def test_a_script_file_is_launched_and_one_without_a_guard_is_refused_once(tmp_path: Path) -> None:
    code, out, err = run_script(as_script(tmp_path / "guarded.py"), "go")
    assert (code, out.splitlines()[-1], err) == (0, "[3.0]", "")
    code, out, err = run_script(as_script(tmp_path / "bare.py", "if True"), "go")
    assert (code, out) == (1, "")
    assert err.count("Error: ") == 1
    assert "SettingError: launch: the script starts its processes again in each of them" in err
    assert 'fix   if __name__ == "__main__":' in err


def test_the_traceback_of_the_failed_rank_is_shown_once() -> None:
    def main() -> None:
        world = as_world("auto")
        if world.rank == 1:
            raise KeyError("row 17")
        world.sum_numbers(0)

    with pytest.raises(DistributedError, match=r"^rank 1 of 2 has failed: KeyError: 'row 17'$") as raised:
        launch(main, processes=2, timeout=SECONDS)
    assert str(raised.value.__cause__).count("Traceback") == 1
    assert 'raise KeyError("row 17")' in str(raised.value.__cause__)


def test_ctrl_c_ends_all_ranks_after_each_has_saved() -> None:
    with started([[sys.executable, *AT_A_PROMPT, "wait"]]) as [process]:
        lines = read_lines(process, 2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all that are in its group
        end = how_it_ends(process, SECONDS)
    assert sorted(end.out.splitlines()) == ["rank 0 saves", "rank 1 saves"]
    assert end.code == -signal.SIGINT and end.err.strip().endswith("KeyboardInterrupt")
    assert all(gone(pid) for pid in pids("".join(lines)))


def test_processes_end_where_their_launcher_is_killed() -> None:
    with started([[sys.executable, *AT_A_PROMPT, "wait"]]) as [process]:
        lines = read_lines(process, 2)
        process.kill()
        assert len(pids("".join(lines))) == 2
        assert all(gone(pid) for pid in pids("".join(lines)))


def test_processes_that_take_too_long_are_ended() -> None:
    with pytest.raises(DistributedError, match=r"have not ended within 0\.5 s\n  have  still running, .*: rank 0, 1\n"):
        launch(lambda: time.sleep(60), processes=2, timeout=0.5)


def test_one_process_is_this_one() -> None:
    assert launch(os.getpid, processes=1) == os.getpid()
    assert not dist.is_initialized()


def test_a_value_that_cannot_be_sent_back_is_refused_and_an_exit_without_an_error_gives_none() -> None:
    with pytest.raises(
        SettingError,
        match=r"(?s)value of the first process cannot be sent back, a function\n.*  fix   return result\.history",
    ):
        launch(lambda: lambda: None, processes=2, timeout=SECONDS)
    assert launch(sys.exit, processes=2, timeout=SECONDS) is None
    with pytest.raises(DistributedError, match=r"rank \d of 2 has failed: SystemExit: 3"):
        launch(lambda: sys.exit(3), processes=2, timeout=SECONDS)


def test_a_function_that_can_neither_be_imported_nor_copied_is_refused_with_both_reasons() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="reader")
    thread.start()
    try:
        with pytest.raises(SettingError, match=r"(?s)cannot import it: .*local object.*cannot be copied: .*reader"):
            launch(lambda: None, processes=2)
    finally:
        over.set()
        thread.join()
    assert launch(lambda: 1, processes=2, timeout=SECONDS) == 1


def test_a_copy_is_refused_where_a_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SettingError, match=r"(?s)cannot import it: .*cannot be copied: CUDA is in use here already"):
        launch(lambda: None, processes=2)


def test_signal_handlers_and_the_environment_of_the_caller_stay_as_they_were() -> None:
    numbers = [getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "USR1", "HUP", "QUIT", "CHLD")]
    before, variables = [signal.getsignal(number) for number in numbers], dict(os.environ)
    assert launch(lambda: 1, processes=2, timeout=SECONDS) == 1
    with pytest.raises(DistributedError):
        launch(lambda: sys.exit(3), processes=2, timeout=SECONDS)
    assert [signal.getsignal(number) for number in numbers] == before
    assert dict(os.environ) == variables
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_copy_after_an_error_does_not_wait_for_the_store_of_the_launch_before() -> None:
    """The traceback holds frames of `launch`, and a copy collects them."""

    def fail() -> None:
        raise ValueError("row 3")

    def collect() -> int:
        gc.collect()
        return 2

    with pytest.raises(DistributedError) as raised:
        launch(fail, processes=2, timeout=SECONDS)
    frames, step = [], raised.value.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    assert frames and not any(type(one).__name__ == "TCPStore" for frame in frames for one in frame.f_locals.values())
    assert launch(collect, processes=2, timeout=SECONDS) == 2


def test_launch_inside_processes_that_belong_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DistributedError, match="SettingError: launch: this is one of several processes already"):
        launch(lambda: launch(lambda: None, processes=2), processes=2, timeout=SECONDS)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        SettingError, match=r"already\n  have  rank 1 of 4, by torchrun\n  fix   call main\(\) directly"
    ):
        launch(lambda: None, processes=2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"processes": 0}, r"launch\(processes=0\)\n  want  a whole number"),
        ({"processes": True}, r"launch\(processes=True\)"),
        ({"timeout": -1}, r"launch\(timeout=-1\)\n  want  seconds"),
        ({"main": 3.0}, r"launch\(3.0\): that is no function\n.*\n  fix   launch\(main, processes=2\)"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, object], text: str) -> None:
    main = given.pop("main", print)
    with pytest.raises(SettingError, match=text):
        launch(main, **given)  # type: ignore[arg-type]
