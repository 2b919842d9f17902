"""Settings of a process: the facts are those of this one, and the settings are those that it has left out."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from trainwright.core import device
from trainwright.tools.cpu import CpuFacts, cpu_facts, settings_to_try

FACTS = CpuFacts(
    cores=8, physical=4, sockets=2, threads=8, interop_threads=4, openmp="libgomp", allocator="the system's",
    vectors="AVX512", mkldnn=True, bf16=True, amx=True,
)  # fmt: skip


def test_facts_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    facts = cpu_facts()
    assert facts.threads == torch.get_num_threads() == 1
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.environment["KMP_BLOCKTIME"] == "1" and "PATH" not in facts.environment
    assert facts.to_dict()["mkldnn"] == torch.backends.mkldnn.is_available()


def test_a_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(device, "_quota", lambda: 2.5)
    assert cpu_facts().cores == 2
    monkeypatch.setattr(device, "_quota", lambda: None)
    assert cpu_facts().cores == 8


def test_settings_are_chosen_by_the_machine() -> None:
    named = {one.name: one for one in settings_to_try(FACTS)}
    assert named["1 thread"].environment == {"OMP_NUM_THREADS": "1"}
    assert {"2 threads", "4 threads", "1 interop thread", "glibc keeps its memory", "one socket"} <= set(named)
    assert named["threads bound to cores"].environment == {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    intel = {one.name: one for one in settings_to_try(replace(FACTS, openmp="libiomp5"))}
    assert intel["threads bound to cores"].environment["KMP_BLOCKTIME"] == "1"
    assert all(one.how for one in named.values())
    assert "denormal numbers are slow" in named["flush denormal"].note
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
    assert "apt install libjemalloc2" in named["jemalloc"].note
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.2")
    found = {one.name: one for one in settings_to_try(FACTS)}["jemalloc"]
    assert found.environment["LD_PRELOAD"].startswith("libjemalloc.so.2") and "MALLOC_CONF" in found.environment
