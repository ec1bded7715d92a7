# SPDX-License-Identifier: Apache-2.0
"""PyG full-batch training of a store's graph, in memory: the other side of the benchmarks.

Run as a script with one JSON argument (the fields of ``Job``) it trains in its own process and prints
one line of JSON. Two forms of the graph: ``edge_index``, and ``csr``, the transposed adjacency matrix
as a torch.sparse CSR tensor, PyG's fastest form on a CPU.
"""

import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from memory import peak_resident_bytes, reset_peak, resident_bytes
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models import GAT, GCN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import to_torch_csr_tensor

import ooc
from ooc.storage.store import Store


@dataclass(frozen=True)
class Job:
    """One training to be timed: what, on which graph, and in what form."""

    store: str
    model: str
    form: str
    layers: int = 3
    hidden: int = 128
    dropout: float = 0.0
    epochs: int = 4
    threads: int = 2
    seed: int = 0
    heads: int = 4

    def to_json(self) -> str:
        """The argument this script takes."""
        return json.dumps(asdict(self))


class OwnLayer(MessagePassing):
    """A layer as people write it: a mean over neighbours of what a linear map makes of them, and a map of a row."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="mean")
        self.neighbours, self.root = nn.Linear(in_channels, out_channels), nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) + self.root(x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.neighbours(x_j).relu()


class EndsLayer(OwnLayer):
    """A mean of what a small network makes of the rows at both ends of an edge."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.neighbours = nn.Sequential(
            nn.Linear(2 * in_channels, out_channels), nn.ReLU(), nn.Linear(*[out_channels] * 2)
        )

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.neighbours(torch.cat((x_i, x_j - x_i), dim=-1))


class Own(BasicGNN):
    """A model of such layers."""

    supports_edge_weight = supports_edge_attr = False
    layer = OwnLayer

    def init_conv(self, in_channels: int, out_channels: int, **options: Any) -> MessagePassing:
        """One layer."""
        return self.layer(in_channels, out_channels, **options)


class Ends(Own):
    """The same of the others."""

    layer = EndsLayer


KINDS: dict[str, type[BasicGNN]] = {
    **{"gcn": GCN, "sage": GraphSAGE, "gat": GAT, "gatv2": GAT},
    **{"own": Own, "ends": Ends},
}


def build_model(job: Job, store: Store, **options: Any) -> BasicGNN:
    """The same model, with the same initial weights, for either side of a benchmark."""
    torch.manual_seed(job.seed)
    kind = KINDS[job.model]
    if kind is GAT:
        options |= {"heads": job.heads, "v2": job.model == "gatv2"}
    return kind(store.num_features, job.hidden, job.layers, store.num_classes, dropout=job.dropout, **options)


def load_graph(store: Store, form: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, F], the graph, y [N] and the train mask [N], read from ``store``.

    The graph is edge_index [2, E] (int64) or adj_t [N, N] (CSR, float32 ones), rows being targets. The
    CSR is made from rows that are sorted already, so duplicate edges stay, as in the store and in
    edge_index: every form trains the same graph.
    """
    x = torch.from_numpy(store.array("x").read()).float()
    y = torch.from_numpy(store.array("y").read())
    train = torch.from_numpy(store.array("split/train").read())
    indptr_array, indices_array = store.topology("in")
    indptr = torch.from_numpy(indptr_array.read())
    source = torch.from_numpy(indices_array.read()).long()
    target = torch.repeat_interleave(torch.arange(store.num_nodes), indptr[1:] - indptr[:-1])
    if form == "edge_index":
        return x, torch.stack([source, target]), y, train
    size = (store.num_nodes, store.num_nodes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]parse")  # CSR is beta, unchecked: known
        adj_t = to_torch_csr_tensor(torch.stack([target, source]), size=size, is_coalesced=True)
    return x, adj_t, y, train


def run(job: Job) -> dict[str, Any]:
    """Train ``job.epochs`` epochs after one that is dropped; seconds of each, losses and memory.

    The peak is that of the epochs alone, not of building the graph, and net of what was resident after
    the imports; GCN's edge weights are computed once, in the dropped epoch (``cached``).
    """
    imports_bytes = resident_bytes()
    torch.set_num_threads(job.threads)
    store = ooc.open(job.store)
    model = build_model(job, store, **({"cached": True} if job.model == "gcn" else {}))
    x, graph, y, train = load_graph(store, job.form)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    labels = y[train]

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, graph)[train], labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, seconds = [epoch()], []
    reset_peak()
    for _ in range(job.epochs):
        start = time.perf_counter()
        losses.append(epoch())
        seconds.append(time.perf_counter() - start)
    peak_bytes = peak_resident_bytes()
    return {
        "seconds": seconds,
        "losses": losses,
        "peak_bytes": peak_bytes,
        "net_peak_bytes": peak_bytes - imports_bytes,
        "imports_bytes": imports_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
