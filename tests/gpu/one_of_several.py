# SPDX-License-Identifier: Apache-2.0
"""One of the processes of tests/gpu/test_processes.py, as torchrun starts them: trains some models, and has the first
process write what came of them.

    python -m tests.gpu.one_of_several STORE FILE DEVICE WAY[,WAY…]

Of FILE "killed" the last process is killed amid a training, and the others say what comes of it.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from ooc.errors import RankError
from ooc.storage.store import open_store
from ooc.train.setup import Tuning
from ooc.train.trainer import Trainer


def trained(store: Any, device: str, make: Any, *, epochs: int = 3, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make(store.num_features, store.num_classes)
    options["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.01)
    if device == "cuda":
        options |= {"gpu_budget": "1G", "host_budget": "2G"}
    else:
        options["memory"] = "1G"
    with Trainer(model, store, device=device, _tuning=Tuning(tile_rows=256), **options) as trainer:
        way = options.get("exchange_by")
        assert trainer.ranks.count == 1 or trainer.limits.is_direct == (way == "device")
        records = trainer.fit(epochs, progress=False)
        received = sum(record.received_bytes for record in records)
        assert (received > 0) == (trainer.ranks.count > 1)
        found = {"losses": [record.loss for record in records], "scores": trainer.evaluate()}
    return found | {name: value.cpu() for name, value in model.state_dict().items()}


def killed(store: Any, device: str, way: str) -> None:
    """The last process amid an endless training."""
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        threading.Timer(20, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        trained(store, device, lambda f, c: GCN(f, 64, 3, c), epochs=10**6, exchange="columns", exchange_by=way)
    except RankError as error:
        sys.exit(str(error))


def main(path: str, written: str, device: str, ways: str) -> None:
    store, found = open_store(Path(path)), {}
    if written == "killed":
        killed(store, device, ways)
    models = {
        "gcn": lambda f, c: GCN(f, 64, 3, c, dropout=0.3),
        "sage": lambda f, c: GraphSAGE(f, 64, 2, c, norm="batch_norm"),
        "gat": lambda f, c: GAT(f, 64, 2, c, heads=4),
    }
    for name, make in models.items():
        for form in ("halo", "columns"):
            for way in ways.split(","):
                sent = {"exchange": form, "exchange_by": way, "slab_columns": 16}
                found[f"{name}, {form}, {way}"] = trained(store, device, make, **sent)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(found, Path(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
