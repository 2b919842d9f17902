"""The emulated graph does what a CUDA graph does: claims about recording, replay, numbers and host reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laws.emulated_graph import INVALIDATED, NOT_PERMITTED, EmulatedGraph, emulate, graph_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory of other tests' graphs to be taken."""
    monkeypatch.setattr(EmulatedGraph, "made", [])


def test_a_recording_changes_no_memory_and_draws_nothing() -> None:
    torch.manual_seed(0)
    weight, mean, list_ = torch.randn(4, requires_grad=True), torch.randn(3), [torch.ones(2), torch.ones(3)]
    before = [tensor.detach().clone() for tensor in (weight, mean, *list_)]
    state = torch.get_rng_state()

    def work() -> None:
        with torch.no_grad():
            weight[1:3].mul_(torch.rand(2))
        nn.functional.batch_norm(torch.randn(5, 3), mean, torch.ones(3), training=True)
        torch._foreach_add_(list_, 1.0)
        mean.bernoulli_()

    graph, _ = graph_of(work)
    assert all(torch.equal(a, b) for a, b in zip((weight, mean, *list_), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    graph.replay()
    assert not any(torch.equal(a, b) for a, b in zip((weight, mean, *list_), before, strict=True))


def test_memory_made_inside_holds_nothing_until_the_replay() -> None:
    given = torch.arange(4)
    graph, (real, whole, flags, bare) = graph_of(
        lambda: (given * 0.5, given + 1, given >= 0, torch.empty(3).fill_(2.0)[1:])
    )
    assert real.isnan().all() and bare.isnan().all() and (whole > 10**9).all() and flags.dtype == torch.bool
    with pytest.raises(IndexError):
        given[whole]
    graph.replay()
    assert real.tolist() == [0, 0.5, 1, 1.5] and whole.tolist() == [1, 2, 3, 4] and bare.tolist() == [2, 2]


def test_a_replay_reads_anew_and_writes_where_it_wrote() -> None:
    given, kept = torch.ones(3), torch.zeros(3)
    graph, made = graph_of(lambda: kept.add_(given * 2))
    inner_graph, inner = graph_of(lambda: given * 3)
    place = inner.data_ptr()
    for factor in (1.0, 5.0):
        given.fill_(factor)
        graph.replay()
        inner_graph.replay()
    assert made is kept and kept.tolist() == [12, 12, 12]
    assert inner.tolist() == [15, 15, 15] and inner.data_ptr() == place


def test_memory_made_inside_lives_with_the_graph() -> None:
    given = torch.ones(1000)
    graph, view = graph_of(lambda: (given * 2)[3:5])
    other = [torch.full((1000,), 7.0) for _ in range(8)]
    graph.replay()
    assert view.tolist() == [2, 2] and all(tensor[0] == 7 for tensor in other)


def test_memory_from_outside_that_was_freed_is_missed() -> None:
    given, kept = [torch.ones(3)], torch.zeros(3)
    graph, _ = graph_of(lambda: kept.add_(given[0]))
    graph_of(lambda: given[0] + kept)  # another graph keeps nothing alive either
    graph.replay()
    view = given[0][1:]
    given[0] = torch.full((3,), 5.0)
    graph.replay()
    del view
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()
    assert kept.tolist() == [2, 2, 2]


def test_memory_that_nobody_holds_is_taken_by_the_next_graph() -> None:
    given, kept, sink = torch.ones(3), torch.zeros(3), torch.zeros(3)
    made = list[Tensor]()
    first, held = graph_of(lambda: made.append(given * 2) or given * 3)
    reader, _ = graph_of(lambda: kept.copy_(made[0] + held))
    made.clear()
    other, _ = graph_of(lambda: sink.add_(given))
    for graph in (other, first, reader):
        graph.replay()
    assert kept.tolist() == [5, 5, 5]
    for graph in (first, other, reader):
        graph.replay()
    assert kept.isnan().all() and held.tolist() == [3, 3, 3] and sink.tolist() == [2, 2, 2]


def test_memory_let_go_inside_a_recording_is_read_by_it_and_lost_after_it() -> None:
    given, kept = torch.ones(3), torch.zeros(3)
    first, held = graph_of(lambda: [given * 2])
    reader, _ = graph_of(lambda: kept.copy_(held.pop()))
    for _ in range(2):
        first.replay()
        reader.replay()
        assert kept.tolist() == [2, 2, 2]
    reader.replay()
    assert kept.isnan().all()


def test_a_number_is_baked_in_and_a_tensor_is_not() -> None:
    settings = {"lr": 0.5}
    lr, one = torch.tensor(0.5), torch.ones(())
    graph, (by_number, by_tensor) = graph_of(lambda: (one * settings["lr"], one * lr))
    settings["lr"] = 4.0
    lr.fill_(4.0)
    graph.replay()
    assert (by_number.item(), by_tensor.item()) == (0.5, 4.0)


def test_each_replay_draws_anew() -> None:
    given = torch.ones(64)
    graph, (dropped, noise) = graph_of(lambda: (nn.functional.dropout(given, 0.5), torch.randn(3)))
    torch.manual_seed(3)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((dropped.clone(), noise.clone()))
    torch.manual_seed(3)
    for own, own_noise in seen:
        assert torch.equal(own, nn.functional.dropout(given, 0.5)) and torch.equal(own_noise, torch.randn(3))
    assert not torch.equal(seen[0][0], seen[1][0])


def test_gradients_are_made_by_one_graph_and_added_to_by_another() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    first, _ = graph_of(lambda: net(x).square().mean().backward())
    more, _ = graph_of(lambda: net(x).square().mean().backward())
    batches = [torch.randn(5, 3) for _ in range(3)]
    for _ in range(2):
        for graph, batch in zip((first, more, more), batches, strict=True):
            x.copy_(batch)
            graph.replay()
        seen = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    for batch in batches:
        net(batch).square().mean().backward()
    assert len(seen) == 4
    assert all(torch.equal(a, p.grad) for a, p in zip(seen, net.parameters(), strict=True) if p.grad is not None)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "array": lambda x: np.asarray(x.detach()),
    "cpu": lambda x: x.cpu(),
    "repr": repr,
    "format": lambda x: f"{x[0]:.3f}",
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "set_mask": lambda x: x.__setitem__(x > 0, torch.zeros(3)),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat": lambda x: torch.repeat_interleave(x, x.long()),
    "inverse": lambda x: torch.linalg.inv(x.diag()),
    "other_device": lambda x: x.to("meta"),
    "to_other_device": lambda x: torch.empty(3, device="meta").copy_(x),
    "sparse": lambda x: x.to_sparse(),
    "inference": lambda x: torch.inference_mode()(lambda: x.sum().item())(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_host_read_breaks_the_recording_and_nothing_else(read: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3)
    x.add_(1)
    graph, state = EmulatedGraph(CPU), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"), graph.recording():
        x.mul_(2)
        torch.rand(1)
        read(x)
    assert x.tolist() == [2, 2, 2] and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="this one is failed"):
        graph.replay()
    again, y = graph_of(lambda: x + 1)
    again.replay()
    assert y.tolist() == [3, 3, 3] and repr(y) and y.cpu().numpy().sum() == 9


def test_a_host_read_that_is_caught_still_breaks_the_recording() -> None:
    x, graph = torch.ones(2), EmulatedGraph(CPU)
    with pytest.raises(RuntimeError, match=INVALIDATED), graph.recording():
        with pytest.raises(RuntimeError, match=NOT_PERMITTED):
            x.sum().item()
        x.add_(1)
    quiet = EmulatedGraph(CPU)
    with pytest.raises(RuntimeError, match=INVALIDATED), quiet.recording(), pytest.raises(RuntimeError):
        x.tolist()
    assert x.tolist() == [1, 1]
    for broken in (graph, quiet):
        with pytest.raises(RuntimeError, match="failed"):
            broken.replay()


def test_an_error_of_the_user_leaves_the_recording() -> None:
    x, graph = torch.ones(2), EmulatedGraph(CPU)
    with pytest.raises(KeyError), graph.recording():
        x.add_(1)
        raise KeyError("own")
    assert x.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="failed"):
        graph.replay()


def test_the_state_of_the_generator_cannot_be_looked_at_and_no_other_can_draw() -> None:
    def again(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(nn.functional.dropout, x, use_reentrant=False)

    cases: list[tuple[str, Callable[[], Any]]] = [
        ("current_seed", lambda: torch.manual_seed(0)),
        ("current_seed", lambda: again(torch.ones(2, requires_grad=True))),
        ("generator", lambda: torch.rand(2, generator=torch.Generator())),
    ]
    for text, work in cases:
        with pytest.raises(RuntimeError, match=text):
            graph_of(work)
    graph, drawn = graph_of(lambda: torch.rand(2, generator=torch.default_generator))
    graph.replay()
    assert not drawn.isnan().any()


def test_other_threads_go_on_as_they_are() -> None:
    x, seen = torch.ones(2), list[Any]()

    def work() -> None:
        x.add_(1)
        seen.append((x.sum().item(), torch.ones(2).tolist(), torch.full((2,), 3.0)))

    graph = EmulatedGraph(CPU)
    with graph.recording():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen[0][:2] == (4.0, [1, 1]) and seen[0][2].tolist() == [3, 3]
    assert x.tolist() == [2, 2] and graph.recorded == 0


def test_values_of_the_host_are_baked_in_and_told() -> None:
    array, numbers, x = np.arange(2, dtype=np.float32), [1.0, 2.0], torch.zeros(2)

    def work() -> tuple[Tensor, Tensor]:
        own = torch.tensor(numbers)
        own.add_(x)
        return own, torch.from_numpy(array) + x

    graph, (own, of_array) = graph_of(work)
    assert [value.tolist() for value in graph.baked] == [[1, 2], [0, 1]] and array.tolist() == [0, 1]
    numbers[:] = [9.0, 9.0]
    array += 9
    for _ in range(2):
        x.add_(10)
        graph.replay()
    assert own.tolist() == [21, 22] and of_array.tolist() == [20, 21] and array.tolist() == [9, 10]
    assert graph_of(lambda: torch.full((2,), 1.0) + torch.ones(2))[0].baked == []


def test_python_runs_once_and_what_is_recorded_is_counted() -> None:
    net, x, calls = nn.Linear(2, 2), torch.ones(1, 2), list[int]()
    net.register_forward_hook(lambda *_: calls.append(1))
    graph, y = graph_of(lambda: net(x).view(2).neg_().unsqueeze_(0))
    assert (calls, graph.recorded, graph.replays) == ([1], 2, 0)  # addmm and neg_: a view is no op
    for _ in range(3):
        graph.replay()
    assert (calls, graph.recorded, graph.replays) == ([1], 2, 3)
    assert torch.equal(y, -net(x))


def test_a_graph_is_recorded_once_before_its_replay_and_not_inside_another() -> None:
    x, graph = torch.ones(2), EmulatedGraph(CPU)
    with pytest.raises(RuntimeError, match="this one is new"):
        graph.replay()
    done, _ = graph_of(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="recorded once"), done.recording():
        pass
    for inside in (done.replay, lambda: graph_of(lambda: x.add_(1))):
        outer = EmulatedGraph(CPU)
        with pytest.raises(RuntimeError, match="not permitted"), outer.recording():
            inside()
    done.replay()
    assert x.tolist() == [2, 2]


def test_emulate_registers_the_graph_and_counts_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.runtime import graphs

    EmulatedGraph(CPU)
    with monkeypatch.context() as patch:
        emulate(patch)
        assert EmulatedGraph.made == []
        recorder = graphs.RECORDERS["cpu"](CPU)
        assert EmulatedGraph.made == [recorder] and isinstance(recorder, EmulatedGraph)
    assert "cpu" not in graphs.RECORDERS
