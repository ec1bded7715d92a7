# SPDX-License-Identifier: Apache-2.0
"""Edges with states that go from layer to layer, as simulators on meshes have them: edges as a type of nodes.

    python examples/edge_states.py [FOLDER]

Points heat their neighbours; the network learns how warm each is after a while. Each layer computes the states of
edges anew of their own and of both ends, and the states of nodes of the sums over edges (T. Pfaff and others, "Learning
mesh-based simulation with graph networks", 2021). `tools/bench_types --model mesh` trains it on larger graphs beside
PyG.
"""

import sys
import tempfile
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SimpleConv

import ooc


def edges_as_nodes(data: Data) -> HeteroData:
    """The same graph with a row for each edge: ``edge_index[0]`` and ``edge_index[1]`` become edges ``source`` and
    ``target`` from nodes to edges, and ``into`` from edges to nodes."""
    sources, targets = data.edge_index
    edges = torch.arange(data.num_edges)
    found = HeteroData()
    for key, value in data.items():
        if key not in ("edge_index", "edge_attr"):
            found["node"][key] = value
    found["edge"].x = data.edge_attr
    found["node", "source", "edge"].edge_index = torch.stack((sources, edges))
    found["node", "target", "edge"].edge_index = torch.stack((targets, edges))
    found["edge", "into", "node"].edge_index = torch.stack((edges, targets))
    return found


class Mesh(nn.Module):
    """Encodes nodes and edges, goes over the edges ``layers`` times, decodes the nodes."""

    def __init__(self, features: int, edge_features: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.nodes, self.edges = perceptron(features, hidden), perceptron(edge_features, hidden)
        self.of_edges = nn.ModuleList(perceptron(3 * hidden, hidden) for _ in range(layers))
        self.of_nodes = nn.ModuleList(perceptron(2 * hidden, hidden) for _ in range(layers))
        self.out = nn.Linear(hidden, outputs)
        self.sum = SimpleConv(aggr="sum")

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        """Rows of nodes [N, F] and of edges [E, D] -> [N, outputs]."""
        x, e = self.nodes(x_dict["node"]), self.edges(x_dict["edge"])
        for edges, nodes in zip(self.of_edges, self.of_nodes, strict=True):
            x_source = self.sum((x, e), edge_index_dict["node", "source", "edge"])  # x[edge_index[0]]
            x_target = self.sum((x, e), edge_index_dict["node", "target", "edge"])  # x[edge_index[1]]
            e = e + edges(torch.cat((e, x_source, x_target), dim=-1))
            added = self.sum((e, x), edge_index_dict["edge", "into", "node"])  # scatter(e, edge_index[1])
            x = x + nodes(torch.cat((x, added), dim=-1))
        result: Tensor = self.out(x)
        return result


def perceptron(inputs: int, hidden: int) -> nn.Sequential:
    """Two linear maps and a norm."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.LayerNorm(hidden))


def heated(steps: int = 20) -> Data:
    """300 points of which neighbours conduct heat, the better the nearer; x is how warm they are, y after ``steps``."""
    graph = nx.random_geometric_graph(300, 0.1, seed=0).to_directed()
    positions = torch.tensor([graph.nodes[node]["pos"] for node in graph])
    edge_index = torch.tensor(list(graph.edges)).T
    lengths = (positions[edge_index[0]] - positions[edge_index[1]]).norm(dim=1, keepdim=True)
    x = torch.sin(6 * positions).prod(dim=1, keepdim=True)
    y = x
    for _ in range(steps):
        flow = 0.4 * (0.1 - lengths) * (y[edge_index[0]] - y[edge_index[1]])
        y = y.index_add(0, edge_index[1], flow)
    return Data(x=x, edge_index=edge_index, edge_attr=10 * lengths, y=y)


def main(folder: Path) -> None:
    """Train in ``folder``, and print how far the trained model's results in PyG are from those that are predicted."""
    torch.manual_seed(0)
    data = edges_as_nodes(heated())
    model = Mesh(features=1, edge_features=1, hidden=32, layers=3, outputs=1)
    store = ooc.convert(data, folder / "mesh.ooc", task="values", split="random:0")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    with ooc.Trainer(model, store, memory="64M", loss=nn.MSELoss(), optimizer=optimizer, spill_dir=folder) as trainer:
        records = trainer.fit(epochs=20)
        predicted = trainer.predict()
    with torch.no_grad():
        there = model(data.x_dict, data.edge_index_dict)
    print(f"loss {records[0].loss:.3f}, after 20 epochs {records[-1].loss:.4f}")
    print(f"results differ from PyG's by {float((predicted - there).abs().max()):.0e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
