# SPDX-License-Identifier: Apache-2.0
"""A PyG model of one's own, with a layer and a loss of one's own, trained in less memory than its data.

    python examples/own_model.py [FOLDER]

Nothing in the model knows of ``ooc``. After training, its weights are loaded into plain PyG, which gives the same
logits on the whole graph in memory.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, MessagePassing, SAGEConv

import ooc


class GatedConv(MessagePassing):  # type: ignore[misc]  # PyG is not typed
    """Messages that both ends of an edge gate: sum over j of sigmoid(a x_i + b x_j) * x_j."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="sum")
        self.target, self.source = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """x [N, H], edge_index [2, E] -> [N, H]."""
        return self.propagate(edge_index, x=x, a=self.target(x), b=self.source(x))  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, a_i: Tensor, b_j: Tensor) -> Tensor:
        """One message an edge, [E, H]."""
        return torch.sigmoid(a_i + b_j) * x_j


class Model(nn.Module):
    """Three layers of three kinds, with a norm and a residual between them. It gives logits and what they came of."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.gated = GatedConv(hidden)
        self.last = GCNConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, F], edge_index [2, E] -> logits [N, C], rows [N, H]."""
        h = F.relu(self.norm(self.first(x, edge_index)))
        h = h + F.dropout(self.gated(h, edge_index), 0.2, self.training)
        return self.last(h, edge_index), h


def loss_of_both(results: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Cross-entropy, and a little for large rows: a number a node, [r]."""
    logits, rows = results
    return F.cross_entropy(logits, labels, reduction="none") + 1e-3 * rows.square().mean(dim=1)


def main(folder: Path) -> None:
    """Convert a made-up graph, train on it, compare with PyG."""
    torch.manual_seed(0)
    store = ooc.convert("synthetic:nodes=5000,edges=50000,features=32,classes=8", folder / "own_model.ooc", force=True)
    model = Model(store.num_features, 32, store.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ooc.Trainer(model, store, memory="16M", optimizer=optimizer, loss=loss_of_both, spill_dir=folder) as trainer:
        trainer.fit(epochs=5)
        logits = trainer.predict()

    plain = Model(store.num_features, 32, store.num_classes)
    plain.load_state_dict(model.state_dict())
    x, edge_index = graph_in_memory(store)
    with torch.no_grad():
        difference = (plain.eval()(x, edge_index)[0] - logits).abs().max().item()
    print(f"logits differ from PyG's by {difference:.1e} at most")


def graph_in_memory(store: ooc.Store) -> tuple[Tensor, Tensor]:
    """The whole graph as PyG takes it: x [N, F] and edge_index [2, E]."""
    x = torch.from_numpy(store.array("x").read()).float()
    indptr, sources = (torch.from_numpy(array.read()).long() for array in store.topology("in"))
    targets = torch.repeat_interleave(torch.arange(store.num_nodes), indptr.diff())
    return x, torch.stack([sources, targets])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
