# SPDX-License-Identifier: Apache-2.0
"""Edges that are left out of a store, as links to score a model by: PyG's RandomLinkSplit, except for exact counts.

A hash of an edge's two ends and of a seed selects them. Both directions of an edge and its duplicates go together, no
memory is needed to choose them, and the shares hold on average. Self-loops stay. In a heterogeneous graph they are
edges of one type, with those of its reverse type; where nodes have one type, of all edge types at once.

n edges of a block, E edges held out.
"""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.errors import OptionError
from ooc.sizes import too_small
from ooc.sources.source import Source
from ooc.storage.array import replace_file
from ooc.storage.mixing import GOLDEN, mixed
from ooc.storage.types import EdgeType

_SPLITS = ("valid", "test")
_BYTES_PER_LINK = 96
"""Bytes per link while links are sorted and written."""


@dataclass(frozen=True)
class HeldOut:
    """The shares of edges held out for validation and testing, chosen by a ``seed``.

    In a heterogeneous graph these are edges of ``edge_type``, and their reverses among the edges of type ``reverse``.
    """

    valid: float
    test: float
    seed: int = 0
    edge_type: EdgeType | None = None
    reverse: EdgeType | None = None

    @classmethod
    def parse(cls, text: str) -> "HeldOut":
        """Return the shares in ``0.05,0.1``, ``0.05,0.1,7``, ``0.05,0.1:user,rates,movie`` or
        ``0.05,0.1:user,rates,movie:rated_by``; raise OptionError for anything else."""
        shares, colon, kinds = text.partition(":")
        kind, _, reverse = kinds.partition(":")
        parts, ends = shares.split(","), kind.split(",")
        try:
            found = cls(float(parts[0]), float(parts[1]), int(parts[2]) if parts[2:] else 0)
        except (ValueError, IndexError):
            found = cls(-1, -1)
        known = found.valid >= 0 and found.test >= 0 and 0 < found.valid + found.test < 1
        if len(parts) > 3 or not known or not 0 <= found.seed < 2**63 or (colon and len(ends) != 3):
            raise OptionError(f"links to hold out, {text!r}, are no two shares below 1 together, such as 0.05,0.1")
        if not colon:
            return found
        edge_type = EdgeType(*ends)
        other = EdgeType(edge_type.target, reverse, edge_type.source) if reverse else edge_type.reverse
        return replace(found, edge_type=edge_type, reverse=other)

    def check(self, source: Source) -> None:
        """Raise OptionError where the graph has no such edges, or the edge type is missing."""
        if source.graph_offsets is not None:
            which = "many graphs, none of whose links are held out"
            raise OptionError(f"{source.name} has {which}; leave out hold_out_links=")
        if source.types is None and self.edge_type is not None:
            raise OptionError(f"{source.name} has one type of edges; leave out :{','.join(self.edge_type)}")
        known = self.edge_type in source.edges_of or (self.edge_type is None and len(source.nodes_of) == 1)
        if source.types is not None and not known:
            there = "; ".join(map(",".join, source.types.edges))
            raise OptionError(
                f"{source.name} has edges {there}; say which are held out, as hold_out_links='0.05,0.1:…'"
            )

    def kept_of(
        self,
        relation: EdgeType,
        sources: npt.NDArray[Any],
        targets: npt.NDArray[Any],
        kept: npt.NDArray[np.bool_] | None,
    ) -> npt.NDArray[np.bool_] | None:
        """Return which edges of a type stay [n], among those ``kept`` so far; None: all of them."""
        if self.edge_type in (None, relation):
            stay = self.of(sources, targets) < 0
        elif relation == self.reverse:
            stay = self.of(targets, sources) < 0
        else:
            return kept
        return stay if kept is None else kept & stay

    def of(self, sources: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        """Return the split for which edges are held out [n]: 0 validation, 1 testing; -1: none."""
        within = self.edge_type is None or self.edge_type.within_type
        ends = (np.minimum(sources, targets), np.maximum(sources, targets)) if within else (sources, targets)
        low, high = (np.asarray(end, dtype=np.uint64) for end in ends)
        seed = mixed(np.full(1, self.seed, dtype=np.uint64) + GOLDEN)
        share = mixed((low ^ mixed((high ^ seed) + GOLDEN)) + GOLDEN) / np.float64(2**64)
        found = np.where(share < self.valid, 0, np.where(share < self.valid + self.test, 1, -1)).astype(np.int8)
        if within:
            found[sources == targets] = -1
        return found

    def write(self, source: Source, out: Path, *, undirected: bool, block_edges: int, budget_bytes: int) -> None:
        """Write ``valid`` and ``test`` [2, E], heads above tails, by the ids of the source, to the file ``out``.

        ``undirected``: each pair once. With several edge types [3, E], with their numbers between heads and tails.
        """
        edges = [found for one, found in source.edges_of.items() if self.edge_type in (None, one)]
        types = [*source.nodes_of] * 2 if self.edge_type is None else [self.edge_type.source, self.edge_type.target]
        called = {kind: source.nodes_of[kind] for kind in types if source.nodes_of[kind].ids is not None}
        most = int((self.valid + self.test) * sum(one.num_edges for one in edges) * 1.1) + 1000
        if (needed := _BYTES_PER_LINK * most + 24 * sum(one.num_nodes for one in called.values())) > budget_bytes:
            raise too_small(f"holding out {most:,} links", needed, budget_bytes)
        found: tuple[list[Any], list[Any]] = ([], [])
        for kind, block in ((kind, block) for kind, one in enumerate(edges) for block in one.edges(block_edges)):
            sources, targets = (np.asarray(side, dtype=np.int64) for side in block[:2])
            split = self.of(sources, targets)
            pairs_2n = np.stack((sources, targets))
            pairs_2n = np.sort(pairs_2n, axis=0) if undirected else pairs_2n
            pairs_2n = np.insert(pairs_2n, 1, kind, axis=0) if len(edges) > 1 else pairs_2n
            for number, pairs in enumerate(found):
                pairs.append(pairs_2n[:, split == number])
        links = {}
        for name, pairs in zip(_SPLITS, found, strict=True):
            links[name] = np.unique(np.concatenate(pairs, axis=1), axis=1)
            pairs.clear()
        ids = {kind: _read_ids(one, block_edges) for kind, one in called.items()}
        for name, links_LE in links.items() if called else ():
            heads, *kinds, tails = links_LE
            ends = [ids[one][end] if one in ids else end for one, end in zip(types, (heads, tails), strict=True)]
            links[name] = np.stack([ends[0], *kinds, ends[1]])
        file = io.BytesIO()
        given: dict[str, Any] = {name: pairs for name, pairs in links.items() if pairs.size}
        np.savez(file, **given)
        replace_file(out, file.getbuffer())


def _read_ids(source: Source, block_rows: int) -> npt.NDArray[Any]:
    """Return the source's ids of its nodes."""
    assert source.ids is not None
    ids = np.concatenate(list(source.ids(block_rows)))
    return ids.view(f"S{source.id_bytes}").reshape(-1) if source.id_bytes else ids
