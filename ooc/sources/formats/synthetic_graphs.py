# SPDX-License-Identifier: Apache-2.0
"""Made-up small graphs, any number of them in 24 bytes each: trees with chords, the more the larger a hidden number.

Graph g draws z in [0, 1) and its nodes n, half to three halves of the mean evenly. A node but the first is tied to a
random one before it, and round(2z(m - n̄ + 1)) chords join two random nodes, which gives m edges on average. Features
are unit noise, the first with z added. The label is z as one of the classes, or, where there are none, the value 2z - 1
and noise. What comes of a block of graphs depends on the parameters and the block alone.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from ooc.errors import SourceError
from ooc.sources.formats.many_graphs import graphs_source
from ooc.sources.labels import LabelForm
from ooc.sources.reading import Request
from ooc.sources.source import EdgeBlock, Ids, Source, ranges
from ooc.storage.array import AnyArray
from ooc.storage.store import Task

_BLOCK = 4096
_SIZES, _EDGES, _FEATURES, _LABELS = range(4)
_NOISE = 0.1


@dataclass(frozen=True, kw_only=True)
class GraphParameters:
    """What ``synthetic:graphs=…`` takes: how many graphs, ``nodes`` and ``edges`` of one on average, an edge counted
    once, and ``classes``, 0: values."""

    graphs: int
    nodes: int
    edges: int
    features: int
    classes: int = 0
    seed: int = 0

    def check(self) -> None:
        """SourceError for what makes no graphs."""
        limits = {
            "graphs": (1, 2**32),
            "nodes": (2, 2**20),
            "edges": (self.nodes - 1, 2**24),
            "features": (1, 2**20),
            "classes": (0, 2**16),
            "seed": (0, 2**63),
        }
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise SourceError(f"synthetic: {name}={getattr(self, name)} is not between {least} and {most}")


def synthetic_graphs(parameters: GraphParameters, request: Request) -> Source:
    """The graphs that ``parameters`` describe."""
    parameters.check()
    made = _Made(parameters)
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


class _Made:
    def __init__(self, parameters: GraphParameters) -> None:
        self._p = p = parameters
        self.sizes: Ids = np.empty(p.graphs, dtype=np.int64)
        self.chords: Ids = np.empty(p.graphs, dtype=np.int64)
        for block, (start, stop) in enumerate(ranges(p.graphs, _BLOCK)):
            random, z = self._random(_SIZES, block)
            least = max(2, p.nodes - p.nodes // 2)
            self.sizes[start:stop] = random.integers(least, 2 * p.nodes - least + 1, stop - start)
            self.chords[start:stop] = np.rint(2 * z * (p.edges - p.nodes + 1))

    def edges(self, size: int) -> Iterator[EdgeBlock]:
        for block, (start, stop) in enumerate(ranges(self._p.graphs, _BLOCK)):
            random, _ = self._random(_EDGES, block)
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
        for block, (start, stop) in enumerate(ranges(self._p.graphs, _BLOCK)):
            random, z = self._random(_FEATURES, block)
            signal = np.repeat(z.astype(np.float32), self.sizes[start:stop])
            for low, high in ranges(len(signal), size):
                values = random.standard_normal((high - low, self._p.features), dtype=np.float32)
                values[:, 0] += signal[low:high]
                yield values

    def labels(self) -> Iterator[AnyArray]:
        for block in range(-(-self._p.graphs // _BLOCK)):
            random, z = self._random(_LABELS, block)
            noise = _NOISE * random.standard_normal(len(z))
            yield (z * self._p.classes).astype(np.int64) if self._p.classes else 2 * z - 1 + noise

    def _random(self, stream: int, block: int) -> tuple[np.random.Generator, AnyArray]:
        """A generator, and the hidden numbers of the block's graphs."""
        count = min(_BLOCK, self._p.graphs - block * _BLOCK)
        hidden = np.random.Generator(np.random.SFC64([self._p.seed, block])).random(count)
        return np.random.Generator(np.random.SFC64([self._p.seed, 1 + stream, block])), hidden
