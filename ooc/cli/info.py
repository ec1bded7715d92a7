# SPDX-License-Identifier: Apache-2.0
"""``ooc info``: what is in a store."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.storage.store import Store

_MOST_SHOWN = 12
"""Entries of a list on its line; JSON has all."""


@click.command(short_help="Show what a store holds.")
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def command(store: Path, as_json: bool) -> None:
    """Show what STORE holds: nodes, edges, features, classes, splits, size, where it came from.

    Edges are counted as stored: an undirected graph's in both directions. Where rows are in hop order,
    hops tells how many can reach a scored row within 0, 1, 2, … steps, train_hops in how many those lie
    that can reach a training row.
    """
    from ooc.storage.store import open_store

    facts = describe(open_store(store))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        click.echo(f"{name:<16} {_readable(name, value)}")


def describe(store: "Store") -> dict[str, Any]:
    """Everything that is known of the store without reading its arrays' contents."""
    facts = {
        "name": store.name,
        "path": str(store.path),
        "num_nodes": store.num_nodes,
        "num_edges": store.num_edges,
        "num_features": store.num_features,
        "num_classes": store.num_classes,
        "undirected": store.undirected,
        "num_self_loops": store.num_self_loops,
        "dtype": str(store.array("x").dtype),
        "split_sizes": dict(store.split_sizes),
        "bytes": store.nbytes,
        "order": store.attributes["order"],
    }
    for name in ("hops", "train_hops"):
        if name in store.attributes:
            facts[name] = store.attributes[name]
    facts["source"] = store.source
    return facts


def _readable(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if name == "bytes":
            return f"{format_size(value)} ({value:,} bytes)"
        case int():
            return f"{value:,}"
        case list():
            shown = [_readable("", item) for item in value[:_MOST_SHOWN]] + ["…"] * (len(value) > _MOST_SHOWN)
            return "  ".join(shown)
        case dict():
            return ", ".join(f"{key} {_readable('', item)}" for key, item in value.items())
        case _:
            return str(value)
