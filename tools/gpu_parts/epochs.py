# SPDX-License-Identifier: Apache-2.0
"""Epochs of models on the GPU through ``ooc.Trainer``, against PyG full-batch on the same GPU."""

import hashlib
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import ooc
from gpu_parts.overlap import Watch, seen_by_profiler, write_trace
from gpu_parts.overlap import hidden as hidden_copies
from gpu_parts.report import Failed, is_out_of_memory
from ooc.errors import OocError
from ooc.plan import Hardware, Limits
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Event
from ooc.prefetch.device import Device
from ooc.storage.store import Store, open_store
from ooc.train.trainer import Trainer

EPOCHS = 4
CLASSES = 47
FEATURES = 128


FORMS = ("edge_index", "CSR")
"""Of the graph, as PyG is given it; the first is compiled, too, by ``compiled``."""

MOVED = ("to_device_bytes", "to_host_bytes", "ssd_read_bytes", "ssd_write_bytes")
"""What an epoch's record says of them: bytes over the wire, and to and from the SSD."""


def find_store(path: Path, source: str, *, order: str = "none") -> Store:
    """A synthetic graph, converted where that has not been done before."""
    if path.exists():
        try:
            return open_store(path)
        except OocError:  # somebody has ended its conversion, which then goes on
            pass
    return ooc.convert(source, path, order=order)


def small_graph(nodes: int, edges: int) -> str:
    """The source of the graph that is trained on against PyG: all nodes have labels."""
    return f"synthetic:nodes={nodes},edges={edges},features={FEATURES},classes={CLASSES},directed=1"


def model_of(name: str, hidden: int, **options: Any) -> Any:
    """Three layers, the same weights each time."""
    from torch_geometric.nn.models import GAT, GCN, GraphSAGE

    torch.manual_seed(0)
    if name == "gat":
        return GAT(FEATURES, hidden, 3, CLASSES, heads=4)
    return {"gcn": GCN, "sage": GraphSAGE}[name](FEATURES, hidden, 3, CLASSES, **options)


_BESIDE_BYTES = 256 << 20
"""What does not grow with the graph, on the GPU: cuBLAS, the allocator, a tile's temporaries."""


def matrices_nbytes(store: Store, hidden: int) -> int:
    """Of all matrices of an epoch of GraphSAGE."""
    return store.num_nodes * (FEATURES + 6 * hidden) * 4


def all_of_it(store: Store, hidden: int) -> Limits:
    """Budgets of a GPU that holds all matrices and slabs twice over."""
    return Limits(2 * matrices_nbytes(store, hidden) + _BESIDE_BYTES, 32 * 10**9)


def eighths(store: Store, hidden: int, host_too: bool) -> Limits:
    """Budgets of an eighth of what all matrices of an epoch take: the GPU's, and the host's where ``host_too``."""
    eighth = matrices_nbytes(store, hidden) // 8
    return Limits(eighth + _BESIDE_BYTES, eighth if host_too else 32 * 10**9)


def in_budgets(
    store: Store,
    name: str,
    hidden: int,
    device: Device,
    hardware: Hardware,
    limits: Limits,
    *,
    folder: Path,
    drawing: Path,
) -> dict[str, Any]:
    """Median epoch of a model within ``limits``, with what it moves and what was forecast; then one with every copy
    and stretch of kernels timed: what overlaps, and traces in files whose names begin with ``drawing``.

    ``bits``: all losses, and a checksum of the weights behind them, which no budget may change.

    ``allocator``: the most that torch's had of the GPU's memory, and how often it found none and gave back what it had
    kept for later, for which it waits for the GPU.
    """
    model = model_of(name, hidden)
    if device.place.type == "cuda":
        torch.cuda.reset_accumulated_memory_stats(device.place)
        torch.cuda.reset_peak_memory_stats(device.place)
    watch = Watch(device, lambda earlier, later: later.seconds_since(earlier))
    with Trainer(
        model,
        store,
        limits.device_bytes,
        limits.host_bytes,
        watch,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        spill_dir=folder,
        block_rows=limits.block_rows,
        listener=watch.told,
        hardware=hardware,
    ) as trainer:
        forecast_s = simulate(trainer.plan, trainer.workload, hardware).epoch_s
        records = trainer.fit(EPOCHS, eval_every=0)
        bits = {"losses": [record.loss.hex() for record in records], "weights": checksum(trainer.model)}
        with seen_by_profiler() as seen:
            watch.start()
            (watched,) = trainer.fit(1, eval_every=0)
            events = watch.stop()
        kernels = seen()
        titles = [item.title for item in trainer.plan.programs["train"]]
    last = records[-1]
    return {
        "budgets": {"gpu": limits.device_bytes, "host": limits.host_bytes},
        "ooc": {"seconds": statistics.median(record.time_s for record in records[1:])},
        "forecast": {"seconds": forecast_s, "by": hardware.source},
        "bits": bits,
        **{name: getattr(last, name) for name in MOVED},
        "ssd_way": last.ssd_way,
        "allocator": _allocator(device.place),
        "watched": {
            "seconds": watched.time_s,
            "by_events": hidden_copies(events),
            "by_kernels": hidden_copies(kernels) if kernels else None,
        },
        "traces": [*_drawn(events, titles, drawing, "events"), *_drawn(kernels, ["epoch"], drawing, "kernels")],
    }


def checksum(model: torch.nn.Module) -> str:
    """Of all bits of all parameters."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _allocator(place: torch.device) -> dict[str, int] | None:
    if place.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(place)
    return {"retries": stats["num_alloc_retries"], "reserved_bytes": stats["reserved_bytes.all.peak"]}


def _drawn(events: Sequence[Event], titles: Sequence[str], drawing: Path, by: str) -> Iterator[str]:
    """The file of a trace, if there is anything to draw."""
    if events:
        path = drawing.with_name(f"{drawing.name}.{by}.trace.json")
        write_trace(events, titles, path)
        yield path.name


def compare(store: Store, name: str, hidden: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Median epochs of ours and of PyG's by every form of the graph, peak memory of the device, and that all lose the
    same.

    What of PyG does not fit or does not run is named beside ours.
    """
    ours = model_of(name, hidden)
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    kind = "cuda" if device.type == "cuda" else "cpu"
    budgets = {"gpu_budget": "8G", "host_budget": "8G"} if kind == "cuda" else {}
    if kind == "cuda":
        torch.cuda.init()  # in a process of its own, where the part before has failed
        torch.cuda.reset_peak_memory_stats(device)
    with Trainer(ours, store, device=kind, optimizer=optimizer, spill_dir=folder, **budgets) as trainer:
        records = trainer.fit(EPOCHS + 1, eval_every=0)
    own_bytes = torch.cuda.max_memory_allocated(device) if kind == "cuda" else None
    found: dict[str, Any] = {
        "ooc": {"seconds": statistics.median(r.time_s for r in records[1:]), "peak_bytes": own_bytes},
        **{name: getattr(records[-1], name) for name in MOVED},
        "loss": {"ooc": records[-1].loss},
    }
    for form in FORMS:
        found |= _beside(store, name, hidden, device, form, found)
    return found


def of_pyg(name: str, hidden: int) -> Any:
    """As PyG trains it fastest: GCN's normalized weights are made once."""
    return model_of(name, hidden, **({"cached": True} if name == "gcn" else {}))


def compiled(store: Store, name: str, hidden: int, device: torch.device) -> dict[str, Any]:
    """PyG's median epoch by torch.compile, and the first one, which compiles. On the processor nothing is generated:
    Dynamo alone takes the model apart."""
    model = of_pyg(name, hidden).to(device)
    backend = "inductor" if device.type == "cuda" else "eager"
    found = _full_batch(store, torch.compile(model, backend=backend), device, FORMS[0])
    return {"backend": backend, **found}


def _beside(
    store: Store, name: str, hidden: int, device: torch.device, form: str, found: dict[str, Any]
) -> dict[str, Any]:
    """PyG's, of one form of the graph, with its loss held against ours; why not, where it does not run."""
    way = f"PyG, {form}"
    try:
        theirs = _full_batch(store, of_pyg(name, hidden).to(device), device, form)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if not is_out_of_memory(error) and form == FORMS[0]:
            raise
        why = "out of memory on the device" if is_out_of_memory(error) else (str(error).splitlines() or ["refused"])[0]
        return {"left_out": {**found.get("left_out", {}), way: why}}
    ours = found["loss"]["ooc"]
    if abs(ours - theirs["losses"][-1]) > 1e-2 * max(1.0, abs(theirs["losses"][-1])):
        raise Failed(f"{name} loses {ours:.6g} after {EPOCHS + 1} epochs, and PyG by {form} {theirs['losses'][-1]:.6g}")
    timed = {key: theirs[key] for key in ("seconds", "peak_bytes")}
    return {"loss": {**found["loss"], way: theirs["losses"][-1]}, "PyG": {**found.get("PyG", {}), form: timed}}


def _full_batch(store: Store, model: Any, device: torch.device, form: str) -> dict[str, Any]:
    import torch.nn.functional as F

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(store.array(name).read()).to(device)

    x, y, train = read("x").float(), read("y"), read("split/train")
    offsets, source = (torch.from_numpy(array.read()).to(device) for array in store.topology("in"))
    if form == "CSR":
        ones = torch.ones(len(source), device=device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Ss]parse")  # CSR is beta: known
            graph = torch.sparse_csr_tensor(offsets, source.to(offsets.dtype), ones, size=(len(x), len(x)))
    else:
        target = torch.repeat_interleave(torch.arange(len(x), device=device), offsets.diff())
        graph = torch.stack([source.long(), target])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(EPOCHS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, graph)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"losses": losses, "seconds": statistics.median(seconds[1:]), "first_s": seconds[0], "peak_bytes": peak}
