# SPDX-License-Identifier: Apache-2.0
"""What an opaque layer finds again in the backward pass, as far as budgets leave memory for it: graphs of runs of rows,
which are the same in every epoch, and what autograd has recorded on them. Nothing depends on what there is."""

from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from ooc.kernels.neighbourhood import Neighbourhood


class Spare:
    """Memory that a plan has set aside for it, ``nbytes`` in all; on any thread."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = Lock()

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes were left, which are taken then."""
        with self._lock:
            fits = nbytes <= self.left
            self.left -= nbytes * fits
        return fits

    def give(self, nbytes: int) -> None:
        """So many bytes are free again."""
        with self._lock:
            self.left += nbytes


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run whose ``result`` [R, O] autograd knows how it came of the nodes' rows ``x_SC``, in the state ``when`` of
    epoch and parameters."""

    near: Neighbourhood
    x_SC: Tensor
    result: Tensor
    when: Hashable
    nbytes: int


class Retained:
    """What one layer has retained, by the runs: for as long as there is ``spare`` memory."""

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._graphs: dict[Hashable, Neighbourhood] = {}
        self._recorded: dict[Hashable, Recorded] = {}

    def graph(self, run: Hashable) -> Neighbourhood | None:
        """Of a run that has been seen before."""
        return self._graphs.get(run)

    def keep_graph(self, run: Hashable, near: Neighbourhood) -> None:
        """For all epochs to come."""
        if run not in self._graphs and self._spare.take(near.nbytes):
            self._graphs[run] = near

    def may_record(self, run: Hashable, nbytes: int) -> bool:
        """Whether there are so many bytes for what autograd records of a run, which are taken then."""
        self.take(run)
        return self._spare.take(nbytes)

    def keep(self, run: Hashable, recorded: Recorded) -> None:
        """Until it is taken."""
        self._recorded[run] = recorded

    def take(self, run: Hashable) -> Recorded | None:
        """What there is of a run, which is no longer kept; its memory counts as free."""
        found = self._recorded.pop(run, None)
        if found is not None:
            self._spare.give(found.nbytes)
        return found
