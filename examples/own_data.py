# SPDX-License-Identifier: Apache-2.0
"""Data of one's own, as tables: papers named by texts become a store, a model, and predictions under those names.

    python examples/own_data.py FOLDER [NODES]

makes ``FOLDER/papers-csv`` and ``FOLDER/papers-parquet``: ``nodes`` with an id, two numbers, a text label and three
columns of true and false for the splits, ``edges`` with two ids and a weight. Then, in the shell and in that folder,
the same that ``main`` does here (``papers-csv`` likewise):

    ooc convert papers-parquet papers.ooc
    ooc train papers.ooc --hidden 32 --epochs 20
    ooc train papers.ooc --hidden 32 --epochs 20 --model gat
    ooc predict runs/papers-gcn-1
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from torch_geometric.nn.models import GCN

import ooc

NODES, CITATIONS, FIELDS = 20_000, 5, ("biology", "chemistry", "maths", "physics")


def make_tables(folder: Path, nodes: int = NODES) -> None:
    """Papers of four fields that mostly cite within their field, the same as CSV and as Parquet."""
    random = np.random.default_rng(0)
    called = np.array([f"paper-{number:07d}" for number in random.permutation(10 * nodes)[:nodes]])
    field = random.integers(len(FIELDS), size=nodes)
    split = random.choice(3, size=nodes, p=[0.5, 0.2, 0.3])
    papers = {
        "id": called,
        "pages": (random.normal(size=nodes) + field).round(3),
        "references": (random.normal(size=nodes) - field).round(3),
        "label": np.array(FIELDS)[field],
        "train": split == 0,
        "val": split == 1,
        "test": split == 2,
    }
    by_field = np.argsort(field, kind="stable")
    first = np.searchsorted(field[by_field], range(len(FIELDS) + 1))
    source = np.repeat(np.arange(nodes), CITATIONS)
    within = random.integers(first[field[source]], first[field[source] + 1])
    target = np.where(random.random(len(source)) < 0.8, by_field[within], random.integers(nodes, size=len(source)))
    citations = {"src": called[source], "dst": called[target], "weight": random.random(len(source)).round(3)}
    for name, columns in (("nodes", papers), ("edges", citations)):
        write_csv(folder / "papers-csv" / f"{name}.csv", columns)
        write_parquet(folder / "papers-parquet" / f"{name}.parquet", columns)


def write_csv(path: Path, columns: dict[str, np.ndarray]) -> None:
    """``columns`` by name, with a heading."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def write_parquet(path: Path, columns: dict[str, np.ndarray]) -> None:
    """The same in Parquet, for which pyarrow is needed."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def main(folder: Path, nodes: int = 2_000) -> None:
    """Make the tables, convert those in Parquet, train, predict."""
    make_tables(folder, nodes)
    store = ooc.convert(folder / "papers-parquet", folder / "papers.ooc")
    print(f"{store.num_nodes:,} nodes, {store.num_edges:,} edges with weights, classes {', '.join(store.class_names)}")
    torch.manual_seed(0)
    model = GCN(store.num_features, 16, num_layers=2, out_channels=store.num_classes, dropout=0.2)
    with ooc.Trainer(model, store, memory="64M", seed=1, spill_dir=folder) as trainer:
        last = trainer.fit(epochs=20)[-1]
        print(f"test accuracy {last.test_score:.3f}")
        trainer.predict("labels", out=folder / "labels.csv")
    print(*(folder / "labels.csv").read_text().splitlines()[:4], sep="\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    Path(sys.argv[1]).mkdir(exist_ok=True)
    make_tables(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
