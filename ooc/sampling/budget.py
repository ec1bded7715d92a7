# SPDX-License-Identifier: Apache-2.0
"""What batches take of memory at most, and what becomes of the rest: known before anything is allocated.

First comes what no batch can do without, the batches themselves as large as they can be; of what is left some lets
more batches be known ahead, arrays are held whole where they fit, and all else is for pages of those that do not.
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
"""One that is made, one that waits, and one in use."""
_WORK_BYTES, _MOST_WORK_BYTES, _WORK_SHARE = 1 << 18, 1 << 20, 64
"""Of the pages that rows are picked from at a time: such a part of a batch, within bounds. Each time costs as much as
dozens of pages do; beyond the most nothing is gained, as they leave a core's caches."""


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


class Division:
    """So much memory divided among batches of so many bytes, the model, and ``arrays``, each held whole or in pages.

    ``fixed``: what no batch can do without; ``beside``: what whoever uses the batches takes, where so many bytes are
    left for it. ``left``: what is left; ``resident``: the arrays that are held whole, which ``more`` bytes of others
    would make of them. BudgetError, which says ``what`` is too large and the ``remedy``, with the least memory that
    would do, for all ``processes`` together.
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
        """Hold an array whole, if that takes such a part of what is left at most."""
        if name not in self.resident and self.more[name] <= self.left // share:
            self.resident.add(name)
            self.left -= self.more[name]

    def plan(self, lookahead: int, cached: Mapping[str, int]) -> BatchPlan:
        """What comes of it; ``cached``: the bytes of the pages that are kept of arrays."""
        pages = {name: nbytes // frame_bytes() for name, nbytes in cached.items()}
        return BatchPlan(
            batch_bytes=self._batch_bytes,
            lookahead=lookahead,
            cache_pages=pages,
            resident=frozenset(self.resident),
            nbytes=self._memory_bytes - self.left + sum(pages.values()) * frame_bytes(),
            least_bytes=self._least,
        )
