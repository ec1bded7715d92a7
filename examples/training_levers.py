# SPDX-License-Identifier: Apache-2.0
"""The levers of a training by their usual names, and the mean of several seeds: docs/training.md has all of them.

    python examples/training_levers.py [FOLDER]

One of these changes the numbers, bfloat16 in products (and so would ``spill_dtype``, for what waits between passes).
Memory, the optimizer's state on the SSD, and what is computed again in the backward pass change nothing but time.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

import ooc

CLASSES, FEATURES, HIDDEN = 4, 128, 512


def main(folder: Path) -> None:
    """Train with three seeds, each in a folder of its own, and tell what they have come to."""
    store = ooc.convert(papers(), folder / "papers.ooc", force=True)
    scores = [train(store, seed, folder / "seeds" / f"seed-{seed}") for seed in range(3)]
    mean, deviation = statistics.mean(scores), statistics.stdev(scores)
    print(f"{len(scores)} seeds, accuracy on test nodes: {100 * mean:.1f} ± {100 * deviation:.1f} %")


def train(store: ooc.Store, seed: int, run: Path) -> float:
    """One training; a run that was stopped is gone on with where its folder is there."""
    torch.manual_seed(seed)
    model = GCN(FEATURES, HIDDEN, num_layers=2, out_channels=CLASSES, dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-3)
    with ooc.Trainer(
        model,
        store,
        memory="48M",
        seed=seed,
        optimizer=optimizer,
        optimizer_state="ssd",  # of parameters of 65,536 numbers and more: the first weight here
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
        clip_norm=1.0,
        loss=torch.nn.CrossEntropyLoss(weight=balanced(store)),
        compute_dtype="bfloat16",  # products, as torch.autocast; sums, norms and weights stay in float32
        out=run,
    ) as trainer:
        trainer.fit(epochs=8, patience=5, progress=False)
        if seed == 0:  # what torch.utils.checkpoint is asked for by hand
            again = ", ".join(matrix.name for matrix in trainer.workload.recomputed) or "nothing"
            print(f"computed again in the backward pass, as the planner chose: {again}")
            print(f"of the optimizer's state on the SSD: {sum_of_files(run / 'optimizer') / 1e6:.1f} MB")
        return trainer.evaluate()["test_score"] or 0.0


def balanced(store: ooc.Store) -> Tensor:
    """scikit-learn's weights of classes, n / (C n_c)."""
    counts = torch.bincount(torch.from_numpy(store.array("y").read()), minlength=CLASSES)
    return counts.sum() / (CLASSES * counts.float())


def sum_of_files(folder: Path) -> int:
    """Bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def papers() -> Data:
    """A graph in which most neighbours are of one class, and some classes are rare."""
    numbers = torch.Generator().manual_seed(0)
    nodes, edges = 3_000, 30_000
    y = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), nodes, replacement=True, generator=numbers)
    order = y.argsort()
    source = torch.randint(0, nodes, (edges,), generator=numbers)
    near = (source + torch.randint(1, 100, (edges,), generator=numbers)) % nodes
    x = torch.randn(nodes, FEATURES, generator=numbers) + torch.nn.functional.one_hot(y, FEATURES)
    part = torch.rand(nodes, generator=numbers)
    masks = {"train_mask": part < 0.5, "val_mask": (part >= 0.5) & (part < 0.7), "test_mask": part >= 0.7}
    return Data(x=x, y=y, edge_index=torch.stack((order[source], order[near])), **masks)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
