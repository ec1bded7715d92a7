# SPDX-License-Identifier: Apache-2.0
"""The node and edge types of a heterogeneous store, named as in PyG's ``HeteroData``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NODES, EDGES = "nodes", "edges"
"""The groups of a store that hold a group for each type."""
EDGE_WEIGHT, EDGE_FEATURES = "edge_weight", "edge_features"
"""The arrays of edge data."""


class EdgeType(NamedTuple):
    """An edge type, from nodes of type ``source`` to nodes of type ``target``."""

    source: str
    relation: str
    target: str

    @property
    def folder(self) -> str:
        """Its group in the store, ``author__writes__paper``."""
        return "__".join(self)

    @property
    def group(self) -> str:
        """The prefix of its arrays' names, ``edges/author__writes__paper/``; empty for ``ONLY``."""
        return f"{EDGES}/{self.folder}/" if self.relation else ""

    @property
    def reverse(self) -> "EdgeType":
        """The type of its reverse edges, as PyG's ``ToUndirected`` names it."""
        return EdgeType(self.target, f"rev_{self.relation}", self.source)

    @property
    def within_type(self) -> bool:
        """Whether both ends have the same node type."""
        return self.source == self.target

    def __str__(self) -> str:
        return " ".join(self)


ONLY = EdgeType("", "", "")
"""The edge type of a homogeneous store, between nodes of type ""."""


@dataclass(frozen=True, slots=True)
class Types:
    """The types of a heterogeneous store, with their sizes.

    ``nodes`` and ``features``: by node type, the numbers of nodes and of features (0: none); ``edges``: by edge type,
    their numbers; ``labelled``: the node type that has labels and splits. ``weighted``: the edge types with weights;
    ``edge_features``: the numbers of edge features, by edge types that have any; ``self_loops``: their number, by edge
    types within a node type (absent: unknown). ``id_bytes``: by unlabelled node type with ids other than numbers 0 …
    N-1, the bytes of the longest text, 0 for integers. ``hops``: in a store in hop order, by node type the rows within
    0, 1, … steps of scored rows, and those that contain all within as many steps of training rows.
    """

    nodes: Mapping[str, int]
    features: Mapping[str, int]
    edges: Mapping[EdgeType, int]
    labelled: str
    weighted: frozenset[EdgeType] = frozenset()
    edge_features: Mapping[EdgeType, int] = field(default_factory=dict)
    self_loops: Mapping[EdgeType, int] = field(default_factory=dict)
    id_bytes: Mapping[str, int] = field(default_factory=dict)
    hops: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "Types | None":
        """Return the types of a store with these attributes; None for a homogeneous one.

        AttributeError, KeyError, TypeError or ValueError for malformed ones.
        """
        if "node_types" not in attributes:
            return None
        nodes = {str(name): int(kind["num_nodes"]) for name, kind in attributes["node_types"].items()}
        features = {str(name): int(kind["num_features"]) for name, kind in attributes["node_types"].items()}
        kinds = {EdgeType(*map(str, kind["type"])): kind for kind in attributes["edge_types"]}
        edges = {one: int(kind["num_edges"]) for one, kind in kinds.items()}
        found = cls(
            nodes,
            features,
            edges,
            str(attributes["labelled"]),
            frozenset(one for one, kind in kinds.items() if kind.get("has_edge_weight", False)),
            {one: int(kind["num_edge_features"]) for one, kind in kinds.items() if "num_edge_features" in kind},
            {one: int(kind["num_self_loops"]) for one, kind in kinds.items() if "num_self_loops" in kind},
            {str(name): int(kind["id_bytes"]) for name, kind in attributes["node_types"].items() if "id_bytes" in kind},
            {
                str(name): (tuple(map(int, kind["hops"])), tuple(map(int, kind["train_hops"])))
                for name, kind in attributes["node_types"].items()
                if "hops" in kind
            },
        )
        if found.labelled not in nodes or any({one.source, one.target} - set(nodes) for one in edges):
            raise ValueError("a type that is named is none of the store's")
        return found

    @classmethod
    def of_any(cls, attributes: Mapping[str, Any]) -> "Types":
        """Return the types; for a homogeneous store one of each, "" and ``ONLY``."""
        columns = int(attributes.get("num_edge_features", 0))
        return cls.of(attributes) or cls(
            {"": int(attributes["num_nodes"])},
            {"": int(attributes["num_features"])},
            {ONLY: int(attributes["num_edges"])},
            "",
            frozenset([ONLY] if attributes.get("has_edge_weight", False) else []),
            {ONLY: columns} if columns else {},
            {ONLY: int(attributes["num_self_loops"])},
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` reads."""
        return {
            "node_types": {
                name: {
                    "num_nodes": count,
                    "num_features": self.features[name],
                    **({"id_bytes": self.id_bytes[name]} if name in self.id_bytes else {}),
                    **dict(zip(("hops", "train_hops"), map(list, self.hops.get(name, ())), strict=False)),
                }
                for name, count in self.nodes.items()
            },
            "edge_types": [
                {
                    "type": list(one),
                    "num_edges": count,
                    **({"has_edge_weight": True} if one in self.weighted else {}),
                    **({"num_edge_features": self.edge_features[one]} if one in self.edge_features else {}),
                    **({"num_self_loops": self.self_loops[one]} if one in self.self_loops else {}),
                }
                for one, count in self.edges.items()
            ],
            "labelled": self.labelled,
        }

    def by_folder(self, folder: str) -> EdgeType:
        """Return the edge type of that group."""
        return next(one for one in self.edges if one.folder == folder)

    def array_shapes(self, *, undirected: bool) -> dict[str, tuple[int, ...]]:
        """Return the arrays of features, edges, ids, and, if rows were reordered, original numbers, with their shapes.

        The labelled type is left out of the last, since it always has original numbers.
        """
        shapes: dict[str, tuple[int, ...]] = {
            features_name(name): (count, self.features[name])
            for name, count in self.nodes.items()
            if self.features[name]
        }
        shapes |= {of_nodes(name, "perm"): (self.nodes[name],) for name in self.hops if name != self.labelled}
        shapes |= {of_nodes(name, "ids"): ids_shape(self.nodes[name], width) for name, width in self.id_bytes.items()}
        for kind, count in self.edges.items():
            for side, rows in (("in", kind.target), ("out", kind.source))[: 1 if undirected else 2]:
                group = f"{kind.group}{side}"
                shapes |= {f"{group}/indptr": (self.nodes[rows] + 1,), f"{group}/indices": (count,)}
                shapes |= {f"{group}/{name}": shape for name, shape in self.edge_data_shapes(kind).items()}
            if self.self_loops.get(kind):
                shapes[f"{kind.group}in/self_loops"] = (self.nodes[kind.target],)
        return shapes

    def edge_data_shapes(self, kind: EdgeType) -> dict[str, tuple[int, ...]]:
        """Return the arrays of that type's edge data, in each direction, with their shapes."""
        weights = {EDGE_WEIGHT: (self.edges[kind],)} if kind in self.weighted else {}
        features = self.edge_features.get(kind)
        return {**weights, **({EDGE_FEATURES: (self.edges[kind], features)} if features else {})}


def of_nodes(node_type: str, name: str) -> str:
    """Return the path of the array ``name`` of a node type; "" is the type of a homogeneous store."""
    return f"{NODES}/{node_type}/{name}" if node_type else name


def ids_shape(nodes: int, id_bytes: int) -> tuple[int, ...]:
    """Return the shape of the ids of so many nodes: integers, or texts of at most so many bytes."""
    return (nodes, id_bytes) if id_bytes else (nodes,)


def features_name(node_type: str) -> str:
    """Return the name of the matrix of a node type's features."""
    return of_nodes(node_type, "x")
