# SPDX-License-Identifier: Apache-2.0
"""What sampled batches take of memory at most, and what becomes of the rest: known before anything is allocated.

First comes what no batch can do without: where every row's in-edges begin, where a node is in a batch, the batches
themselves as large as the degrees and fanouts let them be. Of what is left a third at most lets more batches be
sampled ahead; topology and labels stay in memory where they take less than their share; all else is for pages of the
features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ooc.errors import BudgetError
from ooc.plan.program.capacity import budget_of
from ooc.prefetch.engine import PAGE_BYTES
from ooc.sampling.pages import (
    MOST_BATCHES,
    frame_bytes,
    most_pages_of_row,
    paged_bytes,
    pages_of,
    resident_bytes,
)
from ooc.sizes import format_size
from ooc.storage.array import Array
from ooc.storage.store import Store

BATCHES_ALIVE = 3
"""One that is made, one that waits, and one in use."""
_SUPERBATCHES = 3
"""One whose rows are read, one that is known to come next, and one that is sampled meanwhile."""
_WORK_BYTES, _MOST_WORK_BYTES, _WORK_SHARE = 1 << 18, 1 << 20, 64
"""Of the pages that rows are picked from at a time: such a part of a batch, within bounds. Each time costs as much as
dozens of pages do; beyond the most nothing is gained, as they leave a core's caches."""
_MOST_LOOKAHEAD = 64
"""Batches ahead: beyond, what more is known of hardly saves a read."""
_LOOKAHEAD_SHARE, _TOPOLOGY_SHARE, _ROWS_SHARE = 3, 2, 8
"""Of what is left: sampling ahead takes a third, topology a half, and another array an eighth, at most."""
_DRAWN_EDGE_BYTES = 96
"""Of each edge of a batch while it is drawn: places, random numbers, what is sorted."""
_TAKEN_BYTES, _TAKEN_PAGE_BYTES = 48, 96
"""Of each row while rows are picked, and of each page of theirs: their order, where they lie, and what is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How memory is divided. A batch takes ``batch_bytes`` at most; so many pages of arrays are kept, ``cache_pages``,
    where they are not ``resident``; ``lookahead`` batches are in sight, or sampled at once. All take ``nbytes``
    together, at the least ``least_bytes`` would do."""

    batch_bytes: int
    lookahead: int
    cache_pages: Mapping[str, int]
    resident: frozenset[str]
    nbytes: int
    least_bytes: int


def work_pages(array: Array, batch_bytes: int) -> int:
    """Pages that rows of the array are picked from at a time, for batches of so many bytes."""
    wanted = min(max(batch_bytes // _WORK_SHARE, _WORK_BYTES), _MOST_WORK_BYTES)
    return max(wanted // PAGE_BYTES, 2 * most_pages_of_row(array))


def plan_sampling(
    store: Store,
    features: Array,
    others: Sequence[Array],
    *,
    most: tuple[int, int],
    seeds: int,
    batches: int,
    batch_size: int,
    fanouts: Sequence[int],
    memory_bytes: int,
    offset_bytes: int,
    beside: Callable[[int], int],
    processes: int = 1,
) -> BatchPlan:
    """The plan for batches of at most ``most`` nodes and edges; ``others``: the arrays read beside the features, the
    neighbours first; ``beside``: what whoever uses the batches takes, where so many bytes are left for it. BudgetError
    with the least memory that would do, for all ``processes`` together."""
    nodes, edges = most
    node_rows = sum(array.row_bytes for array in (features, *others) if array.shape[0] == store.num_nodes)
    edge_rows = sum(array.row_bytes for array in others[1:] if array.shape[0] == store.num_edges)
    batch_bytes = nodes * (node_rows + 16) + edges * (edge_rows + 24)
    width = 4 if max(store.num_edges, store.num_nodes) < 2**31 else 8
    pages = min(pages_of(features), nodes * most_pages_of_row(features))
    ids = (width + 4) * (nodes + edges) + 6 * pages
    ahead = _SUPERBATCHES * ids + _TAKEN_BYTES * edges  # neighbours of all of them are looked up together
    fixed = offset_bytes + 4 * store.num_nodes + 24 * seeds
    fixed += BATCHES_ALIVE * batch_bytes + _DRAWN_EDGE_BYTES * edges + _TAKEN_BYTES * (nodes + edges)
    fixed += _TAKEN_PAGE_BYTES * (pages + min(pages_of(others[0]), edges))
    own, *each_other = (
        paged_bytes(array, cache_pages=0, work_pages=work_pages(array, batch_bytes)) for array in (features, *others)
    )
    paged = dict(zip([array.name for array in others], each_other, strict=True))
    small = {array.name: resident_bytes(array) for array in (features, *others)}
    least = fixed + ahead + sum(min(small[name], nbytes) for name, nbytes in paged.items())
    least += min(small[features.name], own)
    beside_bytes = beside(max(0, memory_bytes - least))
    least += beside_bytes
    if least > memory_bytes:
        drawn = ", ".join("all" if fanout < 0 else str(fanout) for fanout in fanouts)
        model = f" and {format_size(beside_bytes)} for the model" if beside_bytes else ""
        each = f" in each of {processes} processes" if processes > 1 else ""
        wanted = budget_of(processes * least)
        raise BudgetError(
            f"batches of {batch_size:,} nodes and of neighbours {drawn} come to {nodes:,} nodes and {edges:,} edges at "
            f"most, {format_size(batch_bytes)} each{model}, and need {format_size(least)} of memory{each}; it may take "
            f"{format_size(memory_bytes)}; give memory='{wanted}', a smaller batch or smaller fanouts"
        )
    left = memory_bytes - least
    resident = {name for name, nbytes in paged.items() if small[name] <= nbytes}
    everything = small[features.name] - min(small[features.name], own)
    everything += sum(max(0, small[name] - nbytes) for name, nbytes in paged.items())
    all_fits = everything <= left
    lookahead = min(MOST_BATCHES, _MOST_LOOKAHEAD, batches, 1 + left // _LOOKAHEAD_SHARE // max(1, ahead))
    if all_fits:  # nothing is gained by knowing more
        lookahead = min(batches, 1 + (left - everything) // _LOOKAHEAD_SHARE // max(1, ahead), 4)
    left -= (lookahead - 1) * ahead
    for place, array in enumerate(others):
        more = small[array.name] - paged[array.name]
        share = _ROWS_SHARE if place else _TOPOLOGY_SHARE
        if array.name not in resident and (all_fits or more <= left // share):
            resident.add(array.name)
            left -= more
    cache_pages = 0
    if all_fits or small[features.name] <= left + own:
        resident.add(features.name)
        left -= max(0, small[features.name] - own)
    else:
        cache_pages = left // frame_bytes()
        left -= cache_pages * frame_bytes()
    return BatchPlan(
        batch_bytes=batch_bytes,
        lookahead=lookahead,
        cache_pages={features.name: cache_pages},
        resident=frozenset(resident),
        nbytes=memory_bytes - left,
        least_bytes=least,
    )
