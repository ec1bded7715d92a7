# SPDX-License-Identifier: Apache-2.0
"""Predictions from a run's folder: labels of all nodes, embeddings of some, and the weights for plain PyG.

    python examples/prediction.py [FOLDER]

Everything is computed on the whole graph, exactly, within the two budgets.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.nn.models import GraphSAGE

import ooc


def main(folder: Path) -> None:
    """Train into a run's folder, then predict from what it holds."""
    torch.manual_seed(0)
    store = ooc.convert("synthetic:nodes=5000,edges=50000,features=16,classes=4", folder / "graph.ooc", force=True)
    model = GraphSAGE(store.num_features, 16, num_layers=2, out_channels=store.num_classes)
    with ooc.Trainer(model, store, memory="64M", out=folder / "run", spill_dir=folder) as trainer:
        print(f"loss {trainer.fit(epochs=10)[-1].loss:.4f}")
        labels = trainer.predict("labels")
        print("nodes of each predicted class:", torch.bincount(labels, minlength=store.num_classes).tolist())
        wanted = np.array([17, 4, 2011])
        some = trainer.predict("embeddings", layer=1, nodes=wanted)
        print("embeddings of three nodes:", tuple(some.shape))
        trainer.predict("logits", out=folder / "logits.npy", force=True)
    print("all logits:", np.load(folder / "logits.npy", mmap_mode="r").shape)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
