"""Settings of a process: the facts are those of this one, and a setting is tried in processes that run a script."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainwright.base.errors import SettingError
from trainwright.runtime import cores
from trainwright.tools import cpu
from trainwright.tools.cpu import CpuFacts, Setting, cpu_facts, measure_settings, settings_to_try

FACTS = CpuFacts(
    cores=8, physical=4, sockets=2, threads=8, interop_threads=4, openmp="libgomp", allocator="the system's",
    vectors="AVX512", mkldnn=True, bf16=True, amx=True,
)  # fmt: skip
FAST = Setting(name="fast", how="FAST=1", environment={"FAST": "1"})
SLOW = Setting(name="slow", how="SLOW=1", environment={"SLOW": "1"})
OWN = 'import os; print("seconds", 0.5 if "FAST" in os.environ else 4.0 if "SLOW" in os.environ else 1.0)'


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_facts_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    facts = cpu_facts()
    assert facts.threads == torch.get_num_threads() == 1
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.environment["KMP_BLOCKTIME"] == "1" and "PATH" not in facts.environment
    assert facts.to_dict()["mkldnn"] == torch.backends.mkldnn.is_available()


def test_a_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "_quota", lambda: 2.5)
    assert cpu_facts().cores == 2
    monkeypatch.setattr(cores, "_quota", lambda: None)
    assert cpu_facts().cores == 8


def test_settings_are_chosen_by_the_machine() -> None:
    named = {one.name: one for one in settings_to_try(FACTS)}
    assert named["1 thread"].environment == {"OMP_NUM_THREADS": "1"}
    assert {"2 threads", "4 threads", "1 interop thread", "glibc keeps its memory", "one socket"} <= set(named)
    assert named["threads bound to cores"].environment == {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    intel = {one.name: one for one in settings_to_try(replace(FACTS, openmp="libiomp5"))}
    assert intel["threads bound to cores"].environment["KMP_BLOCKTIME"] == "1"
    lone = {one.name for one in settings_to_try(replace(FACTS, cores=1, physical=1, threads=1, interop_threads=1))}
    assert not any("thread" in name for name in lone)


def test_what_is_set_already_is_not_tried_again() -> None:
    huge = replace(FACTS, environment={"THP_MEM_ALLOC_ENABLE": "1"})
    assert "huge pages" not in {one.name for one in settings_to_try(huge)}
    preloaded = {one.name for one in settings_to_try(replace(FACTS, allocator="jemalloc"))}
    assert preloaded.isdisjoint({"glibc keeps its memory", "jemalloc", "tcmalloc"})


def test_an_allocator_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    named = {one.name: one for one in settings_to_try(FACTS)}
    assert "apt install libjemalloc2" in named["jemalloc"].why_not
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.2")
    found = {one.name: one for one in settings_to_try(FACTS)}["jemalloc"]
    assert found.environment["LD_PRELOAD"].startswith("libjemalloc.so.2") and "MALLOC_CONF" in found.environment


@pytest.mark.slow
def test_the_scripts_own_seconds_are_compared_as_medians_of_ratios(tmp_path: Path) -> None:
    missing = replace(FAST, name="missing", why_not="it is not installed")
    lost, fast, slow = measure_settings(script(tmp_path, OWN), [missing, FAST, SLOW], seconds=1.5)
    assert lost.speedup is None
    assert (fast.speedup, fast.spread, slow.speedup) == (2.0, (2.0, 2.0), 0.25)
    assert fast.trials >= 2 and not fast.why_not


def test_what_is_told_is_the_median() -> None:
    told = cpu._told(FAST, [1.0, 8.0, 2.0, 4.0, 3.0], "")
    assert (told.speedup, told.spread, told.trials) == (3.0, (2.0, 4.0), 5)


@pytest.mark.slow
def test_without_a_line_of_its_own_the_whole_process_is_timed(tmp_path: Path) -> None:
    text = 'import os, time; time.sleep(0.05 if "FAST" in os.environ else 0.5)'
    (fast,) = measure_settings(script(tmp_path, text), [FAST], seconds=3)
    assert fast.speedup is not None and fast.speedup > 1.5


@pytest.mark.slow
def test_interop_threads_are_set_before_the_script_begins_which_finds_its_name_and_arguments(tmp_path: Path) -> None:
    text = (
        "import os, sys, torch, beside\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['a'] and os.path.basename(sys.argv[0]) == 'train.py'\n"
        "print('seconds', torch.get_num_interop_threads())\n"
    )
    (tmp_path / "beside.py").write_text("")
    one = Setting(name="interop", how="", interop_threads=7, environment={})
    took = cpu._run([str(script(tmp_path, text)), "a"], one, limit=60)
    assert took == 7.0


def test_what_fails_or_hangs_with_a_setting_alone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SLOWEST", 2.0)
    text = (
        'import os, time\nif "FAST" in os.environ: raise ValueError("not so")\n'
        'if "SLOW" in os.environ: time.sleep(60)\nprint("seconds 1")'
    )
    begun = time.perf_counter()
    fast, slow = measure_settings(script(tmp_path, text), [FAST, SLOW], seconds=20)
    assert fast.why_not == "ValueError: not so" and slow.why_not.startswith("it took longer than")
    assert time.perf_counter() - begun < 15


def test_what_there_is_no_time_for_and_what_cannot_be_tried_is_listed(tmp_path: Path) -> None:
    missing = replace(FAST, name="missing", why_not="it is not installed")
    slept = script(tmp_path, "import time; time.sleep(0.3)")
    told = measure_settings(slept, [missing, FAST], seconds=0.5)
    assert [one.why_not[:19] for one in told] == ["it is not installed", "the time was over b"]
    (alone,) = measure_settings(slept, [FAST], seconds=0.1)
    assert "the script alone takes over 0.1 s" in alone.why_not and alone.speedup is None


def test_a_script_that_is_missing_or_fails_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no such file"):
        measure_settings(tmp_path / "none.py", [FAST])
    with pytest.raises(SettingError, match="ZeroDivisionError"):
        measure_settings(script(tmp_path, "1 / 0"), [FAST])
