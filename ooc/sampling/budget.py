# SPDX-License-Identifier: Apache-2.0
"""The memory that batches take at most, and the division of the rest: known before anything is allocated.

First comes what every batch needs, with batches as large as they can be. Of the memory that is left, a part lets more
batches be known ahead. Arrays are held whole where they fit; the rest is for pages of the other arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ooc.errors import BudgetError
from ooc.plan.program.capacity import budget_of
from ooc.prefetch.engine import PAGE_BYTES
from ooc.sampling.pages import (
    frame_bytes,
    most_pages_of_row,
    paged_bytes,
    resident_bytes,
)
from ooc.sizes import format_size
from ooc.storage.array import Array

BATCHES_ALIVE = 3
"""Batches in memory at once: one being made, one waiting, and one in use."""
_WORK_BYTES, _MOST_WORK_BYTES, _WORK_SHARE = 1 << 18, 1 << 20, 64
"""The size of the window of pages that rows are copied from at a time: a share of a batch, within bounds.

Each window costs as much as dozens of pages do. A window larger than the maximum leaves a core's caches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A division of memory among batches and arrays.

    A batch takes ``batch_bytes`` at most. ``resident`` arrays are held whole; of each other one, ``cache_pages`` pages
    are kept. ``lookahead`` batches are known ahead, or sampled together. All take ``nbytes`` together; ``least_bytes``
    would suffice.
    """

    batch_bytes: int
    lookahead: int
    cache_pages: Mapping[str, int]
    resident: frozenset[str]
    nbytes: int
    least_bytes: int


def work_pages(array: Array, batch_bytes: int) -> int:
    """Return the pages of ``array`` that rows are copied from at a time, for batches of ``batch_bytes``."""
    wanted = min(max(batch_bytes // _WORK_SHARE, _WORK_BYTES), _MOST_WORK_BYTES)
    return max(wanted // PAGE_BYTES, 2 * most_pages_of_row(array))


class Division:
    """The memory divided among batches of ``batch_bytes``, the model, and ``arrays``, each held whole or in pages.

    ``fixed``: bytes that every batch needs; ``beside``: from the bytes left, those that the batches' user (the model)
    takes. ``left``: bytes left; ``resident``: the arrays held whole; ``more``: the bytes that holding another array
    whole costs. BudgetError, which says ``what`` is too large and the ``remedy``, names the least memory that would
    suffice, for all ``processes`` together.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        batch_bytes: int,
        fixed: int,
        beside: Callable[[int], int],
        memory_bytes: int,
        processes: int,
        *,
        what: str,
        remedy: str,
    ) -> None:
        self._batch_bytes, self._memory_bytes = batch_bytes, memory_bytes
        whole = {array.name: resident_bytes(array) for array in arrays}
        paged = {array.name: paged_bytes(array, work_pages(array, batch_bytes)) for array in arrays}
        least = fixed + sum(min(whole[name], paged[name]) for name in whole)
        beside_bytes = beside(max(0, memory_bytes - least))
        self._least = least = least + beside_bytes
        if least > memory_bytes:
            model = f" and {format_size(beside_bytes)} for the model" if beside_bytes else ""
            each = f" in each of {processes} processes" if processes > 1 else ""
            raise BudgetError(
                f"{what} at most, {format_size(batch_bytes)} each{model}, and need {format_size(least)} of memory{each}"
                f"; it may take {format_size(memory_bytes)}; give memory='{budget_of(processes * least)}', {remedy}"
            )
        self.left = memory_bytes - least
        self.more = {name: max(0, whole[name] - paged[name]) for name in whole}
        self.resident = {name for name, more in self.more.items() if not more}

    def hold(self, name: str, share: int = 1) -> None:
        """Hold an array whole if that takes at most one ``share``-th of the memory left."""
        if name not in self.resident and self.more[name] <= self.left // share:
            self.resident.add(name)
            self.left -= self.more[name]

    def plan(self, lookahead: int, cached: Mapping[str, int]) -> BatchPlan:
        """Return the division; ``cached``: the bytes of pages to keep of each array."""
        pages = {name: nbytes // frame_bytes() for name, nbytes in cached.items()}
        return BatchPlan(
            batch_bytes=self._batch_bytes,
            lookahead=lookahead,
            cache_pages=pages,
            resident=frozenset(self.resident),
            nbytes=self._memory_bytes - self.left + sum(pages.values()) * frame_bytes(),
            least_bytes=self._least,
        )
