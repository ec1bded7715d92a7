# SPDX-License-Identifier: Apache-2.0
"""Data of one's own, as tables: two CSV files become a store, a model, and predictions under the tables' ids.

    python examples/own_data.py [FOLDER]

``nodes.csv`` has an id, numbers that are features, a label and three columns that say which split a node is in;
``edges.csv`` has two ids a row. The same in the shell:

    ooc convert FOLDER/tables tables.ooc --symmetrize
    ooc train tables.ooc --model gcn --epochs 20 --out run
    ooc predict run --out labels.csv
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.nn.models import GCN

import ooc

NODES, EDGES, CLASSES = 3_000, 15_000, 4


def make_tables(folder: Path) -> None:
    """Papers of four fields that cite mostly within their field; ids are whole numbers with gaps."""
    random = np.random.default_rng(0)
    folder.mkdir()
    ids = random.permutation(10 * NODES)[:NODES]
    label = random.integers(CLASSES, size=NODES)
    split = random.choice(3, size=NODES, p=[0.5, 0.2, 0.3])
    words = random.normal(size=(NODES, 3)) + label[:, None]
    with (folder / "nodes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "a", "b", "c", "label", "train", "val", "test"])
        for node in range(NODES):
            masks = [str(split[node] == k).lower() for k in range(3)]
            rows.writerow([ids[node], *(f"{value:.3f}" for value in words[node]), label[node], *masks])
    source = random.integers(NODES, size=EDGES)
    of_label = [np.flatnonzero(label == k) for k in range(CLASSES)]
    target = np.array([random.choice(of_label[label[node]]) for node in source])
    with (folder / "edges.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["src", "dst"])
        rows.writerows(zip(ids[source], ids[target], strict=True))


def main(folder: Path) -> None:
    """Make the tables, convert them, train, predict."""
    torch.manual_seed(0)
    make_tables(folder / "tables")
    store = ooc.convert(folder / "tables", folder / "tables.ooc", symmetrize=True)
    print(f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, {store.num_features} features, splits", end=" ")
    print(", ".join(f"{name} {size:,}" for name, size in store.split_sizes.items()))
    model = GCN(store.num_features, 16, num_layers=2, out_channels=store.num_classes, dropout=0.2)
    with ooc.Trainer(model, store, memory="64M", seed=1, spill_dir=folder) as trainer:
        last = trainer.fit(epochs=20)[-1]
        print(f"test accuracy {last.test_acc:.3f}")
        trainer.predict("labels", out=folder / "labels.csv")
    print(*(folder / "labels.csv").read_text().splitlines()[:4], sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
