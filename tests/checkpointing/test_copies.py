"""The memory of background saving: touched ahead, reused, never allocated twice, and exact."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing import writer
from trainwright.checkpointing.format import encode, load_tree
from trainwright.checkpointing.tensorfile import TAGS, Contents
from trainwright.checkpointing.writer import ALIGNMENT, Memory, memory_needs

MIB = 1 << 20


def files_of(*tensors):
    return {
        "a.safetensors": Contents({str(n): tensor for n, tensor in enumerate(tensors)}, {"of": "a"}),
        "a.json": b"{}",
    }


def tensors_of(files):
    return [
        tensor for content in files.values() if not isinstance(content, bytes) for tensor in content.tensors.values()
    ]


def faults():
    """Pages that the system has given this thread anew so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_copies_hold_the_values_of_every_dtype_layout_and_shape():
    tensors = [torch.arange(0, 12).to(dtype) if dtype.itemsize > 1 or dtype == torch.bool else
               torch.arange(12, dtype=torch.uint8).view(dtype) for dtype in TAGS]  # fmt: skip
    tensors += [torch.tensor(3.5), torch.empty(0, 4), torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4)[:, 1:, ::2]]
    tensors += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(3, requires_grad=True)]
    tensors += [
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor([float("nan"), -0.0]),
        torch.ones(2).expand(5, 2),
    ]
    files = files_of(*tensors)
    for reserved in (0, memory_needs(files)[0] // 2, memory_needs(files)[0]):  # none, not enough, enough
        arena = Memory()
        arena.reserve(reserved)
        copied = arena.copy(files)
        assert copied["a.json"] == b"{}" and copied["a.safetensors"].metadata == {"of": "a"}
        for tensor, copy in zip(tensors, tensors_of(copied), strict=True):
            assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            assert copy.is_contiguous() and not copy.requires_grad and copy.data_ptr() % ALIGNMENT == 0
            raw = [one.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for one in (tensor, copy)]
            assert torch.equal(*raw)
        assert arena.used == memory_needs(files)[0]


def test_copies_share_no_memory_with_their_originals():
    weight, array = torch.ones(5), np.ones(3)
    arena, files = Memory(), encode({"model": {"w": weight}, "state": {"array": array}})
    arena.reserve(memory_needs(files)[0])
    copied = arena.copy(files)
    weight.zero_()
    array[:] = 0
    assert all(tensor.view(torch.uint8).any() for tensor in tensors_of(copied))


def test_ties_and_views_are_restored_from_the_copies(tmp_path):
    base = torch.arange(12.0)
    tied = nn.Linear(4, 4)
    model = nn.Sequential(tied, tied)
    tree = {
        "model": model.state_dict(),
        "state": {"base": base, "view": base[2:8].view(2, 3), "turned": base.view(3, 4).t()},
    }
    arena = Memory()
    path = commits.commit(
        tmp_path, arena.copy(encode(tree)),
        manifest={"run": "r", "update": 1, "epoch": 0, "metrics": {}},
    )  # fmt: skip
    back = load_tree(path)
    state = back["state"]
    state["base"][2] = 70.0
    assert state["view"][0, 0] == 70.0 == state["turned"][2, 0] and state["turned"].stride() == (1, 4)
    assert back["model"]["0.weight"] is back["model"]["1.weight"]


def test_the_memory_is_reused_and_freed_before_a_larger_block_is_allocated(monkeypatch):
    arena, files = Memory(), files_of(torch.ones(1000))
    arena.reserve(memory_needs(files)[0])
    first = [tensor.data_ptr() for tensor in tensors_of(arena.copy(files))]
    assert [tensor.data_ptr() for tensor in tensors_of(arena.copy(files))] == first
    arena.reserve(10)  # less is there already
    assert [tensor.data_ptr() for tensor in tensors_of(arena.copy(files))] == first
    sizes = []
    allocate = writer._host_memory
    monkeypatch.setattr(writer, "_host_memory", lambda size: (sizes.append((size, arena.size)), allocate(size))[1])
    arena.reserve(3 * MIB)
    assert sizes == [(3 * MIB, 0)] and arena.size == 3 * MIB


def test_only_tensors_that_do_not_fit_are_allocated_on_demand(monkeypatch):
    arena = Memory()
    arena.reserve(MIB)
    sizes = []
    allocate = writer._host_memory
    monkeypatch.setattr(writer, "_host_memory", lambda size: (sizes.append(size), allocate(size))[1])
    grown = files_of(torch.ones(MIB // 8), torch.ones(MIB // 4), torch.ones(16))
    copied = arena.copy(grown)
    assert sizes == [MIB + 64] and arena.used == MIB // 2 + MIB + 64
    assert all(tensor.eq(1).all() for tensor in tensors_of(copied))
    arena.reserve(arena.used)
    arena.copy(grown)
    assert sizes == [MIB + 64, arena.used]


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="this system does not count the faults of a thread")
def test_a_copy_into_reserved_memory_finds_every_page_there():
    source = files_of(*(torch.ones(MIB) for _ in range(4)))  # 16 MiB: 4096 pages
    arena = Memory()
    arena.reserve(memory_needs(source)[0])
    before = faults()
    arena.copy(source)
    assert faults() - before < 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_workers_do_not_inherit_the_memory():
    source = files_of(*(torch.ones(MIB) for _ in range(4)))
    arena = Memory()
    arena.reserve(memory_needs(source)[0])
    arena.copy(source)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        del arena, source  # frees nothing that is not its own
        os.read(read, 1)
        os._exit(0)
    before = faults()
    arena.copy(source)
    after = faults()
    os.close(write)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert after - before < 1000  # of 4096 pages; the tensors' own are only read


def test_memory_that_the_system_does_not_have_is_an_error_of_the_system():
    with pytest.raises(OSError):
        Memory().reserve(1 << 60)


@pytest.mark.gpu
def test_tensors_of_a_device_are_copied_into_pinned_memory_of_the_boundary():
    tensor = torch.ones(4 * MIB, device="cuda")
    files = files_of(tensor, torch.ones(3), torch.ones(8, 8, device="cuda").t())
    arena = Memory()
    arena.reserve(*memory_needs(files))
    assert arena._block.is_pinned()
    copied = arena.copy(files)
    tensor.zero_()
    assert all(copy.device.type == "cpu" and copy.eq(1).all() for copy in tensors_of(copied))
    arena.free()
