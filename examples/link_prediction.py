# SPDX-License-Identifier: Apache-2.0
"""Who appears with whom in Les Misérables: some of the links held out, trained on the others, and scored on those.

    python examples/link_prediction.py [FOLDER]

The network is D. Knuth's (The Stanford GraphBase, 1993), as networkx has it; `tools/bench_links` trains on larger ones.
"""

import sys
import tempfile
from pathlib import Path

import networkx as nx
import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN
from torch_geometric.transforms import RandomLinkSplit

import ooc


def characters() -> Data:
    """77 characters, each known by its number, and 254 pairs of them who are in a chapter together."""
    graph = nx.convert_node_labels_to_integers(nx.les_miserables_graph())
    edges = torch.tensor(list(graph.edges)).T
    return Data(x=torch.eye(len(graph)), edge_index=torch.cat((edges, edges.flip(0)), dim=1))


def main(folder: Path) -> None:
    """Train in ``folder``, and print how well links that were held out are told from pairs that are none."""
    torch.manual_seed(0)
    train, valid, test = RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True)(characters())
    model = ooc.LinkPredictor(GCN(train.num_features, 64, num_layers=2, out_channels=32), decoder="dot")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    links = ooc.Links.of_split(train, valid, test)
    with ooc.LinkTrainer(
        model, train, links, memory="64M", optimizer=optimizer, metric="roc-auc", spill_dir=folder
    ) as trainer:
        records = trainer.fit(epochs=10)
        print(f"area under the ROC curve of the test links: {records[-1].test_score:.3f}")
        print(f"embeddings: {list(trainer.predict().shape)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
