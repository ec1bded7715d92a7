# SPDX-License-Identifier: Apache-2.0
"""``convert``: a source becomes a store, or an error says why not and nothing is left behind.

Completed stages are recorded in a journal: after a kill or cancellation, the same conversion resumes (see ``output``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ooc.conversion.budget import (
    Options,
    Shares,
    Sizes,
    budget_bytes_of,
    check_disk,
    check_folder,
    disk_bytes,
    divide,
)
from ooc.conversion.held_out_links import HeldOut
from ooc.conversion.node_arrays import mostly_zeros, write_features, write_ids, write_labels
from ooc.conversion.order import ORDERS
from ooc.conversion.output import ON_CANCEL, Workplace, resolved, workplace
from ooc.conversion.reorder import write_in_order
from ooc.conversion.topology import check_options, write_edges
from ooc.errors import OptionError
from ooc.events import Listener, Note, caution, ignore
from ooc.interruption import interruptible_by_ctrl_c, stopping_if_asked
from ooc.sources.labels import USUAL_SPLIT
from ooc.sources.reading import Request
from ooc.sources.registry import open_source
from ooc.sources.source import Source
from ooc.storage.store import FORMAT_VERSION, Store, open_store, write_groups
from ooc.storage.types import of_nodes
from ooc.suggestions import check_choice, checked
from ooc.version import __version__

_DTYPES = ("float32", "float64", "float16")
_FEATURE_FORMS = ("auto", "dense", "sparse")
_UNORDERED_FOLDER = "unordered"


@interruptible_by_ctrl_c()
@checked
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
    feature_form: str = "auto",
    split: int | str | None = None,
    order: str = "none",
    host_budget: int | str | None = None,
    drop_edge_data: bool = False,
    hold_out_links: str | None = None,
    columns: Mapping[str, str] | None = None,
    inputs: Sequence[str] = (),
    force: bool = False,
    on_cancel: str = "keep",
    listener: Listener = ignore,
    **reading: Any,
) -> Store:
    """Convert ``source`` to the store ``out`` and open it.

    ``source``: a path or ``"synthetic:…"`` (see ``docs/formats.md``), a PyG ``Data`` or ``HeteroData``, a list or
    dataset of many ``Data`` (see ``docs/graphs.md``), a dictionary of numpy arrays named as in the generic format,
    ``{"nodes": …, "edges": …}`` of pandas or polars frames, a networkx graph, or a sparse matrix of scipy. ``out``
    defaults to NAME.ooc in the current folder.

    ``format``: the source's format, instead of recognising it. ``symmetrize``: add each edge's reverse (None: the
    format's default). ``drop_duplicates``: keep one of several edges between the same two nodes (None: the format's
    default, or, if ``symmetrize`` is given, the same as that). ``row_normalize``: PyG's NormalizeFeatures.
    ``self_loops``: add one to each node that has none. ``dtype`` of the features, and the ``feature_form`` in which
    they are stored: ``"dense"``, ``"sparse"``, or ``"auto"``: sparse where that takes at most an eighth. ``split``: the
    column of two-dimensional masks, or ``"random[:SEED]"``. ``order`` of the rows: ``"none"`` (as in the source) or
    ``"hop"`` (see ``ooc.conversion.order``). ``host_budget``: bytes to work in (default: half of what is available).
    ``drop_edge_data``: convert without the edges' weights and features. ``hold_out_links``: shares of the edges to
    leave out for validation and testing, ``"0.05,0.1"`` or with a seed ``"0.05,0.1,7"``; they are written to
    NAME.links.npz beside ``out`` (see ``docs/links.md``). ``columns``: roles of tables' columns by name, where the
    recognised role is wrong: id, feature, label, split, train, val, test, src, dst, weight or ignore. ``inputs``: names
    of further node attributes of PyG's data that models are given beside ``x`` (``"pos"``); they are stored after ``x``
    in the features. ``force``: replace an existing store. ``on_cancel``: whether Ctrl-C keeps the work so far
    (``"keep"``) or removes it (``"remove"``). ``reading``: options of single formats (``READING_OPTIONS``);
    ``features=`` and ``labels=`` may be arrays.

    Raises SourceError, BudgetError, OptionError or StoreError, each with one line. Until the end everything is in
    ``out`` + ``.partial``. An error removes that. A conversion that was killed, or cancelled and kept, resumes there
    when it is called again with the same source and options, and gives the same bytes.
    """
    check_choice("dtype", dtype, _DTYPES)
    check_choice("feature_form", feature_form, _FEATURE_FORMS)
    check_choice("order", order, ORDERS)
    check_choice("on_cancel", on_cancel, ON_CANCEL)
    budget = budget_bytes_of(host_budget)
    request = Request(
        split=split,
        budget_bytes=budget,
        drop_edge_data=drop_edge_data,
        options={name: str(value) for name, value in reading.items() if isinstance(value, str | int | Path)},
        arrays={name: value for name, value in reading.items() if not isinstance(value, str | int | Path | None)},
        columns=columns or {},
        inputs=inputs,
    )
    told, listener = listener, stopping_if_asked(listener)
    graph = open_source(source, format=format, request=request)
    if out is None and not isinstance(source, str | Path):
        raise OptionError("converting an object needs an output path")
    target = resolved(Path(f"{graph.name}.ooc") if out is None else Path(out))
    options = chosen_options(
        graph,
        symmetrize=symmetrize,
        drop_duplicates=drop_duplicates,
        self_loops=self_loops,
        row_normalize=row_normalize,
        dtype=dtype,
        feature_form=feature_form,
        hold_out=None if hold_out_links is None else HeldOut.parse(hold_out_links),
    )
    if options.hold_out is not None:
        options.hold_out.check(graph)
    sizes, ordered = Sizes.of(graph), order == "hop"
    if ordered and graph.graph_offsets is not None:
        raise OptionError(f"{graph.name} has many graphs, whose rows stay together; leave out order='hop'")
    if graph.types is not None:
        check_options(graph, graph.types, options)
    _divide_budget(graph, budget, ordered=ordered)  # Checked before anything is created.
    check_folder(target.parent)
    for note in graph.notes:
        listener(Note(note))
    key = {
        "ooc": __version__,
        "format": [FORMAT_VERSION, graph.format],
        "input": graph.fingerprint,
        "options": {**asdict(options), "order": order, "split": split, "drop_edge_data": drop_edge_data},
        "reading": dict(request.options) | ({"columns": dict(request.columns)} if request.columns else {}),
    }
    with workplace(target, key=key, force=force, on_cancel=on_cancel, listener=listener) as work:
        if not work.written:
            need = disk_bytes(sizes, options, ordered=ordered) - work.written_bytes()
            check_disk(f"converting {graph.name}", need, work.folder)
            name = target.name.removesuffix(".ooc")
            links = target.with_name(f"{name}.links.npz")
            _write_store(graph, work, name=name, options=options, ordered=ordered, budget=budget, links=links)
    store = open_store(target)
    count, labelled = store.num_graphs or store.num_nodes, sum(store.split_sizes.values())
    if 0 < labelled < count and str(graph.description.get("split", "")).startswith(USUAL_SPLIT):
        without = f"{count - labelled:,} of {count:,} {graph.labelled}s"
        caution(told, f"{graph.name}: without a label (-1, NaN or nothing), and so in no split: {without}")
    return store


def chosen_options(
    graph: Source,
    *,
    symmetrize: bool | None,
    drop_duplicates: bool | None,
    feature_form: str,
    dtype: str,
    **others: Any,
) -> Options:
    """Return the caller's options, with the format's defaults where they are None."""
    both_ways = graph.symmetrize if symmetrize is None else symmetrize
    usual = both_ways if symmetrize is not None or graph.drop_duplicates is None else graph.drop_duplicates
    once = usual if drop_duplicates is None else drop_duplicates
    if graph.graph_offsets is not None:  # batches are read from pages of whole rows
        if feature_form == "sparse":
            raise OptionError(
                f"{graph.name} has many graphs, whose features are dense; leave out feature_form='sparse'"
            )
        feature_form = "dense"
    normal = others["row_normalize"]
    if not graph.num_features and (normal or feature_form != "auto"):
        raise OptionError(f"{graph.name} has no features to be normalised or kept without their zeros")
    form = feature_form if graph.num_features else "dense"
    counted = form == "auto" and graph.types is None
    sparse = form == "sparse" or (counted and mostly_zeros(graph, dtype, row_normalize=normal))
    return Options(symmetrize=both_ways, drop_duplicates=once, dtype=dtype, sparse_features=sparse, **others)


def _divide_budget(graph: Source, budget_bytes: int, *, ordered: bool) -> list[Shares]:
    """Return the divisions of memory for writing the store and for ordering its rows.

    The latter has the budget without what the source holds.
    """
    sizes = Sizes.of(graph)
    twice = replace(sizes, num_edges=2 * sizes.num_edges)
    return [divide(sizes, budget_bytes), *([divide(twice, budget_bytes, ordering=True)] if ordered else [])]


def _write_store(
    graph: Source, work: Workplace, *, name: str, options: Options, ordered: bool, budget: int, links: Path
) -> None:
    """Write the store, or the rest of it after an earlier process; ``links``: the file of held-out links."""
    if graph.prepare is not None:
        (prepared := work.scratch / "prepared").mkdir(parents=True, exist_ok=True)
        graph = graph.prepare(prepared, work.listener)
        ids_bytes = sum(one.num_nodes * one.id_bytes for one in graph.nodes_of.values())
        if ids_bytes:  # Their length is known only now.
            need = disk_bytes(Sizes.of(graph), options, ordered=ordered) + ids_bytes
            check_disk(f"converting {graph.name}", need - work.written_bytes(), work.folder)
    shares, *ordering = _divide_budget(graph, budget, ordered=ordered)
    store = work.scratch / _UNORDERED_FOLDER if ordered else work.store
    _write_graph(graph, store, work, name=name, options=options, shares=shares)
    if options.hold_out is not None:
        kind = options.hold_out.edge_type
        within = kind is None or kind.within_type
        undirected = open_store(store).undirected if graph.types is None else options.symmetrize and within
        options.hold_out.write(graph, links, undirected=undirected, block_edges=shares.edges, budget_bytes=budget)
        work.listener(Note(f"{graph.name}: edges that are held out as links are in {links}"))
    if ordered:
        write_in_order(open_store(store), work, name=name, shares=ordering[0])


def _write_graph(graph: Source, store: Path, work: Workplace, *, name: str, options: Options, shares: Shares) -> None:
    """Write all of ``graph`` to the folder ``store``, with rows in the source's order."""
    labelled = graph.labelled_type
    folder = store / of_nodes(labelled, "")
    labels = write_labels(graph, folder, dtype=options.dtype, block_rows=shares.label_rows, journal=work.journal)
    if odd := labels.get("odd"):  # a resumed conversion may not have recorded it
        work.listener(Note(f"{graph.name}: {odd}"))
    edges = write_edges(graph, store, work, options=options, shares=shares)
    features: dict[str, Any] = {}
    for kind, nodes in graph.nodes_of.items():
        folder = store / of_nodes(kind, "")
        if nodes.num_features:
            stage = f"features of {kind}" if kind else "features"
            rows = shares.feature_rows
            features = write_features(nodes, folder, work, options=options, block_rows=rows, stage=stage)
        if kind != labelled:
            write_ids(nodes, folder, block_rows=shares.label_rows)
    if options.sparse_features:
        share = features["entries"] / (graph.num_nodes * graph.num_features)
        work.listener(Note(f"{graph.name}: {share:.2%} of the features are not zero; only those are kept"))
    attributes = {
        "ooc_format": FORMAT_VERSION,
        "name": name,
        "num_nodes": graph.num_nodes,
        **({} if graph.graph_offsets is None else {"num_graphs": graph.num_labelled}),
        "num_features": graph.num_features,
        **{f"num_feature_{name}": number for name, number in features.items()},
        "num_classes": labels["num_classes"],
        "task": graph.task.value,
        "has_ids": graph.ids is not None,
        **({"id_bytes": graph.id_bytes} if graph.id_bytes else {}),
        **({"class_names": list(graph.class_names)} if graph.class_names else {}),
        **edges,
        "split_sizes": labels["split_sizes"],
        **({"incomplete_labels": labels["incomplete"]} if labels["incomplete"] else {}),
        "order": "none",
        "source": {"what": graph.name, "format": graph.format, **graph.description, "options": asdict(options)},
        "created": work.journal.created,
        "complete": True,
    }
    write_groups(store, attributes)
