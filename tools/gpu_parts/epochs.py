# SPDX-License-Identifier: Apache-2.0
"""Epochs of models on the GPU through ``ooc.Trainer``, against PyG full-batch on the same GPU."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gpu_parts.report import Failed, LeftOut, is_out_of_memory

EPOCHS = 4
CLASSES = 47
FEATURES = 128


def find_store(folder: Path, nodes: int, edges: int) -> Any:
    """A synthetic graph, converted where that has not been done before."""
    import ooc
    from ooc.errors import OocError
    from ooc.storage.store import open_store

    path = folder / "synthetic.ooc"
    if path.exists():
        try:
            return open_store(path)
        except OocError:  # somebody has ended its conversion, which then goes on
            pass
    source = f"synthetic:nodes={nodes},edges={edges},features={FEATURES},classes={CLASSES},directed=1"
    return ooc.convert(source, path)


def model_of(name: str, hidden: int) -> Any:
    """Three layers, the same weights each time."""
    from torch_geometric.nn.models import GAT, GraphSAGE

    torch.manual_seed(0)
    if name == "gat":
        return GAT(FEATURES, hidden, 3, CLASSES, heads=4)
    return GraphSAGE(FEATURES, hidden, 3, CLASSES)


def in_little_memory(store: Any, name: str, hidden: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Median epoch with a device's budget of an eighth of what all matrices of the epoch take; bytes over the wire."""
    from ooc import Trainer
    from ooc.errors import OocError

    model = model_of(name, hidden)
    whole = store.num_nodes * (FEATURES + 6 * hidden) * 4
    on_gpu = device.type == "cuda"
    budgets = {"gpu_budget": whole // 8 + (256 << 20), "host_budget": "32G"} if on_gpu else {}
    try:
        kind = "cuda" if on_gpu else "cpu"
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with Trainer(model, store, device=kind, optimizer=optimizer, spill_dir=folder, **budgets) as trainer:
            records = trainer.fit(EPOCHS)
    except OocError as error:
        raise LeftOut(str(error)) from None
    last = records[-1]
    return {
        "budgets": budgets,
        "ooc": {"seconds": statistics.median(record.time_s for record in records[1:])},
        "to_device_bytes": last.to_device_bytes,
        "to_host_bytes": last.to_host_bytes,
        "ssd_way": last.ssd_way,
    }


def compare(store: Any, name: str, hidden: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Median epochs of ours and of PyG's, peak memory of the device, and that both lose the same.

    ``LeftOut`` with its own words where the trainer refuses the device; what of PyG does not fit is named beside ours.
    """
    import ooc
    from ooc.errors import OocError

    ours = model_of(name, hidden)
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    kind = "cuda" if device.type == "cuda" else "cpu"
    budgets = {"gpu_budget": "8G", "host_budget": "8G"} if kind == "cuda" else {}
    try:
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with ooc.Trainer(ours, store, device=kind, optimizer=optimizer, spill_dir=folder, **budgets) as trainer:
            records = trainer.fit(EPOCHS + 1)
    except OocError as error:
        raise LeftOut(str(error)) from None
    own_bytes = torch.cuda.max_memory_allocated(device) if kind == "cuda" else None
    found: dict[str, Any] = {
        "ooc": {"seconds": statistics.median(r.time_s for r in records[1:]), "peak_bytes": own_bytes},
        "loss": {"ooc": records[-1].loss},
    }
    try:
        theirs = _full_batch(store, model_of(name, hidden).to(device), device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return found | {"left_out": {"PyG": "out of memory on the device"}}
    if abs(records[-1].loss - theirs["losses"][-1]) > 1e-2 * max(1.0, abs(theirs["losses"][-1])):
        raise Failed(
            f"{name} loses {records[-1].loss:.6g} after {EPOCHS + 1} epochs, and PyG {theirs['losses'][-1]:.6g}"
        )
    found["loss"]["PyG"] = theirs["losses"][-1]
    return found | {"PyG": {"seconds": theirs["seconds"], "peak_bytes": theirs["peak_bytes"]}}


def _full_batch(store: Any, model: Any, device: torch.device) -> dict[str, Any]:
    import torch.nn.functional as F

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(store.array(name).read()).to(device)

    x, y, train = read("x").float(), read("y"), read("split/train")
    offsets, source = (torch.from_numpy(array.read()).to(device) for array in store.topology("in"))
    target = torch.repeat_interleave(torch.arange(len(x), device=device), offsets.diff())
    edge_index = torch.stack([source.long(), target])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(EPOCHS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"losses": losses, "seconds": statistics.median(seconds[1:]), "peak_bytes": peak}
