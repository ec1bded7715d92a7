# SPDX-License-Identifier: Apache-2.0
"""What every format is read as: a graph that hands out edges, features and labels in blocks.

Shapes: N nodes, E edges, F features.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ooc.storage.array import AnyArray

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class EdgeBlock(NamedTuple):
    """Some edges: node ids ``sources`` and ``targets``, [n] each; not yet checked."""

    sources: Ids
    targets: Ids


class LabelBlock(NamedTuple):
    """Some rows' labels ``y`` [n] (-1: none) and membership in the splits, [n] each; not yet checked."""

    y: Ids
    train: Mask
    valid: Mask
    test: Mask


@dataclass(frozen=True, kw_only=True)
class Source:
    """A graph to convert. The three callables start afresh each time and yield blocks in order.

    ``edges(n)`` and ``features(n)`` yield at most about n edges or rows at a time (a generator may keep
    to blocks of its own, smaller ones), ``labels(n)`` likewise. ``num_edges`` counts entries as given.
    ``num_classes`` None: one more than the largest label. ``resident_bytes`` is what the source itself
    holds in memory, to be counted against the budget. ``description`` goes into the store's ``source``.
    """

    name: str
    format: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int | None
    edges: Callable[[int], Iterator[EdgeBlock]]
    features: Callable[[int], Iterator[AnyArray]]
    labels: Callable[[int], Iterator[LabelBlock]]
    symmetrize: bool = False
    drop_self_loops: bool = False
    resident_bytes: int = 0
    description: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` pieces of ``range(total)``, ``step`` long but for the last."""
    for start in range(0, total, step):
        yield start, min(start + step, total)
