# SPDX-License-Identifier: Apache-2.0
"""How much memory a piece of code takes at once, by watching every storage that its operators make, and how many
operators it has.

For code of the user's own, whose insides are not known: what it allocates on graphs of a few sizes tells how that grows
with edges and nodes. What an operator needs for itself while it runs is not seen, hence ``_MARGIN``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MARGIN = 1.25
"""For what operators need for themselves: a copy of an index, partial sums."""
_NODES, _MORE_NODES = 64, 320
_EDGES, _MORE_EDGES = 256, 1280
_SKEWED = 1.5
"""How much more a layer may take where one row has all the edges."""

GraphRun = Callable[[int, int, bool], int]
"""Peak bytes of a run on a graph of so many nodes and edges; with True all edges run into one of them."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and the bytes of storages that they have made and that are still alive; ``known`` ones do not
    count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes: int = 0
        self.operators = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alive.clear()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


def peak_bytes(run: Callable[[], object], known: Iterable[Tensor]) -> int:
    """The most bytes alive at once that ``run`` makes; ``known`` are there before."""
    watch = _Watch(known)
    with watch:
        run()
    return watch.peak_bytes


def operators(run: Callable[[], object]) -> int:
    """How many operators of torch ``run`` has, views included."""
    watch = _Watch(())
    with watch:
        run()
    return watch.operators


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one run takes for every edge and every node."""

    edge_bytes: int
    node_bytes: int


def footprint(run: GraphRun) -> Footprint | None:
    """What ``run`` takes; None where that grows faster than with nodes and edges."""
    base = run(_NODES, _EDGES, False)
    if run(_NODES, _EDGES, True) > _SKEWED * base:
        return None
    more_edges = run(_NODES, _MORE_EDGES, False)
    more_nodes = run(_MORE_NODES, _EDGES, False)
    return Footprint(
        _rounded(_MARGIN * max(0, more_edges - base) / (_MORE_EDGES - _EDGES)),
        _rounded(_MARGIN * max(0, more_nodes - base) / (_MORE_NODES - _NODES)),
    )


def _rounded(nbytes: float) -> int:
    return int(nbytes) + 1
