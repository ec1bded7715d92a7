# SPDX-License-Identifier: Apache-2.0
"""The types of nodes and edges of a store that has several, named as PyG's ``HeteroData`` names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NODES, EDGES = "nodes", "edges"
"""The groups of a store that hold a group for each type."""
EDGE_WEIGHT, EDGE_FEATURES = "edge_weight", "edge_features"
"""The arrays of what edges carry."""


class EdgeType(NamedTuple):
    """Edges of one kind, from nodes of type ``source`` to nodes of type ``target``."""

    source: str
    relation: str
    target: str

    @property
    def folder(self) -> str:
        """Its group in the store, ``author__writes__paper``."""
        return "__".join(self)

    @property
    def group(self) -> str:
        """What the names of its arrays begin with, ``edges/author__writes__paper/``; nothing where it is ``ONLY``."""
        return f"{EDGES}/{self.folder}/" if self.relation else ""

    @property
    def reverse(self) -> "EdgeType":
        """That of its edges the other way round, as PyG's ``ToUndirected`` names it."""
        return EdgeType(self.target, f"rev_{self.relation}", self.source)

    @property
    def within_type(self) -> bool:
        """Whether they lead from nodes to nodes of the same type."""
        return self.source == self.target

    def __str__(self) -> str:
        return " ".join(self)


ONLY = EdgeType("", "", "")
"""The one type of edges of a store without types, between nodes of type ""."""


@dataclass(frozen=True, slots=True)
class Types:
    """``nodes`` and ``features`` by node type, ``edges`` by edge type: their numbers (of features 0: none);
    ``labelled``: the node type that has labels and splits. ``weighted``: the edge types whose edges have weights;
    ``edge_features``: how many features those have that have any; ``self_loops``: how many edges within a node type are
    such (not there: not known). ``id_bytes``: of the node types without labels whose nodes the source calls otherwise
    than by their numbers, the bytes of the longest text, 0 where those are numbers. ``hops``: of a store in hop order,
    by node type the rows within 0, 1, … steps of scored rows, and those that hold all within as many of training
    rows."""

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
        """Those of a store of these attributes; None where it has but one. AttributeError, KeyError, TypeError or
        ValueError where they are none."""
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
        """The same; of a store without types the one type of each, "" and ``ONLY``."""
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
        """What ``of`` reads."""
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
        """The edge type of that group."""
        return next(one for one in self.edges if one.folder == folder)

    def array_shapes(self, *, undirected: bool) -> dict[str, tuple[int, ...]]:
        """The arrays of features and edges, of what the source calls nodes, and of original numbers where rows are no
        longer in that order, and their shapes; but for the type that is labelled, which has such numbers anyway."""
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
        """The arrays of what edges of that type carry, in each direction, and their shapes."""
        weights = {EDGE_WEIGHT: (self.edges[kind],)} if kind in self.weighted else {}
        features = self.edge_features.get(kind)
        return {**weights, **({EDGE_FEATURES: (self.edges[kind], features)} if features else {})}


def of_nodes(node_type: str, name: str) -> str:
    """Where the array ``name`` of the nodes of a type lies; "" is the one type of a store without types."""
    return f"{NODES}/{node_type}/{name}" if node_type else name


def ids_shape(nodes: int, id_bytes: int) -> tuple[int, ...]:
    """Of what the source calls so many nodes: whole numbers, or texts of so many bytes at most."""
    return (nodes, id_bytes) if id_bytes else (nodes,)


def features_name(node_type: str) -> str:
    """The matrix of the features of a node type."""
    return of_nodes(node_type, "x")
