# SPDX-License-Identifier: Apache-2.0
"""``ooc info``: show what a store contains."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import COUNT, JSON, WIDTH
from ooc.progress.figures import format_count
from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.storage.store import Store
    from ooc.storage.types import Types

_MOST_SHOWN = 12
"""The most entries of a list shown on its line; ``--json`` prints all of them."""


@click.command(short_help="Show what a store holds.")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--layers", type=COUNT, metavar="K", help="Show what each layer of a model of K layers works on.")
@click.option("--hidden", type=WIDTH, default=128, show_default=True, help="With --layers: width of hidden layers.")
@JSON
def command(store: Path, layers: int | None, hidden: int, as_json: bool) -> None:
    """Show what STORE holds: nodes, edges, features, classes, splits, size, where it came from.

    Edges are counted as stored: an undirected graph's in both directions. Where rows are in hop order,
    hops tells how many can reach a scored row within 0, 1, 2, … steps, train_hops in how many those lie
    that can reach a training row.

    With --layers: the nodes that each layer computes, the edges it sums over, and the bytes of these edges and of
    the rows they come from, in training and in evaluation. Fewer than all only where rows are in hop order.
    """
    from ooc.storage.store import open_store

    opened = open_store(store)
    if layers is not None:
        opened.check_one_graph("--layers")
    facts = describe(opened)
    if layers is not None:
        facts["layers"] = active_layers(opened, layers, hidden)
    if as_json:
        print_json(facts)
        return
    from ooc.report.console import output, print_hanging

    console = output()
    for name, value in facts.items():
        if name == "layers":
            _show_layers(value)
        else:
            print_hanging(f"{name:<16} ", _format_value(name, value), console)


def describe_shortly(store: "Store") -> str:
    """Return a one-line summary of the store: path, numbers of graphs, nodes and edges, and size."""
    graphs = [format_count(store.num_graphs, "graphs")] if store.num_graphs else []
    counts = [*graphs, format_count(store.num_nodes, "nodes"), format_count(store.num_edges, "edges")]
    return f"{store.path}: {', '.join(counts)}, {format_size(store.nbytes)}"


def describe(store: "Store") -> dict[str, Any]:
    """Return every fact about the store that can be had without reading the contents of its arrays."""
    facts = {
        "name": store.name,
        "path": str(store.path),
        **({"num_graphs": store.num_graphs} if store.num_graphs else {}),
        **_type_counts(store.types),
        "num_nodes": store.num_nodes,
        "num_edges": store.num_edges,
        "num_features": store.num_features,
        "num_classes": store.num_classes,
        **({"class_names": list(store.class_names)} if store.class_names is not None else {}),
        "undirected": store.undirected,
        "num_self_loops": store.num_self_loops,
        **({} if store.sparse_features is None else {"feature_entries": store.sparse_features.entries}),
        "dtype": str(store.array("x").dtype) if store.num_features else None,
        **_edge_data(store),
        "split_sizes": dict(store.split_sizes),
        "bytes": store.nbytes,
        "order": store.attributes["order"],
        "ids": "row numbers",
    }
    if store.has("ids"):
        facts["ids"] = "texts" if store.id_type.kind == "S" else "whole numbers of the source"
    by_type = {} if store.types is None else store.types.hops
    for place, name in enumerate(("hops", "train_hops")):
        if name in store.attributes:
            found = {kind: list(one[place]) for kind, one in by_type.items()}
            facts[name] = found or store.attributes[name]
    facts["source"] = {name: one for name, one in store.source.items() if name != "left_out"}  # which only models use
    return facts


def _type_counts(types: "Types | None") -> dict[str, Any]:
    """Return nodes with feature counts, and edges, by type. All other facts are about the labelled nodes' type."""
    if types is None:
        return {}
    nodes = {name: f"{count:,} × {types.features[name]}" for name, count in types.nodes.items()}
    edges = {str(relation): count for relation, count in types.edges.items()}
    return {"node_types": nodes, "edge_types": edges, "labelled": types.labelled}


def _edge_data(store: "Store") -> dict[str, Any]:
    """Return facts about the edges' weights and features, for those that the store has."""
    facts: dict[str, Any] = {}
    if store.types is not None:
        weights, features = store.types.weighted, store.types.edge_features
        facts |= {"edge_weights": [*map(str, sorted(weights))]} if weights else {}
        return facts | ({"edge_features": {str(one): count for one, count in features.items()}} if features else {})
    if store.has_edge_weight:
        facts["edge_weight"] = str(store.edge_weight("in").dtype)
    if store.num_edge_features:
        facts |= {"edge_features": store.num_edge_features, "edge_dtype": str(store.edge_features("in").dtype)}
    return facts


def active_layers(store: "Store", depth: int, hidden: int) -> list[dict[str, Any]]:
    """Return for each of ``depth`` layers, by ``train`` and ``evaluate``, its nodes, edges, and bytes read."""
    indptr, indices = store.topology("in")
    itemsize = store.array("x").itemsize if store.num_features else 4
    ordered = store.attributes["order"] == "hop"
    layers: list[dict[str, Any]] = []
    for layer in range(1, depth + 1):
        entry: dict[str, Any] = {"layer": layer}
        for use, name in (("train", "train_hops"), ("evaluate", "hops")):
            counts = store.attributes[name] if ordered else [store.num_nodes]
            nodes, sources = (int(counts[min(hops, len(counts) - 1)]) for hops in (depth - layer, depth - layer + 1))
            edges = int(indptr.read(nodes, nodes + 1)[0])
            width = store.num_features if layer == 1 else hidden
            nbytes = edges * indices.itemsize + sources * width * itemsize
            entry[use] = {"nodes": nodes, "edges": edges, "bytes": nbytes}
        layers.append(entry)
    return layers


def _show_layers(layers: list[dict[str, Any]]) -> None:
    """Print the table of layers, with one line for each layer and use."""
    click.echo(f"{'layer':<16} {'':<10}{'nodes':>16}{'edges':>18}{'bytes':>12}")
    for entry in layers:
        for use in ("train", "evaluate"):
            facts = entry[use]
            size = format_size(facts["bytes"])
            click.echo(f"{entry['layer']:<16} {use:<10}{facts['nodes']:>16,}{facts['edges']:>18,}{size:>12}")


def _format_value(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if name == "bytes":
            return f"{format_size(value)} ({value:,} bytes)"
        case int():
            return f"{value:,}"
        case list():
            shown = [_format_value("", item) for item in value[:_MOST_SHOWN]] + ["…"] * (len(value) > _MOST_SHOWN)
            return "  ".join(shown)
        case dict():
            return ", ".join(f"{key} {_format_value('', item)}" for key, item in value.items())
        case _:
            return str(value)
