# SPDX-License-Identifier: Apache-2.0
"""Edges that are left out of a store, as links to score a model by: PyG's RandomLinkSplit, but for exact counts.

Which ones, a hash of an edge's two ends says, and of a seed: both directions of an edge and its repetitions go
together, nothing has to be held to choose them, and so many are held out on average. Self-loops stay.

n edges of a block, E edges held out.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.errors import OptionError
from ooc.sizes import too_small
from ooc.sources.source import Source
from ooc.storage.array import replace_file
from ooc.storage.mixing import GOLDEN, mixed

_SPLITS = ("valid", "test")
_BYTES_PER_LINK = 96
"""While they are sorted, and written to memory as a file."""


@dataclass(frozen=True)
class HeldOut:
    """The shares of edges that are held out for validation and for testing, chosen by a ``seed``."""

    valid: float
    test: float
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "HeldOut":
        """``0.05,0.1`` or ``0.05,0.1,7``. OptionError for anything else."""
        parts = text.split(",")
        try:
            found = cls(float(parts[0]), float(parts[1]), *map(int, parts[2:3]))
        except (ValueError, IndexError):
            found = cls(-1, -1)
        known = found.valid >= 0 and found.test >= 0 and 0 < found.valid + found.test < 1
        if len(parts) > 3 or not known or not 0 <= found.seed < 2**63:
            raise OptionError(f"links to hold out, {text!r}, are no two shares below 1 together, such as 0.05,0.1")
        return found

    def of(self, sources: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        """Which split edges are held out for [n]: 0 validation, 1 testing; -1: none."""
        low, high = (np.asarray(side(sources, targets), dtype=np.uint64) for side in (np.minimum, np.maximum))
        seed = mixed(np.full(1, self.seed, dtype=np.uint64) + GOLDEN)
        share = mixed((low ^ mixed((high ^ seed) + GOLDEN)) + GOLDEN) / np.float64(2**64)
        found = np.where(share < self.valid, 0, np.where(share < self.valid + self.test, 1, -1)).astype(np.int8)
        found[sources == targets] = -1
        return found

    def write(self, source: Source, out: Path, *, undirected: bool, block_edges: int, budget_bytes: int) -> None:
        """``valid`` and ``test`` [2, E], heads above tails, by the ids of the source, into the file ``out``;
        ``undirected``: each pair once."""
        most = int((self.valid + self.test) * source.num_edges * 1.1) + 1000
        if (needed := _BYTES_PER_LINK * most + 24 * source.num_nodes * (source.ids is not None)) > budget_bytes:
            raise too_small(f"holding out {most:,} links", needed, budget_bytes)
        found: tuple[list[Any], list[Any]] = ([], [])
        for block in source.edges(block_edges):
            sources, targets = (np.asarray(side, dtype=np.int64) for side in block[:2])
            split = self.of(sources, targets)
            for number, pairs in enumerate(found):
                pairs.append(np.stack((sources, targets))[:, split == number])
        links = {}
        for name, pairs in zip(_SPLITS, found, strict=True):
            pairs_2E = np.concatenate(pairs, axis=1)
            links[name] = np.unique(np.sort(pairs_2E, axis=0) if undirected else pairs_2E, axis=1)
            pairs.clear()
        if source.ids is not None:
            ids = np.concatenate(list(source.ids(block_edges)))
            ids = ids.view(f"S{source.id_bytes}").reshape(-1) if source.id_bytes else ids
            links = {name: ids[pairs] for name, pairs in links.items()}
        file = io.BytesIO()
        given: dict[str, Any] = {name: pairs for name, pairs in links.items() if pairs.size}
        np.savez(file, **given)
        replace_file(out, file.getbuffer())
