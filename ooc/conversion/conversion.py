# SPDX-License-Identifier: Apache-2.0
"""``convert``: a source becomes a store, or an error says why not and nothing is left behind."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ooc.conversion.budget import Shares, check_disk, check_folder, default_budget_bytes, divide, divide_for_order
from ooc.conversion.features import write_features
from ooc.conversion.formats import open_source
from ooc.conversion.labels import write_labels
from ooc.conversion.order import Order, parse_order
from ooc.conversion.output import SCRATCH, check_target, partial, resolved
from ooc.conversion.reorder import write_in_order
from ooc.conversion.source import Source
from ooc.conversion.topology import write_topology
from ooc.errors import OptionError
from ooc.events import Listener, Note, ignore
from ooc.sizes import parse_size
from ooc.storage.store import FORMAT_VERSION, Store, open_store, write_group

_DTYPES = ("float32", "float64", "float16")
_UNORDERED = "unordered"


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What is done to the source on its way; goes into the store's ``source``."""

    symmetrize: bool
    row_normalize: bool
    self_loops: bool
    dtype: str


def convert(
    source: Any,
    out: str | Path | None = None,
    *,
    format: str | None = None,
    symmetrize: bool | None = None,
    row_normalize: bool = False,
    self_loops: bool = False,
    dtype: str = "float32",
    split: int | str | None = None,
    order: str = "none",
    host_budget: int | str | None = None,
    force: bool = False,
    listener: Listener = ignore,
) -> Store:
    """Convert ``source`` to the store ``out`` and open it.

    ``source``: a path or ``"synthetic:…"`` (see ``docs/formats.md``), a PyG ``Data``, or a dictionary of
    numpy arrays named as in the generic format. ``out`` defaults to NAME.ooc in the current folder.

    ``format``: what the source is, instead of finding out. ``symmetrize``: add each edge's reverse and drop
    duplicates (None: as is usual for the format). ``row_normalize``: PyG's NormalizeFeatures.
    ``self_loops``: add one to each node that has none. ``dtype`` of the features. ``split``: the column of
    two-dimensional masks, or ``"random[:SEED]"``. ``order`` of the rows: ``"none"`` (as in the source) or
    ``"hop"`` (see ``ooc.conversion.order``). ``host_budget``: bytes to work in (default: half of what is
    available). ``force``: replace an existing store.

    Raises SourceError, BudgetError, OptionError or StoreError, each with one line. Until the end everything
    is in ``out`` + ``.partial``, which goes away with any error or interruption.
    """
    if dtype not in _DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    wanted = parse_order(order)
    budget = default_budget_bytes() if host_budget is None else parse_size(host_budget, name="host budget")
    graph = open_source(source, format=format, split=split, budget_bytes=budget)
    if out is None and not isinstance(source, str | Path):
        raise OptionError("converting an object needs an output path")
    target = resolved(Path(f"{graph.name}.ooc") if out is None else Path(out))
    shares = divide(graph, budget)
    doubled = graph.symmetrize if symmetrize is None else symmetrize
    options = _Options(symmetrize=doubled, row_normalize=row_normalize, self_loops=self_loops, dtype=dtype)
    ordering = _ordering_shares(graph, budget) if wanted is Order.HOP else None
    check_folder(target.parent)
    check_target(target, force=force)
    for note in graph.notes:
        listener(Note(note))
    name = target.name.removesuffix(".ooc")
    with partial(target, force=force, listener=listener) as folder:
        check_disk(graph, folder, dtype=dtype, symmetrize=doubled, self_loops=self_loops, twice=ordering is not None)
        scratch = folder / SCRATCH
        if ordering is None:
            _write(graph, folder, name=name, options=options, scratch=scratch, shares=shares, listener=listener)
        else:
            unordered = scratch / _UNORDERED
            _write(graph, unordered, name=name, options=options, scratch=scratch, shares=shares, listener=listener)
            write_in_order(
                open_store(unordered), folder, name=name, scratch=scratch, shares=ordering, listener=listener
            )
    return open_store(target)


def _ordering_shares(graph: Source, budget_bytes: int) -> Shares:
    """For the second step: the budget without what the source goes on holding."""
    return divide_for_order(
        graph.name,
        budget_bytes,
        num_nodes=graph.num_nodes,
        num_edges=2 * graph.num_edges,
        num_features=graph.num_features,
        resident_bytes=graph.resident_bytes,
    )


def _write(
    graph: Source,
    store: Path,
    *,
    name: str,
    options: _Options,
    scratch: Path,
    shares: Shares,
    listener: Listener,
) -> None:
    """Write all of ``graph`` to the folder ``store``, rows as they are."""
    for group in ("split", "in") if options.symmetrize else ("split", "in", "out"):
        write_group(store / group, {})
    labels = write_labels(graph, store, block_rows=shares.label_rows)
    topology = write_topology(
        graph,
        store,
        scratch=scratch,
        symmetrize=options.symmetrize,
        self_loops=options.self_loops,
        shares=shares,
        listener=listener,
    )
    write_features(
        graph,
        store,
        dtype=options.dtype,
        row_normalize=options.row_normalize,
        block_rows=shares.feature_rows,
        listener=listener,
    )
    attributes = {
        "ooc_format": FORMAT_VERSION,
        "name": name,
        "num_nodes": graph.num_nodes,
        "num_edges": topology.num_edges,
        "num_features": graph.num_features,
        "num_classes": labels.num_classes,
        "undirected": topology.undirected,
        "num_self_loops": topology.num_self_loops,
        "split_sizes": labels.split_sizes,
        "order": Order.NONE.value,
        "source": {"what": graph.name, "format": graph.format, **graph.description, "options": asdict(options)},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": True,
    }
    write_group(store, attributes)
