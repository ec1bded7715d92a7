# SPDX-License-Identifier: Apache-2.0
"""Predicting links: a graph with some of its edges held out, trained on the others, and scored on those.

python examples/link_prediction.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN
from torch_geometric.transforms import RandomLinkSplit

import ooc

NODES, GROUPS, EDGES = 4000, 40, 30_000


def communities() -> Data:
    """A graph in which nine of ten edges stay within a group of nodes."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, GROUPS, (NODES,), generator=generator)
    members = [(group == k).nonzero().squeeze(1) for k in range(GROUPS)]
    heads = torch.randint(0, NODES, (EDGES,), generator=generator)
    tails = torch.randint(0, NODES, (EDGES,), generator=generator)
    inside = torch.rand(EDGES, generator=generator) < 0.9
    for k, nodes in enumerate(members):
        here = inside & (group[heads] == k)
        tails[here] = nodes[torch.randint(0, len(nodes), (int(here.sum()),), generator=generator)]
    edges = torch.stack((heads, tails))
    x = torch.randn(NODES, 32, generator=generator)
    return Data(x=x, edge_index=torch.cat((edges, edges.flip(0)), dim=1))


def main(folder: Path) -> None:
    """Train in ``folder``, and print how well links that were held out are told from pairs that are none."""
    torch.manual_seed(0)
    train, valid, test = RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True)(communities())
    model = ooc.LinkPredictor(GCN(32, 64, num_layers=2, out_channels=32), decoder="dot")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    links = ooc.Links.of_split(train, valid, test)
    with ooc.LinkTrainer(
        model, train, links, memory="64M", optimizer=optimizer, metric="roc-auc", spill_dir=folder
    ) as trainer:
        records = trainer.fit(epochs=10)
        print(f"area under the ROC curve of the test links: {records[-1].test_acc:.3f}")
        print(f"embeddings: {list(trainer.predict().shape)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
