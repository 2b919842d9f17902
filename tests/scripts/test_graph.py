"""A graph network: batches of graphs as a dataclass, a loss over nodes, windows of unequally many nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from plain_scripts import (
    assert_near_history,
    assert_near_weights,
    assert_no_longer,
    assert_same_history,
    assert_same_weights,
    made,
)
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Trainer, accuracy, batches

EPOCHS, GRAPHS = 3, 38


@dataclass
class Graph:
    """Nodes (n, 4) with classes (n) and directed edges (2, m)."""

    x: Tensor
    edges: Tensor
    y: Tensor


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(32, 3)

    def forward(self, graph):
        hidden = torch.relu(self.first(self.gather(graph.x, graph.edges)))
        return self.second(self.gather(hidden, graph.edges))

    def gather(self, x, edges):
        return torch.cat([x, torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])], 1)


def collate(graphs):
    """One graph of several, its edges moved to where their nodes now are."""
    starts = torch.tensor([0, *[len(graph.x) for graph in graphs]]).cumsum(0)
    edges = [graph.edges + start for graph, start in zip(graphs, starts, strict=False)]
    return Graph(torch.cat([g.x for g in graphs]), torch.cat(edges, 1), torch.cat([g.y for g in graphs]))


class GraphTrainer(Trainer):
    def split(self, graph):
        return (graph,), graph.y


def by_trainer(model, train, val, accumulate=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    settings = {"metrics": {"accuracy": accuracy}, "accumulate": accumulate}
    trainer = GraphTrainer(model, optimizer, nn.CrossEntropyLoss(), **settings, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history, trainer.predict(val)


def by_hand(model, train, val, accumulate=1):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for epoch in range(EPOCHS):
        model.train()
        epoch_batches = list(train.epoch(epoch))
        for start in range(0, len(epoch_batches), accumulate):
            window = epoch_batches[start : start + accumulate]
            nodes = sum(len(graph.y) for graph in window)
            optimizer.zero_grad()
            for graph in window:
                (F.cross_entropy(model(graph), graph.y) * (len(graph.y) / nodes)).backward()
            optimizer.step()
        model.eval()
        total = hits = nodes = 0
        with torch.no_grad():
            outputs = [model(graph) for graph in val]
            for graph, output in zip(val, outputs, strict=True):
                total += F.cross_entropy(output, graph.y, reduction="sum").item()
                hits += (output.argmax(1) == graph.y).sum().item()
                nodes += len(graph.y)
        history.append({"val_loss": total / nodes, "val_accuracy": hits / nodes})
    return history, torch.cat(outputs)


def data(dtype):
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for n in range(3, 3 + GRAPHS):
        x = torch.randn(n, 4, generator=generator, dtype=dtype)
        edges = torch.randint(n, (2, 2 * n), generator=generator)
        seen = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]).sum(1)
        graphs.append(Graph(x, edges, (seen > 0).long() + (seen > 2)))
    return batches(graphs[8:], 5, shuffle=True, seed=0, collate=collate), batches(graphs[:8], 3, collate=collate)


def test_a_batch_of_graphs_is_its_plain_loop():
    ours, theirs = made(GraphNet), made(GraphNet)
    history, output = by_trainer(ours, *data(torch.float32))
    plain, outputs = by_hand(theirs, *data(torch.float32))
    assert_same_history(history, plain)
    assert_same_weights(ours, theirs)
    assert torch.equal(output, outputs)


def test_graphs_without_a_collate_function_get_the_advice_to_have_one():
    graphs = [Graph(torch.randn(3, 4), torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, dtype=torch.long))] * 6
    trainer = GraphTrainer(model := made(GraphNet), torch.optim.Adam, nn.CrossEntropyLoss(), console=False)
    with pytest.raises(TypeError, match="default_collate") as caught:
        trainer.fit(batches(graphs, 2), epochs=1)
    (note,) = caught.value.__notes__
    assert note.startswith("trainwright: ") and "each a Graph" in note
    assert re.search(r"fix +batches\(\.\.\., collate=collate\)", note)
    assert trainer.model is model and trainer.progress.updates == 0
    assert trainer.fit(batches(graphs, 2, collate=collate), epochs=1).updates == 3


def test_windows_of_graphs_are_weighed_by_nodes():
    # The Trainer divides sums by the window's nodes once, the loop means twice: the last bits differ.
    ours, theirs = made(GraphNet, dtype=torch.float64), made(GraphNet, dtype=torch.float64)
    history, _ = by_trainer(ours, *data(torch.float64), accumulate=4)
    plain, _ = by_hand(theirs, *data(torch.float64), accumulate=4)
    assert_near_history(history, plain)
    assert_near_weights(ours, theirs)


def test_a_graph_network_is_no_longer_than_its_plain_loop():
    assert_no_longer([GraphTrainer, by_trainer], [by_hand])
