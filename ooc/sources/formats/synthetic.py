# SPDX-License-Identifier: Apache-2.0
"""Synthetic graphs of any size in no memory: planted communities, power-law degrees, noisy features.

Nodes are places in a shuffled order (see ``Shuffle``): place p belongs to class p mod C and is its (p div C)-th most
popular node. So "the k-th node of class c" is computed and not looked up. An edge draws a class, both ends by
popularity, and its target from the same class with probability ``_HOMOPHILY``. Edges and features come in blocks of
fixed size, each with its own generator: the graph depends on the parameters alone. N nodes, E edges, F features, C
classes.

Also sets of small synthetic graphs, any number of them in 24 bytes each: trees with chords, of which there are more the
larger a hidden number is. Graph g draws z in [0, 1) and its nodes n, uniformly between half and three halves of the
mean. Each node but the first is connected to a random earlier one, and round(2z(m - n̄ + 1)) chords join two random
nodes, which gives m edges on average. Features are unit noise; z is added to the first. The label is z as one of the
classes, or, without classes, the value 2z - 1 with noise. A block of graphs depends on the parameters and its number
alone.
"""

import math
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from ooc.errors import OptionError, SourceError
from ooc.sources.formats.many_graphs import graphs_source
from ooc.sources.labels import LabelForm, Shuffle
from ooc.sources.reading import SPLIT, Reader, Request
from ooc.sources.source import EdgeBlock, Ids, LabelBlock, RelationSource, Source, SourceTypes, ranges
from ooc.storage.array import AnyArray
from ooc.storage.store import Task
from ooc.storage.types import EdgeType

_GRAPHS_AT_ONCE = 4096
_GRAPH_SIZES, _GRAPH_EDGES, _GRAPH_FEATURES, _GRAPH_LABELS = range(4)
_LABEL_NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class GraphParameters:
    """The parameters of ``synthetic:graphs=…``: the number of graphs, and the mean ``nodes`` and ``edges`` of one.

    An edge counts once. ``classes`` 0: labels are values.
    """

    graphs: int
    nodes: int
    edges: int
    features: int
    classes: int = 0
    seed: int = 0

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """The least and the largest value of each parameter."""
        return {
            "graphs": (1, 2**32),
            "nodes": (2, 2**20),
            "edges": (self.nodes - 1, 2**24),
            "features": (1, 2**20),
            "classes": (0, 2**16),
            "seed": (0, 2**63),
        }


def synthetic_graphs(parameters: GraphParameters, request: Request) -> Source:
    """Return the graphs that ``parameters`` describe."""
    made = _SyntheticGraphs(parameters)
    classes = parameters.classes
    task, width = (Task.CLASSES, None) if classes else (Task.VALUES, 1)
    return graphs_source(
        name="synthetic",
        format="synthetic",
        sizes=made.sizes,
        values=lambda size: made.labels(),
        form=LabelForm(name="synthetic", task=task, width=width),
        request=request,
        classes=classes or None,
        num_edges=int((made.sizes - 1 + made.chords).sum()),
        num_features=parameters.features,
        features=made.features,
        edges=made.edges,
        symmetrize=True,
        fingerprint={"parameters": asdict(parameters)},
        description=asdict(parameters),
    )


class _SyntheticGraphs:
    def __init__(self, parameters: GraphParameters) -> None:
        self._p = p = parameters
        self.sizes: Ids = np.empty(p.graphs, dtype=np.int64)
        self.chords: Ids = np.empty(p.graphs, dtype=np.int64)
        for block, (start, stop) in enumerate(ranges(p.graphs, _GRAPHS_AT_ONCE)):
            random, z = self._random(_GRAPH_SIZES, block)
            least = max(2, p.nodes - p.nodes // 2)
            self.sizes[start:stop] = random.integers(least, 2 * p.nodes - least + 1, stop - start)
            self.chords[start:stop] = np.rint(2 * z * (p.edges - p.nodes + 1))

    def edges(self, size: int) -> Iterator[EdgeBlock]:
        for block, (start, stop) in enumerate(ranges(self._p.graphs, _GRAPHS_AT_ONCE)):
            random, _ = self._random(_GRAPH_EDGES, block)
            sizes, chords = self.sizes[start:stop], self.chords[start:stop]
            first = int(self.sizes[:start].sum()) + np.cumsum(sizes) - sizes
            of_node = np.repeat(np.arange(len(sizes)), sizes)
            place = np.arange(len(of_node)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            children = np.flatnonzero(place)
            parents = (random.random(len(children)) * place[children]).astype(np.int64)
            of_chord = np.repeat(np.arange(len(sizes)), chords)
            one = (random.random(len(of_chord)) * sizes[of_chord]).astype(np.int64)
            apart = 1 + (random.random(len(of_chord)) * (sizes[of_chord] - 1)).astype(np.int64)
            sources = np.concatenate([first[of_node[children]] + parents, first[of_chord] + one])
            other = (one + apart) % sizes[of_chord]
            targets = np.concatenate([first[of_node[children]] + place[children], first[of_chord] + other])
            for low, high in ranges(len(sources), size):
                yield EdgeBlock(sources[low:high], targets[low:high])

    def features(self, size: int) -> Iterator[AnyArray]:
        for block, (start, stop) in enumerate(ranges(self._p.graphs, _GRAPHS_AT_ONCE)):
            random, z = self._random(_GRAPH_FEATURES, block)
            signal = np.repeat(z.astype(np.float32), self.sizes[start:stop])
            for low, high in ranges(len(signal), size):
                values = random.standard_normal((high - low, self._p.features), dtype=np.float32)
                values[:, 0] += signal[low:high]
                yield values

    def labels(self) -> Iterator[AnyArray]:
        for block in range(-(-self._p.graphs // _GRAPHS_AT_ONCE)):
            random, z = self._random(_GRAPH_LABELS, block)
            noise = _LABEL_NOISE * random.standard_normal(len(z))
            yield (z * self._p.classes).astype(np.int64) if self._p.classes else 2 * z - 1 + noise

    def _random(self, stream: int, block: int) -> tuple[np.random.Generator, AnyArray]:
        """Return a generator, and the hidden numbers of the block's graphs."""
        count = min(_GRAPHS_AT_ONCE, self._p.graphs - block * _GRAPHS_AT_ONCE)
        hidden = np.random.Generator(np.random.SFC64([self._p.seed, block])).random(count)
        return np.random.Generator(np.random.SFC64([self._p.seed, 1 + stream, block])), hidden


PREFIX = "synthetic:"
_HOMOPHILY = 0.7
# Popularity of the k-th node falls as (k + 1)^-0.6: a power law of exponent 1 + 1/0.6 in the degrees.
_TAIL = 0.4
# Distance between two classes' means, in standard deviations of the noise around them.
_CLASS_DISTANCE = 2.0
_EDGE_BLOCK = 1 << 16
_FEATURE_BLOCK_VALUES = 1 << 19
_ORDER, _SPLIT, _CENTRES, _EDGES, _FEATURES, _RELATION_STREAMS = range(6)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of ``synthetic:…``. ``labelled``: the fraction of nodes with a label; ``train``: the fraction of
    those.

    ``types``: 1, or 3 node types: papers, which are labelled and half of all nodes, authors and topics, with 4 edge
    types (``_RELATIONS``). ``bare``: of the three types, only papers have features.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    labelled: float = 1.0
    train: float = 0.5
    directed: int = 1
    types: int = 1
    bare: int = 0
    seed: int = 0

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        """The least and the largest value of each parameter."""
        return {
            "nodes": (2, 2**32),
            "edges": (0, 2**48),
            "features": (0, 2**20),
            "classes": (1, self.nodes),
            "labelled": (0, 1),
            "train": (0, 1),
            "directed": (0, 1),
            "types": (1, 3),
            "bare": (0, int(self.types == 3)),
            "seed": (0, 2**63),
        }


def parse(text: str, kind: type[Any] = Parameters) -> Any:
    """Return the parameters in ``"synthetic:nodes=1000,edges=5000,…"``; raise SourceError, in one line, for a wrong
    one."""
    kinds = {field.name: float if field.name in ("labelled", "train") else int for field in fields(kind)}
    values: dict[str, int | float] = {}
    for item in filter(None, text.removeprefix(PREFIX).split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in kinds or name in values:
            problem = "given twice" if name in values else f"unknown; known are {', '.join(kinds)}"
            raise SourceError(f"{PREFIX} {name!r} is {problem}")
        try:
            number = float(value)
            values[name] = int(number) if kinds[name] is int and number == int(number) else number
        except (ValueError, OverflowError):
            raise SourceError(f"{PREFIX} {name}={value!r} is no number") from None
        if type(values[name]) is not kinds[name]:
            raise SourceError(f"{PREFIX} {name}={value} is no whole number")
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise SourceError(f"{PREFIX} {', '.join(missing)} missing")
    found = kind(**values)
    for name, (least, most) in found.limits.items():
        if not least <= getattr(found, name) <= most:
            raise SourceError(f"{PREFIX} {name}={getattr(found, name)} is not between {least} and {most}")
    return found


def _open(text: str, request: Request) -> Source:
    if "graphs" in (item.partition("=")[0].strip() for item in text.removeprefix(PREFIX).split(",")):
        return synthetic_graphs(parse(text, GraphParameters), request)
    if request.split is not None:
        raise OptionError(f"synthetic has a split of its own; split={request.split} cannot be chosen")
    return synthetic_source(text)


def synthetic_source(text: str) -> Source:
    """Return the graph that ``text`` describes."""
    parameters: Parameters = parse(text)
    if parameters.types > 1:
        return _typed_source(parameters)
    graph = _Graph(parameters)
    return replace(
        _nodes_of(graph, parameters),
        num_edges=parameters.edges,
        edges=lambda size: graph.edges(),
        symmetrize=not parameters.directed,
        fingerprint={"parameters": asdict(parameters)},
        description={name: value for name, value in asdict(parameters).items() if name not in ("types", "bare")},
    )


_NODES = {"paper": (1 / 2, 1), "author": (3 / 8, 1 / 2), "topic": (1 / 8, 1 / 4)}
"""Each node type's share of all nodes, and of the features."""
_RELATIONS = {
    EdgeType("author", "writes", "paper"): 1 / 4,
    EdgeType("paper", "written_by", "author"): 1 / 4,
    EdgeType("paper", "cites", "paper"): 3 / 8,
    EdgeType("topic", "covers", "paper"): 1 / 8,
}
"""Each edge type's share of all edges. No edge leads to a topic."""


def _typed_source(parameters: Parameters) -> Source:
    """Return a heterogeneous graph: each node type is a graph without edges, and all edges are drawn between these."""
    if parameters.types == 2 or parameters.nodes < 8 * parameters.classes or not parameters.directed:
        raise SourceError(f"{PREFIX} types is 1 or 3, the latter of directed graphs of 8 nodes a class")
    graphs, nodes, classes = {}, {}, parameters.classes
    with_features = [*_NODES][: 1 if parameters.bare else None] if parameters.features else []
    for at, (name, (share, width)) in enumerate(_NODES.items()):
        of_type = replace(
            parameters,
            nodes=max(classes, round(share * parameters.nodes)),
            features=max(1, round(width * parameters.features)) if name in with_features else 0,
            edges=0,
            seed=parameters.seed + at,
        )
        graphs[name] = graph = _Graph(of_type)
        nodes[name] = _nodes_of(graph, of_type)
    counts = {relation: round(share * parameters.edges) for relation, share in _RELATIONS.items()}
    edges = {
        relation: RelationSource(count, partial(_edges_between, graphs, relation, count))
        for relation, count in counts.items()
    }
    return replace(
        nodes["paper"],
        num_edges=sum(counts.values()),
        fingerprint={"parameters": asdict(parameters)},
        description=asdict(parameters),
        types=SourceTypes(nodes, edges, "paper"),
    )


def _nodes_of(graph: "_Graph", parameters: Parameters) -> Source:
    return Source(
        name="synthetic",
        format="synthetic",
        num_nodes=parameters.nodes,
        num_features=parameters.features,
        num_classes=parameters.classes,
        features=lambda size: graph.features(),
        labels=graph.labels,
    )


def _edges_between(graphs: "dict[str, _Graph]", relation: EdgeType, count: int, size: int) -> Iterator[EdgeBlock]:
    """Yield ``count`` edges of one type. Those of ``written_by`` are the reverse of those of ``writes``."""
    back = relation.relation == "written_by"
    drawn = EdgeType("author", "writes", "paper") if back else relation
    stream = _RELATION_STREAMS + [*_RELATIONS].index(drawn)
    source, target = graphs[drawn.source], graphs[drawn.target]
    for block, (start, stop) in enumerate(ranges(count, _EDGE_BLOCK)):
        sources, targets = source.places_of_ends(target, stream, block, stop - start)
        ends = source.order.at(sources), target.order.at(targets)
        yield EdgeBlock(*(reversed(ends) if back else ends))


class _Graph:
    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self.order = Shuffle(parameters.nodes, parameters.seed, stream=_ORDER)
        self._splits = Shuffle(parameters.nodes, parameters.seed, stream=_SPLIT)

    def edges(self) -> Iterator[EdgeBlock]:
        """Yield E edges without self-loops; duplicates occur, mostly between hubs."""
        p = self._p
        for block, (start, stop) in enumerate(ranges(p.edges, _EDGE_BLOCK)):
            sources, targets = self.places_of_ends(self, _EDGES, block, stop - start)
            loops = sources == targets
            targets[loops] = (targets[loops] + p.classes) % p.nodes  # The next in its class, mostly.
            loops &= sources == targets
            targets[loops] = (targets[loops] + 1) % p.nodes
            yield EdgeBlock(self.order.at(sources), self.order.at(targets))

    def places_of_ends(self, other: "_Graph", stream: int, block: int, count: int) -> tuple[Ids, Ids]:
        """Return the places of the ends of ``count`` edges, to nodes of this graph or another one with as many
        classes."""
        random = self._random(stream, block)
        classes = random.integers(0, self._p.classes, count)
        sources = self._places(classes, random)
        elsewhere = random.random(count, dtype=np.float32) >= _HOMOPHILY
        classes[elsewhere] = random.integers(0, self._p.classes, int(elsewhere.sum()))
        return sources, other._places(classes, random)

    def features(self) -> Iterator[AnyArray]:
        """Yield class mean plus unit noise, float32 [rows, F]."""
        p = self._p
        spread = _CLASS_DISTANCE / math.sqrt(2 * p.features)
        centres = self._random(_CENTRES, 0).standard_normal((p.classes, p.features), dtype=np.float32)
        centres *= np.float32(spread)
        rows = max(1, _FEATURE_BLOCK_VALUES // p.features)
        for block, (start, stop) in enumerate(ranges(p.nodes, rows)):
            values = self._random(_FEATURES, block).standard_normal((stop - start, p.features), dtype=np.float32)
            values += centres[self._classes(start, stop)]
            yield values

    def labels(self, size: int) -> Iterator[LabelBlock]:
        """Yield the classes of the labelled nodes, with random splits of exact sizes."""
        p = self._p
        labelled = round(p.labelled * p.nodes)
        train = round(p.train * labelled)
        valid = train + (labelled - train + 1) // 2
        for start, stop in ranges(p.nodes, size):
            place = self._splits.place_of(np.arange(start, stop, dtype=np.int64))
            known = place < labelled
            y = np.where(known, self._classes(start, stop), -1)
            validating = (place >= train) & (place < valid)
            yield LabelBlock(y, place < train, validating, known & (place >= valid))

    def _classes(self, start: int, stop: int) -> Ids:
        return self.order.place_of(np.arange(start, stop, dtype=np.int64)) % self._p.classes

    def _places(self, classes: Ids, random: np.random.Generator) -> Ids:
        """Return places of nodes of ``classes``, drawn by popularity."""
        p = self._p
        members = (p.nodes - 1 - classes) // p.classes + 1
        # The inverse of the cumulated popularity ∝ (k + 1)^0.4 − 1, of a continuous k in [0, members).
        reach = (members + 1.0) ** _TAIL - 1.0
        base = random.random(len(classes)) * reach + 1.0
        rank: Ids = (base * base * np.sqrt(base) - 1.0).astype(np.int64)  # base ** (1 / _TAIL) - 1
        np.minimum(rank, members - 1, out=rank)
        return rank * p.classes + classes

    def _random(self, stream: int, block: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._p.seed, stream, block]))


READER = Reader(
    needs=f"{PREFIX}nodes=...,edges=...,features=...,classes=...: a made-up graph; graphs=... many, types=3 of 3 types",
    folder=None,
    recognises=lambda path: str(path).startswith(PREFIX),
    open=lambda path, request: _open(str(path), request),
    takes=frozenset((SPLIT,)),
)
