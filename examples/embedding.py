# SPDX-License-Identifier: Apache-2.0
"""A graph whose nodes have no features: an embedding of them is trained beside the model, out of core.

    python examples/embedding.py [FOLDER]

The run's folder keeps rows and optimizer state; the rows are read back by the ids that nodes have in the source.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch_geometric.nn.models import GraphSAGE

import ooc

COLUMNS = 16


def main(folder: Path) -> None:
    """Train, then see whether nodes of one class have come to lie together."""
    torch.manual_seed(0)
    store = ooc.convert("synthetic:nodes=4000,edges=80000,features=0,classes=4", folder / "bare.ooc", force=True)
    model = GraphSAGE(COLUMNS, 16, num_layers=2, out_channels=store.num_classes)
    embedding = ooc.Embedding(COLUMNS, optimizer="adam", lr=0.05, std=0.1)
    with ooc.Trainer(model, store, memory="64M", embedding=embedding, out=folder / "run") as trainer:
        records = trainer.fit(epochs=30)
        print(f"accuracy on the test nodes {records[-1].test_acc:.2f}")
        rows = trainer.predict("embeddings", layer=0)
    classes = torch.empty(store.num_nodes, dtype=torch.int64)
    classes[store.array("perm").read()] = torch.from_numpy(store.array("y").read())
    directions = torch.nn.functional.normalize(rows, dim=1)
    nearest = (directions @ directions.T).fill_diagonal_(-1).argmax(dim=1)
    print(f"nearest rows of the same class: {(classes[nearest] == classes).double().mean():.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
