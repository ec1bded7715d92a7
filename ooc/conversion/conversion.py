# SPDX-License-Identifier: Apache-2.0
"""``convert``: a source becomes a store, or an error says why not and nothing is left behind.

Stages leave marks in a journal: killed or cancelled, the same conversion goes on (see ``journal`` and ``output``).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ooc.conversion.budget import Shares, check_disk, check_folder, default_budget_bytes, divide, divide_for_order
from ooc.conversion.edges import ValueForm
from ooc.conversion.features import write_features
from ooc.conversion.labels import write_labels
from ooc.conversion.order import Order, parse_order
from ooc.conversion.output import Workplace, parse_on_cancel, resolved, workplace
from ooc.conversion.reorder import write_in_order
from ooc.conversion.topology import Edges, write_topology
from ooc.errors import OptionError
from ooc.events import Listener, Note, ignore
from ooc.interruption import heeding, interruptible_by_ctrl_c
from ooc.sizes import parse_size
from ooc.sources.reading import Request
from ooc.sources.registry import open_source
from ooc.sources.source import Source
from ooc.storage.store import FORMAT_VERSION, VERSION_WITHOUT_EDGE_DATA, Store, open_store, write_group
from ooc.version import __version__

_DTYPES = ("float32", "float64", "float16")
_UNORDERED = "unordered"


@dataclass(frozen=True, kw_only=True)
class _Options(Edges):
    """What is done to the source on its way; goes into the store's ``source``."""

    row_normalize: bool
    dtype: str


@interruptible_by_ctrl_c()
def convert(
    source: Any,
    out: str | Path | None = None,
    *,
    format: str | None = None,
    symmetrize: bool | None = None,
    drop_duplicates: bool | None = None,
    row_normalize: bool = False,
    self_loops: bool = False,
    dtype: str = "float32",
    split: int | str | None = None,
    order: str = "none",
    host_budget: int | str | None = None,
    drop_edge_data: bool = False,
    force: bool = False,
    on_cancel: str = "keep",
    listener: Listener = ignore,
    **reading: str | int | None,
) -> Store:
    """Convert ``source`` to the store ``out`` and open it.

    ``source``: a path or ``"synthetic:…"`` (see ``docs/formats.md``), a PyG ``Data``, or a dictionary of
    numpy arrays named as in the generic format. ``out`` defaults to NAME.ooc in the current folder.

    ``format``: what the source is, instead of finding out. ``symmetrize``: add each edge's reverse (None: as is
    usual for the format). ``drop_duplicates``: of edges between the same two nodes keep one (None: as is usual
    for the format, or if ``symmetrize`` is given just when it is true). ``row_normalize``: PyG's NormalizeFeatures.
    ``self_loops``: add one to each node that has none. ``dtype`` of the features. ``split``: the column of
    two-dimensional masks, or ``"random[:SEED]"``. ``order`` of the rows: ``"none"`` (as in the source) or
    ``"hop"`` (see ``ooc.conversion.order``). ``host_budget``: bytes to work in (default: half of what is
    available). ``drop_edge_data``: convert without the weights or features that edges have.
    ``force``: replace an existing store. ``on_cancel``: whether Ctrl-C keeps the work so far
    (``"keep"``) or removes it (``"remove"``). ``reading``: options of single formats (``READING_OPTIONS``).

    Raises SourceError, BudgetError, OptionError or StoreError, each with one line. Until the end everything
    is in ``out`` + ``.partial``. An error removes that; a conversion that was killed, or cancelled and kept,
    goes on there when it is called again with the same source and options, to the same bytes.
    """
    if dtype not in _DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    wanted = parse_order(order)
    cancel = parse_on_cancel(on_cancel)
    budget = default_budget_bytes() if host_budget is None else parse_size(host_budget, name="host budget")
    request = Request(
        split=split,
        budget_bytes=budget,
        drop_edge_data=drop_edge_data,
        options={name: str(value) for name, value in reading.items() if value is not None},
    )
    listener = heeding(listener)
    graph = open_source(source, format=format, request=request)
    if out is None and not isinstance(source, str | Path):
        raise OptionError("converting an object needs an output path")
    target = resolved(Path(f"{graph.name}.ooc") if out is None else Path(out))
    edges = _edges(graph, symmetrize=symmetrize, drop_duplicates=drop_duplicates, self_loops=self_loops)
    options = _Options(**asdict(edges), row_normalize=row_normalize, dtype=dtype)
    divide(graph, budget)  # Before anything is made.
    if wanted is Order.HOP:
        _ordering_shares(graph, budget)
    check_folder(target.parent)
    for note in graph.notes:
        listener(Note(note))
    key = _key(graph, request, options, wanted)
    with workplace(target, key=key, force=force, on_cancel=cancel, listener=listener) as work:
        if not (work.done or work.written):
            check_disk(
                graph,
                work.folder,
                dtype=dtype,
                symmetrize=options.symmetrize,
                self_loops=options.self_loops,
                twice=wanted is Order.HOP,
                written_bytes=work.written_bytes(),
            )
            _fill(graph, work, target, options=options, wanted=wanted, budget=budget)
        if not work.done:
            work.finish(force=force)
    return open_store(target)


def _key(graph: Source, request: Request, options: _Options, order: Order) -> dict[str, Any]:
    """What a conversion that goes on must have in common with the one that began."""
    chosen = {"order": order.value, "split": request.split, "drop_edge_data": request.drop_edge_data}
    return {
        "ooc": __version__,
        "format": [FORMAT_VERSION, graph.format],
        "input": graph.fingerprint,
        "options": {**asdict(options), **chosen},
        "reading": dict(request.options),
    }


def _edges(graph: Source, *, symmetrize: bool | None, drop_duplicates: bool | None, self_loops: bool) -> Edges:
    """What the caller chose, or what is usual for the format."""
    both_ways = graph.symmetrize if symmetrize is None else symmetrize
    usual = both_ways if symmetrize is not None or graph.drop_duplicates is None else graph.drop_duplicates
    return Edges(
        symmetrize=both_ways,
        drop_duplicates=usual if drop_duplicates is None else drop_duplicates,
        self_loops=self_loops,
    )


def _fill(graph: Source, work: Workplace, target: Path, *, options: _Options, wanted: Order, budget: int) -> None:
    """Write the store, or what an earlier process left to be written of it."""
    if graph.prepare is not None:
        (prepared := work.scratch / "prepared").mkdir(parents=True, exist_ok=True)
        graph = graph.prepare(prepared, work.listener)
    name = target.name.removesuffix(".ooc")
    ordered = wanted is Order.HOP
    _write(
        graph,
        work.scratch / _UNORDERED if ordered else work.store,
        work,
        name=name,
        options=options,
        shares=divide(graph, budget),
    )
    if ordered:
        unordered = open_store(work.scratch / _UNORDERED)
        write_in_order(unordered, work, name=name, shares=_ordering_shares(graph, budget))


def _ordering_shares(graph: Source, budget_bytes: int) -> Shares:
    """For the second step: the budget without what the source goes on holding."""
    return divide_for_order(
        graph.name,
        budget_bytes,
        num_nodes=graph.num_nodes,
        num_edges=2 * graph.num_edges,
        num_features=graph.num_features,
        edge_numbers=graph.num_edge_numbers,
        resident_bytes=graph.resident_bytes,
    )


def _write(graph: Source, store: Path, work: Workplace, *, name: str, options: _Options, shares: Shares) -> None:
    """Write all of ``graph`` to the folder ``store``, rows as they are."""
    labels = write_labels(graph, store, block_rows=shares.label_rows, journal=work.journal)
    topology = write_topology(
        graph, store, work, edges=options, values=ValueForm.of_source(graph, options.dtype), shares=shares
    )
    write_features(
        graph,
        store,
        work,
        dtype=options.dtype,
        row_normalize=options.row_normalize,
        block_rows=shares.feature_rows,
    )
    for group in ("split", "in") if topology.undirected else ("split", "in", "out"):
        write_group(store / group, {})
    edge_data = {
        name: found
        for name, found in (
            ("has_edge_weight", topology.has_edge_weight),
            ("num_edge_features", topology.num_edge_features),
        )
        if found
    }
    attributes = {
        "ooc_format": FORMAT_VERSION if edge_data else VERSION_WITHOUT_EDGE_DATA,
        "name": name,
        "num_nodes": graph.num_nodes,
        "num_edges": topology.num_edges,
        "num_features": graph.num_features,
        "num_classes": labels.num_classes,
        "task": graph.task.value,
        "has_ids": graph.ids is not None,
        **edge_data,
        "undirected": topology.undirected,
        "num_self_loops": topology.num_self_loops,
        "split_sizes": labels.split_sizes,
        "order": Order.NONE.value,
        "source": {"what": graph.name, "format": graph.format, **graph.description, "options": asdict(options)},
        "created": work.journal.created,
        "complete": True,
    }
    write_group(store, attributes)
