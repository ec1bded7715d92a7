# SPDX-License-Identifier: Apache-2.0
"""Zachary's karate club, whose members have no features: an embedding of them is trained beside the model.

    python examples/embedding.py [FOLDER]

The run's folder keeps rows and optimizer state; the rows are read back by the ids that nodes have in the source. The
network (W. Zachary, 1977) is as networkx has it; `tools/bench_embedding` trains rows that are larger than memory.
"""

import sys
import tempfile
from pathlib import Path

import networkx as nx
import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE

import ooc

COLUMNS = 16


def karate_club() -> Data:
    """34 members, who of them met outside of the club, and which of two each joined when it split."""
    graph = nx.karate_club_graph()
    edges = torch.tensor(list(graph.edges)).T
    joined = [club == "Officer" for _, club in graph.nodes(data="club")]
    return Data(edge_index=torch.cat((edges, edges.flip(0)), dim=1), y=torch.tensor(joined).long(), num_nodes=34)


def main(folder: Path) -> None:
    """Train, then see whether members of one faction have come to lie together."""
    torch.manual_seed(0)
    data = karate_club()
    store = ooc.convert(data, folder / "club.ooc", split="random:0", force=True)
    model = GraphSAGE(COLUMNS, 16, num_layers=2, out_channels=store.num_classes)
    embedding = ooc.Embedding(COLUMNS, optimizer="adam", lr=0.05, std=0.1)
    with ooc.Trainer(model, store, memory="64M", embedding=embedding, out=folder / "run") as trainer:
        records = trainer.fit(epochs=15)
        print(f"accuracy on the test members {records[-1].test_score:.2f}")
        rows = trainer.predict("embeddings", layer=0)
    directions = torch.nn.functional.normalize(rows, dim=1)
    nearest = (directions @ directions.T).fill_diagonal_(-1).argmax(dim=1)
    print(f"nearest rows of the same class: {(data.y[nearest] == data.y).double().mean():.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
