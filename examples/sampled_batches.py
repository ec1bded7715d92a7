# SPDX-License-Identifier: Apache-2.0
"""A PyG training loop over sampled mini-batches, read out of core, and scored on the full graph at the end.

    python examples/sampled_batches.py [FOLDER]

``ooc.NeighborLoader`` stands where PyG's would; the rest is as in any PyG script.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn.models import GraphSAGE

import ooc

SOURCE = "synthetic:nodes=20000,edges=200000,features=64,classes=8,train=0.1"


def main(folder: Path) -> None:
    """Make a store in ``folder``, train on it by batches, and print how good the model is."""
    store = ooc.convert(SOURCE, folder / "small.ooc")
    torch.manual_seed(0)
    model = GraphSAGE(store.num_features, 64, num_layers=2, out_channels=store.num_classes, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with ooc.NeighborLoader(store, [10, 10], batch_size=256, input_nodes="train", shuffle=True, memory="32M") as loader:
        for epoch in range(3):
            total = 0.0
            for batch in loader:
                hops = batch.num_sampled_nodes, batch.num_sampled_edges  # each layer computes what later ones read
                logits = model(
                    batch.x, batch.edge_index, num_sampled_nodes_per_hop=hops[0], num_sampled_edges_per_hop=hops[1]
                )[: batch.batch_size]
                loss = F.cross_entropy(logits, batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * batch.batch_size
            print(f"epoch {epoch + 1}: loss {total / store.split_sizes['train']:.4f}")
    with ooc.Trainer(model, store, memory="96M", optimizer=optimizer) as trainer:
        print(f"accuracy on the full graph: {trainer.evaluate()['test_score']:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
