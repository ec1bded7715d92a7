# SPDX-License-Identifier: Apache-2.0
"""The kernels of training, timed by their threads where the executor calls them, and what they move and compute at
least.

Each kind of layer is trained for two epochs, between a map to as many columns and one to the classes; of the second
epoch, whose lists of edges are there already, every call of a kernel is timed. Dense products and row-wise work are
timed over tiles of matrices that lie in memory.

What an edge moves at least is its neighbour's row as it is pulled, its own index and what it carries, and its share of
what its row brings and gets. Flops are those of the layer's formula, an exponential counted as one.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from time import thread_time
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

import ooc
from ooc.kernels import pulls
from ooc.kernels.edge_function import EdgeMessages
from ooc.kernels.edges import SelfLoops, TileEdges
from ooc.storage.store import Store
from roofline_parts.chart import Mark
from roofline_parts.rates import PRODUCTS, Rates

EDGE_FEATURES = 8
_PULLED = re.compile(r"_N[A-Z]$")
_OWN = re.compile(r"_R[A-Z]$")


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its module of so many columns, what it is called with beside the edges, and by kernel what is
    done for an edge, in flops for every column that is pulled. ``options`` are the trainer's."""

    make: Callable[[int, int], nn.Module]
    flops: Mapping[str, tuple[str, float]]
    carried: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _attention(make: Callable[..., nn.Module]) -> Callable[[int, int], nn.Module]:
    return lambda columns, heads: make(columns, columns // heads, heads=heads)


def _gine(columns: int, heads: int) -> nn.Module:
    return gnn.GINEConv(nn.Linear(columns, columns), edge_dim=EDGE_FEATURES)


KINDS: dict[str, Kind] = {
    "mean": Kind(lambda columns, _: gnn.SAGEConv(columns, columns), {"sums": ("mean", 1)}),
    "normalised": Kind(lambda columns, _: gnn.GCNConv(columns, columns), {"sums": ("normalised sum", 1)}),
    "bfloat16": Kind(
        lambda columns, _: gnn.GCNConv(columns, columns),
        {"sums": ("normalised sum, bfloat16", 1)},
        options={"spill_dtype": "bfloat16"},
    ),
    "weighted": Kind(
        lambda columns, _: gnn.GraphConv(columns, columns), {"sums": ("weighted sum", 2)}, carried="edge_weight"
    ),
    "max": Kind(
        lambda columns, _: gnn.SAGEConv(columns, columns, aggr="max"),
        {"maxima": ("maximum", 1), "maxima_sources": ("maximum, backward", 1.5)},
    ),
    "gat": Kind(_attention(gnn.GATConv), {"attend": ("GAT", 2), "attend_sources": ("GAT, backward", 2)}),
    "gatv2": Kind(
        _attention(gnn.GATv2Conv),
        {
            "messages": ("GATv2", 6),
            "message_targets": ("GATv2, targets", 11),
            "message_sources": ("GATv2, sources", 6),
        },
    ),
    "transformer": Kind(
        _attention(gnn.TransformerConv),
        {
            "messages": ("Transformer", 2),
            "message_targets": ("Transformer, targets", 3),
            "message_sources": ("Transformer, sources", 4),
        },
    ),
    "gine": Kind(
        _gine,
        {
            "messages": ("GINE", 3 + 2 * EDGE_FEATURES),
            "message_targets": ("GINE, targets", 3 + 4 * EDGE_FEATURES),
            "message_sources": ("GINE, sources", 3 + 2 * EDGE_FEATURES),
        },
        carried="edge_attr",
    ),
    "resgated": Kind(
        lambda columns, _: gnn.ResGatedGraphConv(columns, columns),
        {
            "messages": ("ResGated", 3.5),
            "message_targets": ("ResGated, targets", 5),
            "message_sources": ("ResGated, sources", 5),
        },
    ),
}


@dataclass
class Work:
    """What a kernel did, all calls together: ``seconds`` of all processors; ``items``, edges or rows; bytes that must
    move, of them ``fetched`` rows of ``row_bytes`` out of a slab of ``rows``, and flops."""

    name: str
    seconds: float = 0.0
    items: int = 0
    fetched: int = 0
    row_bytes: int = 0
    rows: int = 0
    other_bytes: int = 0
    flops: float = 0.0
    dtype: torch.dtype = torch.float32
    limit_s: float = 0.0

    @property
    def gathers(self) -> bool:
        """Whether it pulls rows of neighbours."""
        return self.fetched > 0

    @property
    def nbytes(self) -> int:
        """That must move."""
        return self.fetched * self.row_bytes + self.other_bytes

    @property
    def bytes_each(self) -> float:
        """Of an edge or row."""
        return self.nbytes / self.items

    @property
    def flops_each(self) -> float:
        """Of an edge or row."""
        return self.flops / self.items

    @property
    def ratio(self) -> float:
        """How often its limit it takes."""
        return self.seconds / self.limit_s

    @property
    def mark(self) -> Mark:
        """In the picture."""
        return Mark(self.name, self.flops / self.nbytes, self.flops / self.seconds, self.ratio, self.gathers)

    def limited(self, rates: Rates) -> "Work":
        """Itself, with the time that it takes at least: to move its bytes or to compute, whichever is longer."""
        moved_s = self.other_bytes / rates.stream_bytes_per_s(copying=not self.gathers)
        if self.gathers:
            moved_s += self.fetched * rates.row_seconds(self.row_bytes, self.rows)
        computed = torch.float32 if self.gathers else self.dtype
        self.limit_s = max(moved_s, self.flops / 2 / rates.multiplies_per_s(computed))
        return self


class Model(nn.Module):
    """A layer of ``columns`` columns between maps to them and to the classes."""

    def __init__(self, kind: Kind, features: int, columns: int, heads: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, columns)
        self.conv = kind.make(columns, heads)
        self.last = nn.Linear(columns, classes)
        self.carried = kind.carried

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Scores of the classes."""
        rows = self.first(x).relu()
        if self.carried == "edge_weight":
            rows = self.conv(rows, edge_index, edge_weight)
        elif self.carried == "edge_attr":
            rows = self.conv(rows, edge_index, edge_attr)
        else:
            rows = self.conv(rows, edge_index)
        return self.last(rows.relu())


def pulled(store: Store, name: str, rates: Rates, options: Mapping[str, Any]) -> list[Work]:
    """What the kernels of kind ``name`` do in an epoch on ``store``, whose edges carry weights and features."""
    kind = KINDS[name]
    torch.manual_seed(0)
    model = Model(kind, store.num_features, options["hidden"], options["heads"], store.num_classes)
    ignored = {"edge_weight": "features", "edge_attr": "weight"}.get(kind.carried or "", "all")
    found = {kernel: Work(shown) for kernel, (shown, _) in kind.flops.items()}
    trainer = ooc.Trainer(
        *(model, store),
        memory=options["memory"],
        device="cpu",
        threads=options["threads"],
        spill_dir=options["folder"],
        ignore_edge_data=ignored,
        **kind.options,
    )
    with trainer:
        trainer.fit(1, eval_every=0, progress=False)
        with _timed(found, {kernel: flops for kernel, (_, flops) in kind.flops.items()}):
            trainer.fit(1, eval_every=0, progress=False)
    rates.forget()
    done = [work for work in found.values() if work.items]
    for work in done:
        work.seconds /= rates.bench.cores
    return [work.limited(rates) for work in done]


@contextmanager
def _timed(found: Mapping[str, Work], flops: Mapping[str, float]) -> Iterator[None]:
    """Have the CPU's kernels note what they do."""
    before = pulls.BY_DEVICE["cpu"]
    own = {kernel: _noting(getattr(before(), kernel), work, flops[kernel]) for kernel, work in found.items()}
    timed = dataclasses.replace(before(), **own)
    pulls.BY_DEVICE["cpu"] = lambda: timed
    try:
        yield
    finally:
        pulls.BY_DEVICE["cpu"] = before


def _noting(kernel: Callable[..., Any], work: Work, flops: float) -> Callable[..., Any]:
    """``kernel``, that adds what it does to ``work``: two threads seldom do so at once, and lose a tile if they do."""
    signature = inspect.signature(kernel)

    @wraps(kernel)
    def noting(*args: Any, **kwargs: Any) -> Any:
        begun_s = thread_time()
        result = kernel(*args, **kwargs)
        seconds = thread_time() - begun_s
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("options", {})
        tiles = (value.tile if isinstance(value, EdgeMessages) else value for value in given.values())
        tile = next(value for value in tiles if isinstance(value, TileEdges))
        source = _of_all_rows(given)
        fetched = tile.indices_E.numel() + tile.rows * (tile.self_loops is SelfLoops.EXACTLY_ONE)
        own = [value for name, value in given.items() if _OWN.search(name) and isinstance(value, Tensor)]
        carried = [one for one in (tile.weight_E, tile.features_EK) if one is not None]
        results = [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
        work.seconds += seconds
        work.items += tile.indices_E.numel()
        work.fetched += fetched
        work.row_bytes, work.rows, work.dtype = source.shape[1] * source.itemsize, len(source), source.dtype
        work.other_bytes += sum(one.nbytes for one in (tile.indices_E, tile.offsets_R1, *own, *carried, *results))
        work.flops += fetched * flops * source.shape[1]
        return result

    return noting


def _of_all_rows(given: Mapping[str, Any]) -> Tensor:
    found: Tensor = next(value for name, value in given.items() if _PULLED.search(name))
    return found


def row_wise(rates: Rates, rows: int, columns: int) -> Iterator[Work]:
    """Dense products and row-wise work over matrices of so many rows that lie in memory, tile by tile."""
    rates.forget()
    for dtype in (torch.float32, torch.bfloat16):
        yield from (_product(rates, way, dtype, rows, columns) for way in PRODUCTS)
    bench, (x, out) = rates.bench, _tiles(rates, 2, rows, columns, torch.float32)
    scale = torch.randn(rates.tile_rows, 1)

    def rectified(number: int) -> None:
        torch.mul(x[number], scale, out=out[number]).clamp_(min=0.0)

    work = Work("scaled and rectified rows", bench.seconds(rectified, len(x)), x.numel() // columns)
    work.flops, work.other_bytes = 2.0 * x.numel(), 2 * x.nbytes
    yield work.limited(rates)


def _tiles(rates: Rates, count: int, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    shape = max(1, rows // rates.tile_rows), rates.tile_rows, columns
    return [torch.randn(shape).to(dtype) for _ in range(count)]


def _product(rates: Rates, way: str, dtype: torch.dtype, rows: int, columns: int) -> Work:
    x, above, out = _tiles(rates, 3, rows, columns, dtype)
    weight, multiply = torch.randn(columns, columns).to(dtype), PRODUCTS[way]

    def product(number: int) -> None:
        found = multiply(x[number], weight, above[number])
        if way != "weight gradient":
            out[number].copy_(found)

    name = f"product, {way}" + (", bfloat16" if dtype == torch.bfloat16 else "")
    work = Work(name, rates.bench.seconds(product, len(x)), x.numel() // columns, dtype=dtype)
    work.flops, work.other_bytes = 2.0 * x.numel() * columns, 2 * x.nbytes
    return work.limited(rates)


def carrying(store: Store, out: Path) -> Store:
    """The graph of ``store`` with a weight and features for every edge."""
    from full_batch import load_graph
    from torch_geometric.data import Data

    x, edge_index, y, train = load_graph(store, "edge_index")
    torch.manual_seed(0)
    edges = edge_index.shape[1]
    data = Data(x=x, edge_index=edge_index, y=y, edge_weight=torch.rand(edges), train_mask=train)
    data.edge_attr = torch.randn(edges, EDGE_FEATURES)
    ooc.convert(data, out)
    return ooc.open(out)
