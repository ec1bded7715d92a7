# SPDX-License-Identifier: Apache-2.0
"""The algebraic connectivity of all graphs of up to seven nodes, by a transformer whose attention knows how far
apart two nodes are.

    python examples/many_graphs.py [FOLDER]

Any module that takes ``x``, ``edge_index`` and ``batch`` and gives a row a graph can be trained so; this one is plain
torch with two helpers of PyG's. Attention is dense within a graph, with a bias by the length of the shortest path.
The graphs are those of Read and Wilson's atlas, as networkx has them; `tools/bench_graphs` trains on 100,000.
"""

import sys
import tempfile
from pathlib import Path

import networkx as nx
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import to_dense_adj, to_dense_batch

import ooc

HEADS, HOPS = 4, 3


def atlas() -> list[Data]:
    """All graphs of one to seven nodes, these with their degrees one-hot; ``y`` is the second smallest eigenvalue of
    the Laplacian, 0 where a graph falls apart."""
    found = []
    for graph in nx.graph_atlas_g()[1:]:  # the first has no nodes
        near = torch.from_numpy(nx.to_numpy_array(graph)).float()
        degrees = near.sum(dim=1)
        spectrum = torch.linalg.eigvalsh((degrees.diag() - near).double())
        y = spectrum[1 if len(spectrum) > 1 else 0].float().view(1, 1)
        found.append(Data(x=F.one_hot(degrees.long(), 7).float(), edge_index=near.nonzero().T, y=y))
    return found


class StructuralTransformer(nn.Module):
    """Layers of attention and a perceptron on rows [graphs, nodes, ``hidden``], and their mean over a graph."""

    def __init__(self, in_channels: int, hidden: int, out_channels: int, layers: int = 2) -> None:
        super().__init__()
        self.lin_in, self.lin_out = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        self.bias = nn.Embedding(HOPS + 2, HEADS)
        self.attention = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.perceptron = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(layers)
        )

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        h, there = to_dense_batch(self.lin_in(x), batch, batch_size=batch_size)
        near = to_dense_adj(edge_index, batch, max_num_nodes=h.size(1), batch_size=batch_size).clamp(max=1)
        reached, hops = torch.eye(h.size(1), device=h.device).expand_as(near), torch.zeros_like(near)
        for _ in range(HOPS + 1):  # a pair is as far apart as there are numbers of hops that do not do
            hops = hops + (reached == 0)
            reached = reached + reached @ near
        bias = self.bias(hops.long()).permute(0, 3, 1, 2).masked_fill(~there[:, None, None], -torch.inf)
        for attention, perceptron in zip(self.attention, self.perceptron, strict=True):
            q, k, v = attention(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
            h = h + perceptron(h)
        return self.lin_out((h * there[..., None]).sum(1) / there.sum(1, keepdim=True))


def main(folder: Path) -> None:
    """Make a store of graphs in ``folder``, train on it, and print how good the model is."""
    store = ooc.convert(atlas(), folder / "atlas.ooc", force=True)
    torch.manual_seed(0)
    model = StructuralTransformer(store.num_features, 32, store.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    with ooc.GraphTrainer(model, store, batch_nodes=400, memory="64M", optimizer=optimizer) as trainer:
        trainer.fit(epochs=6)
        print(f"mean absolute error on test graphs: {trainer.evaluate()['test_score']:.3f}")
        print(f"predictions: {tuple(trainer.predict().shape)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
