# SPDX-License-Identifier: Apache-2.0
"""GAT on a citation graph by the protocol that it was published with, through the Python API.

Veličković et al., "Graph Attention Networks" (ICLR 2018), §3.3, and the code that goes with it
(https://github.com/PetarV-/GAT, ``execute_cora.py``), for Cora and CiteSeer alike:

- two layers: 8 heads of 8 channels side by side and ELU, then one head that gives the classes;
- row-normalised features, dropout of 0.6 on the input of both layers and on the attention coefficients;
- Glorot's initial weights, Adam with a learning rate of 0.005, L2 regularisation of 0.0005 on all parameters;
- training stops after 100 epochs in which neither the validation loss nor the validation accuracy has met its best,
  and the test nodes are scored with the weights of the last epoch in which both did.

Two things differ. The layers are PyG's ``GATConv``, which drops no transformed features, as the authors' code does
besides. And training ends after 1,000 epochs, theirs after 100,000, if it has not stopped before; a run says which.

Epochs and accuracies are the engine's. The validation loss, which it does not record, is taken from the same model
object by PyG itself.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from full_batch import load_graph
from torch_geometric.nn import GATConv
from torch_geometric.nn.models import GAT

import ooc
from ooc.storage.store import Store

HEADS, CHANNELS, OUTPUT_HEADS = 8, 8, 1
DROPOUT, LEARNING_RATE, WEIGHT_DECAY = 0.6, 0.005, 5e-4
PATIENCE, MOST_EPOCHS = 100, 1000
SETTINGS = (
    f"GAT {HEADS}x{CHANNELS} and {OUTPUT_HEADS} output head, dropout {DROPOUT}, lr {LEARNING_RATE}, weight decay "
    f"{WEIGHT_DECAY}, stopped after {PATIENCE} epochs in which neither validation loss nor accuracy was at its best, "
    f"or after {MOST_EPOCHS}; scored at the last epoch in which both were"
)


@dataclass(slots=True)
class EarlyStopping:
    """The published rule. Meeting a best value counts like beating it, as accuracies of few nodes often do.

    ``note`` says whether the epoch is the one to be scored, until a later one is; ``over`` whether to stop.
    """

    patience: int = PATIENCE
    best_loss: float = math.inf
    best_accuracy: float = 0.0
    waited: int = 0

    def note(self, loss: float, accuracy: float) -> bool:
        """Validation loss and accuracy after one more epoch. True: both are at their best so far."""
        at_best = loss <= self.best_loss, accuracy >= self.best_accuracy
        self.waited = 0 if any(at_best) else self.waited + 1
        self.best_loss = min(loss, self.best_loss)
        self.best_accuracy = max(accuracy, self.best_accuracy)
        return all(at_best)

    @property
    def over(self) -> bool:
        return self.waited >= self.patience


def build_model(store: Store, seed: int) -> GAT:
    """PyG's GAT with one output head; its own last layer has as many heads as the others."""
    torch.manual_seed(seed)
    hidden = HEADS * CHANNELS
    model = GAT(store.num_features, hidden, 2, store.num_classes, DROPOUT, act="elu", heads=HEADS)
    model.convs[-1] = GATConv(hidden, store.num_classes, heads=OUTPUT_HEADS, concat=False, dropout=DROPOUT)
    return model


def train(path: str, seed: int, most_epochs: int = MOST_EPOCHS) -> dict[str, Any]:
    """Train on the store at ``path``: test accuracies of the epoch chosen and of the last, and which these were."""
    store = ooc.open(path)
    model = build_model(store, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    x, edge_index, y, _ = load_graph(store, "edge_index")
    valid = torch.from_numpy(store.array("split/valid").read())

    def validation_loss() -> float:
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(x, edge_index)[valid], y[valid])
        model.train()
        return float(loss)

    stopping = EarlyStopping()
    chosen = None
    with ooc.Trainer(model, store, seed=seed, optimizer=optimizer, input_dropout=DROPOUT) as trainer:
        while trainer.epoch < most_epochs and not stopping.over:
            [record] = trainer.fit(1, eval_every=1)
            assert record.valid_score is not None
            if stopping.note(validation_loss(), record.valid_score):
                chosen = record
    assert chosen is not None, "the first epoch is at its best"
    return {
        "seed": seed,
        "best": chosen.test_score,
        "last": record.test_score,
        "best_epoch": chosen.epoch,
        "epochs": record.epoch,
        "stopped": stopping.over,
    }
