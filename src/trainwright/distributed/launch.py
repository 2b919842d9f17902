"""`launch(main, processes=2)`: run a function in several processes of this machine, from a script or a notebook.

`torch.multiprocessing` starts the processes, joins them, and terminates the others when one fails.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from trainwright.core.checks import check_number, check_whole
from trainwright.core.errors import DistributedError, SettingError, Stopped, first_line, message
from trainwright.core.signals import ENDING
from trainwright.core.suggestions import suggests
from trainwright.distributed import peer_watch, start
from trainwright.distributed.environment import is_shell_of_slurm, read_environment

R = TypeVar("R")

FAILURE_GRACE = 5.0
"""Seconds for the other ranks to exit by themselves after one has failed, and again after SIGTERM."""
SIGNAL_GRACE = 30.0
"""Seconds for all ranks to save and exit after Ctrl-C or another signal; a second Ctrl-C kills them at once."""
_UNGUARDED = 86
"""Exit code of a process that calls `launch` while it imports the calling script: the `__main__` guard is missing."""
_FAILURES = ("setting", "error", "exit", "named", "ended", "follows")
"""Kinds of failures, from cause to consequence: a wrong call of `launch`; an error raised by the rank itself; an exit
without a report; an error that names another rank as the cause; an exit by SIGTERM or SIGKILL, perhaps sent by `launch`
after another failure; an error of the process group, caused by another rank's failure.
"""


class _Job(NamedTuple):
    """The input of every rank."""

    size: int
    folder: Path
    """Directory for the port of the store and for the reports."""
    sent: Any
    """The function and its arguments: pickled for spawned processes, as objects for forked ones."""


class _Report(NamedTuple):
    """The result of a rank: the kind "value", or a kind of failure with its text and traceback."""

    kind: str
    text: str = ""
    traceback: str = ""
    value: bytes = b""
    """The pickled value."""


@suggests
def launch(main: Callable[..., R], *args: Any, processes: int = 2, timeout: float | None = None) -> R:
    """Run `main(*args)` in several processes of this machine; return its value on rank 0.

    `Trainer(...)` inside `main` finds the other ranks, as under torchrun. A function that new processes can import runs
    in spawned processes. Any other function, such as one from a notebook, runs in forked processes, unless threads or
    CUDA prevent a fork. With `processes=1` the function runs in this process. Ctrl-C, SIGTERM and SIGUSR1 are forwarded
    to all ranks. When these have saved and exited, the signal ends this process as it ends a `fit`.

    Args:
        main: The function.
        *args: Its arguments.
        processes: The number of processes.
        timeout: Seconds after which all processes are ended. None: no limit.

    Raises:
        DistributedError: When a process has failed, with its traceback, after all others have exited.
        SettingError: For a function that no other process can run, and for a call inside a group of processes.
    """
    _check(main, processes, timeout)
    if processes == 1:
        return main(*args)
    method, sent = _start_method(main, args)
    others = multiprocessing.active_children()
    with tempfile.TemporaryDirectory(prefix="trainwright-launch-") as folder:
        try:
            value: R = pickle.loads(_run(_Job(processes, Path(folder), sent), method, timeout))
            return value
        finally:
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
                    process.join()


def _run(job: _Job, method: str, timeout: float | None) -> bytes:
    """Run all ranks; return the pickled value of rank 0, or raise the error of the rank that caused the failure."""
    with _blocked_signals(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        context: Any = start_processes(_run_rank, (job,), nprocs=job.size, join=False, start_method=method)
    # The store is made after the forks: a forked rank that inherits it would wait for its thread in the destructor.
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = -1
    try:
        _write(job.folder / "port", str(store.port).encode())
        with _raised_signals():
            _join(context, timeout)
    except ProcessException as error:  # of the first rank to fail, which may not be the cause
        first = error.error_index
    except (KeyboardInterrupt, Stopped) as end:
        _pass_on(signal.Signals[end.signal] if isinstance(end, Stopped) else signal.SIGINT, context.processes)
        raise
    finally:
        del store  # the traceback of an error would keep this frame, and the store, alive
    codes = [process.exitcode for process in context.processes]
    reports = [_report_of(job.folder, rank, code, is_first=rank == first) for rank, code in enumerate(codes)]
    failed = [rank for rank, report in enumerate(reports) if report.kind != "value"]
    if failed:
        raise _error(reports, min(failed, key=lambda rank: _FAILURES.index(reports[rank].kind)))
    return reports[0].value


def _join(context: ProcessContext, timeout: float | None) -> None:
    """Wait until all ranks have exited; ProcessException if one fails, DistributedError after `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    while not context.join(None if end is None else max(0.0, end - time.monotonic()), grace_period=FAILURE_GRACE):
        if end is not None and time.monotonic() >= end:
            running = [str(rank) for rank, process in enumerate(context.processes) if process.is_alive()]
            raise DistributedError(
                f"launch: {len(context.processes)} processes have not ended within {timeout:g} s",
                have=f"still running, and ended now: rank {', '.join(running)}",
                fix="launch(..., timeout=...) with more seconds, or None",
            )


def _pass_on(number: int, processes: list[Any]) -> None:
    """Send a signal to each process once, and wait until all have saved and exited."""
    end = time.monotonic() + SIGNAL_GRACE
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number)
    with suppress(KeyboardInterrupt):
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))


def _error(reports: list[_Report], rank: int) -> BaseException:
    kind, text, trace, _ = reports[rank]
    error: Exception
    if kind == "setting":
        error = SettingError(text)
    else:
        error = DistributedError(text if kind == "named" else f"rank {rank} of {len(reports)} has failed: {text}")
    if trace:
        error.__cause__ = _RemoteTraceback(trace)
    return error


class _RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of an error in this one."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _report_of(folder: Path, rank: int, code: int, *, is_first: bool) -> _Report:
    """Return the report of a rank that has exited; without a report file, one made from its exit code.

    `is_first`: whether it was the first rank to fail. SIGTERM or SIGKILL of any other rank may come from `launch`.
    """
    if (folder / str(rank)).exists():
        report: _Report = pickle.loads((folder / str(rank)).read_bytes())
        return report
    if code == _UNGUARDED:
        what = "launch: the script starts its processes again in each of them, since it calls `launch` when imported"
        fix = 'if __name__ == "__main__":\n            launch(main, processes=2)'
        return _Report("setting", message(what, want="the call behind a guard, at the end of the script", fix=fix))
    if code < 0:
        name = signal.Signals(-code).name
        kind = "exit" if is_first or name not in ("SIGTERM", "SIGKILL") else "ended"
        return _Report(kind, f"it was ended by {name}{' (no memory?)' if name == 'SIGKILL' else ''}")
    return _Report("exit", f"it ended with exit code {code}")


# Checks before the start.


def _check(main: Any, processes: Any, timeout: Any) -> None:
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)  # a spawned process imports the calling script: the parent prints one message for all
    if not callable(main):
        raise SettingError(
            f"launch({main!r}): that is no function",
            want="the function itself, and its arguments after it",
            fix="launch(main, processes=2), not launch(main(), ...)",
        )
    check_whole(processes, f"launch(processes={processes!r})")
    if timeout is not None:
        check_number(timeout, f"launch(timeout={timeout!r})", above=0, what="seconds, a number")
    if processes == 1:
        return
    if not torch.distributed.is_available():
        raise SettingError("launch: this torch is built without torch.distributed", fix="processes=1")
    if have := _membership():
        raise SettingError(
            "launch: this is one of several processes already", have=have, fix="call main() directly here"
        )
    if multiprocessing.current_process().daemon:
        raise SettingError(
            "launch: called in a worker process, which may start none", fix="call it in the main process"
        )


def _membership() -> str:
    """Return a text such as "rank 1 of 4, by torchrun" if this is one of several processes, else ""."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return f"a process group of {torch.distributed.get_world_size()} processes"
    try:
        place = read_environment()
    except SettingError:
        if not is_shell_of_slurm():
            raise
        return ""  # `launch` may start ranks here
    return f"rank {place.rank} of {place.size}, by {place.launcher}" if place is not None else ""


def _start_method(main: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """Return "spawn" and the pickled function if new processes can import it, else "fork" and the function.

    Raises SettingError if neither can work.
    """
    sent, why_not = b"", ""
    try:
        sent = pickle.dumps((main, args))
        if b"__main__" in sent and not _main_can_be_imported():
            name = getattr(main, "__qualname__", repr(main))
            why_not = f"{name} or what it is given was written in a notebook or at a prompt, not in a file"
    except Exception as error:  # whatever a user's own __reduce__ raises
        why_not = f"{type(error).__name__}: {error}"
    if not why_not:
        return "spawn", sent
    if in_the_way := _against_fork():
        raise SettingError(
            "launch: this function can be brought into no other process",
            have=f"new ones cannot import it: {why_not}\n        and this one cannot be copied: {in_the_way}",
            fix="put the function and what it uses into a file of its own, import it from there, give it what it "
            "needs as arguments; or call launch before anything touches the GPU",
        )
    return "fork", (main, args)


def _main_can_be_imported() -> bool:
    """Whether a new process can run the file or module that is `__main__` here."""
    module = sys.modules["__main__"]
    if getattr(module, "__spec__", None) is not None:
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and os.path.isfile(file) and not hasattr(sys, "ps1")


def _against_fork() -> str:
    """Return why this process cannot be forked; "" if it can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return f"{sys.platform} has no fork"
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_initialized():
            return f"{kind.upper()} is in use here already, and a copy could not use it"
    if threading.current_thread() is not threading.main_thread():
        return f"launch was called in the thread {threading.current_thread().name!r}, not in the main one"
    others = [thread.name for thread in threading.enumerate() if _is_missed_in_a_copy(thread)]
    return f"threads run that it would lack: {', '.join(others)}" if others else ""


def _is_missed_in_a_copy(thread: threading.Thread) -> bool:
    """Whether a forked process would lack a thread that it needs. Daemons and idle pool threads do not count."""
    if thread is threading.main_thread() or thread.daemon:
        return False
    pools = sys.modules.get("concurrent.futures.thread")
    return pools is None or thread not in pools._threads_queues


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that end a run. Ranks inherit the mask; `_leave_terminal` unblocks the signals there."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _raised_signals() -> Iterator[None]:
    """Raise Stopped on SIGTERM and SIGUSR1, as Ctrl-C raises KeyboardInterrupt, unless the user has set a handler."""

    def stop(number: int, _: Any) -> None:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)  # only the first signal counts, as in a `fit`
        raise Stopped(number, signal.Signals(number).name)

    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in ENDING if in_main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, stop)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


# Code that runs in the process of a rank.


def _run_rank(rank: int, job: _Job) -> None:
    """Run the function as one rank, and write its report."""
    report_file = job.folder / str(rank)
    _leave_terminal(forked=not isinstance(job.sent, bytes))
    _set_environment(_port(job.folder / "port"), rank, job.size)
    peer_watch.report_exit = lambda text: _write(report_file, pickle.dumps(_Report("named", text)))
    report = _call(job.sent, rank)
    _write(report_file, pickle.dumps(report))
    if report.kind != "value":  # a thread that waits for a failed peer may never return
        limit = threading.Timer(FAILURE_GRACE, os._exit, [1])
        limit.daemon = True
        limit.start()
    start.leave()
    if report.kind != "value":
        sys.exit(1)


def _leave_terminal(*, forked: bool) -> None:
    """Detach from the terminal. The parent forwards Ctrl-C; a rank must not receive it from the terminal as well."""
    if hasattr(os, "setsid"):
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # discard a SIGINT that is pending since the start
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if forked or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does; OpenMP in a forked process waits for threads that it lacks


def _port(file: Path) -> int:
    """Wait for the port of the parent's store; exit if the parent exits first."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not file.exists():
        parent.join(0.01)
        if not parent.is_alive():
            sys.exit(1)
    return int(file.read_bytes())


def _set_environment(port: int, rank: int, size: int) -> None:
    """Set the variables that torchrun sets; the parent hosts the store, as torchrun's agent does."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if os.path.isdir("/sys/class/net/lo"):  # spares gloo the lookup of this machine's host name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _call(sent: Any, rank: int) -> _Report:
    """Call the function; return a report with its value (rank 0 only) or its error."""
    try:
        main, args = pickle.loads(sent) if isinstance(sent, bytes) else sent
    except Exception as error:  # whatever an import of the user's raises
        what = "launch: the new processes cannot import the function"
        fix = "put it into a file that can be imported, and not under `if __name__ == ...`"
        return _Report("setting", message(what, have=first_line(error), fix=fix, where=False), traceback.format_exc())
    value = None
    try:
        value = main(*args)
    except SystemExit as error:
        if error.code:
            return _Report("error", first_line(error), traceback.format_exc())
    except DistributedError as error:
        return _Report("named", str(error), traceback.format_exc())
    except BaseException as error:
        kind = "follows" if peer_watch.of_the_group(error) else "error"
        return _Report(kind, first_line(error), traceback.format_exc())
    try:
        return _Report("value", value=pickle.dumps(value if rank == 0 else None))
    except Exception as error:  # whatever a user's own __reduce__ raises
        want = "what can be pickled: numbers, text, tensors, None, lists and dicts of these"
        what = f"launch: the value of the first process cannot be sent back, a {type(value).__name__}"
        fix = "return result.history, trainer.model.state_dict(), or a dict of plain numbers"
        return _Report("setting", message(what, have=first_line(error), want=want, fix=fix, where=False))


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically: another process reads the complete content or finds no file."""
    file.with_suffix(".tmp").write_bytes(content)
    file.with_suffix(".tmp").replace(file)
