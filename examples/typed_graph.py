# SPDX-License-Identifier: Apache-2.0
"""Women and the events that they attended, two types of nodes: PyG's HeteroData, a model made by ``to_hetero``.

    python examples/typed_graph.py [FOLDER]

The network is that of A. Davis, B. Gardner and M. Gardner (Deep South, 1941), as networkx has it; `tools/bench_types`
trains on 5M edges of four types in an eighth of what they take.
"""

import sys
import tempfile
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero

import ooc

GROUPS = 2


def women_and_events() -> HeteroData:
    """18 women and 14 events, each known by its number; of two groups of women, as most studies divide
    them, the first nine are one."""
    graph = nx.davis_southern_women_graph()
    women, events = ({name: at for at, name in enumerate(graph.graph[kind])} for kind in ("top", "bottom"))
    there = torch.tensor([(women[one], events[event]) for one, event in graph.edges(women)]).T
    data = HeteroData()
    data["woman"].x, data["event"].x = torch.eye(len(women)), torch.eye(len(events))
    data["woman"].y = (torch.arange(len(women)) >= 9).long()
    data["woman", "attended", "event"].edge_index = there
    data["event", "attended_by", "woman"].edge_index = there.flip(0)
    return data


class Sage(torch.nn.Module):
    """A homogeneous model; ``to_hetero`` gives each type of edges a convolution of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 32), SAGEConv((-1, -1), GROUPS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """[N, F] → [N, groups]."""
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def main(folder: Path) -> None:
    """Train in ``folder``, and print how far the trained model's logits in PyG are from those that are predicted."""
    torch.manual_seed(0)
    data = women_and_events()
    model = to_hetero(Sage(), data.metadata())
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)  # now its layers know their widths
    store = ooc.convert(data, folder / "women.ooc", split="random:0")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ooc.Trainer(model, store, memory="64M", optimizer=optimizer, spill_dir=folder) as trainer:
        records = trainer.fit(epochs=20)
        predicted = trainer.predict()
    with torch.no_grad():
        logits = model.eval()(data.x_dict, data.edge_index_dict)["woman"]
    print(f"accuracy on test women: {records[-1].test_score:.3f}")
    print(f"logits differ from PyG's by {float((predicted - logits).abs().max()):.0e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
