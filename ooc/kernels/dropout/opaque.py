# SPDX-License-Identifier: Apache-2.0
"""Dropout inside an opaque layer, with masks that do not depend on which rows the layer is run on.

Such a layer calls ``F.dropout`` itself, forward and again backward, on the graph around a tile's rows, in which a node
has another number than in the next tile's. So the call is intercepted on its way into torch, and entries are dropped by
what they belong to: a node, by its row of the store, or an edge, by the rows of both ends and how many edges between
these come before it. Coefficients of attention are dropped in the same way (``kernels.edge_dropout``), and a node
counts as the edge from it to itself.

What a call's tensor has rows for is told by its number of rows, on a graph on which these numbers are all different
(``ooc.model.layers.conformance``); it is the same in every later run. On a GPU a program of its own draws the same
numbers (``ooc.kernels.cuda.dropout``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ooc.errors import ModelError
from ooc.kernels.dropout.edges import HEADS_PER_COUNT, EdgeDropout, keep_edges
from ooc.kernels.neighbourhood import Neighbourhood

_DROPOUT = F.dropout
_MOST_COLUMNS = HEADS_PER_COUNT << 16
_MASK_BYTES = 96
"""Bytes of a row while the CPU draws its mask: the generator's words, beside a byte a column and torch's own
results."""


def _draw_by_cuda(*draw: Any) -> Tensor:
    from ooc.kernels.cuda import dropout  # needs triton

    return dropout.keep_edges(*draw)


BY_DEVICE: dict[str, Callable[[EdgeDropout, Tensor, Tensor, Tensor, int], Tensor]]
BY_DEVICE = {"cpu": keep_edges, "cuda": _draw_by_cuda}
"""Functions that tell which entries are kept, by torch's name of the kind of device the rows are on."""


class DroppedRows(Enum):
    """What a tensor inside a layer has a row for."""

    NODES = "nodes"
    SOURCES = "sources"
    TARGETS = "targets"
    """These last two exist where nodes are of two types."""
    EDGES = "edges"
    OTHER_EDGES = "edges but self-loops"
    EDGES_AND_LOOPS = "edges, then a self-loop of every node"
    OTHER_EDGES_AND_LOOPS = "edges but self-loops, then a self-loop of every node"


OF_NODES = (DroppedRows.NODES, DroppedRows.SOURCES, DroppedRows.TARGETS)
LOOPS = (DroppedRows.EDGES_AND_LOOPS, DroppedRows.OTHER_EDGES_AND_LOOPS)
_BETWEEN_TYPES = (DroppedRows.SOURCES, DroppedRows.TARGETS, DroppedRows.EDGES)
_OF_ONE_TYPE = tuple(rows for rows in DroppedRows if rows not in OF_NODES[1:])


@dataclass(frozen=True, slots=True)
class Dropped:
    """One call of ``F.dropout``: what its tensor has rows for, and how many ``columns`` these have when flattened."""

    rows: DroppedRows
    columns: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row while its mask is drawn, beside torch's."""
        return _MASK_BYTES + self.columns


Draws = Callable[[int, float], EdgeDropout]
"""A function of the call's number, from 0, and its probability, that returns how the call drops."""


class _CaughtDropout(TorchFunctionMode):
    """A mode in which ``F.dropout`` is ``_drop``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._drop(*args, **(kwargs or {})) if func is _DROPOUT else func(*args, **(kwargs or {}))

    def _drop(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        raise NotImplementedError


class InnerDropout(_CaughtDropout):
    """A mode in which the k-th effective ``F.dropout`` of layer ``where`` on ``near`` must be ``calls[k]``, and drops
    as ``draws`` says. Any other use of it raises ModelError."""

    def __init__(self, near: Neighbourhood, calls: Sequence[Dropped], draws: Draws, where: str) -> None:
        super().__init__()
        self._where = where
        self._near, self._calls, self._draws = near, calls, draws
        self._done = 0

    def _drop(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return values
        if self._done == len(self._calls):
            raise ModelError(f"{self._where}: how often it drops something depends on the rows that it is run on")
        call = self._calls[self._done]
        targets, sources = ends_of(call.rows, self._near)
        if len(targets) != len(values):
            raise ModelError(
                f"{self._where}: what it drops from has {len(values)} rows here, not one for each of {call.rows.value}"
            )
        dropout = self._draws(self._done, p)
        self._done += 1
        columns = values[:1].numel() if len(values) else 0
        repeats = _count_repeats(call.rows, self._near, targets, sources)
        keep = BY_DEVICE[values.device.type](dropout, targets, sources, repeats, columns).reshape(values.shape)
        scale = keep.to(values.dtype).mul_(dropout.kept_scale)
        return values.mul_(scale) if inplace else values * scale


class Discovery(_CaughtDropout):
    """A mode that finds the effective ``calls`` of ``F.dropout`` and lets all values through. ``near``: a graph on
    which all ``DroppedRows`` have different numbers, and nodes beside its rows are of another type. ``other_shapes``:
    tensors that have no row for any of them."""

    def __init__(self, near: Neighbourhood) -> None:
        super().__init__()
        self.calls: list[Dropped] = []
        self.other_shapes: list[tuple[int, ...]] = []
        kinds = _BETWEEN_TYPES if len(near.others_S) else _OF_ONE_TYPE
        self._by_length = {len(ends_of(rows, near)[0]): rows for rows in kinds}
        assert len(self._by_length) == len(kinds), "two kinds of rows cannot be told apart"

    def _drop(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p != 0.0:
            rows = self._by_length.get(len(values)) if values.dim() else None
            columns = values[:1].numel() if values.dim() else 0
            if rows is None or columns > _MOST_COLUMNS:
                self.other_shapes.append(tuple(values.shape))
            else:
                self.calls.append(Dropped(rows, columns))
        return values


def ends_of(rows: DroppedRows, near: Neighbourhood) -> tuple[Tensor, Tensor]:
    """Return target and source, as rows of the store, of everything that has a row."""
    own_R = torch.arange(near.start, near.start + near.rows, device=near.others_S.device)
    nodes = torch.cat((own_R, near.others_S))
    sources, targets = nodes[near.edge_index_2E]
    if rows in OF_NODES:
        of_targets = nodes[: near.rows + near.stands_in]
        found = {DroppedRows.SOURCES: near.others_S, DroppedRows.TARGETS: of_targets}.get(rows, nodes)
        return found, found
    if rows in (DroppedRows.OTHER_EDGES, DroppedRows.OTHER_EDGES_AND_LOOPS):
        is_other = near.edge_index_2E[0] != near.edge_index_2E[1]
        targets, sources = targets[is_other], sources[is_other]
    if rows in LOOPS:
        targets, sources = torch.cat((targets, nodes)), torch.cat((sources, nodes))
    return targets, sources


def _count_repeats(rows: DroppedRows, near: Neighbourhood, targets_E: Tensor, sources_E: Tensor) -> Tensor:
    """Return how many edges before each one have the same two ends; for a stretch of a row's edges, including those
    before it."""
    order_E = sources_E.argsort(stable=True)
    order_E = order_E[targets_E[order_E].argsort(stable=True)]
    ends_2E = torch.stack((targets_E, sources_E))[:, order_E]
    is_first_E = torch.ones_like(order_E, dtype=torch.bool)
    is_first_E[1:] = (ends_2E[:, 1:] != ends_2E[:, :-1]).any(dim=0)
    positions_E = torch.arange(len(order_E), device=order_E.device)
    first_E = (positions_E * is_first_E).cummax(dim=0).values
    repeats_E = torch.empty_like(order_E).index_copy_(0, order_E, positions_E - first_E)
    if near.repeats_before and rows not in OF_NODES:
        first = near.edge_index_2E[0, 0]  # a row's edges come first, in order; self-loops may be left out
        equal = int((near.edge_index_2E[0] == first).sum())
        if first != near.edge_index_2E[1, 0] or rows in (DroppedRows.EDGES, DroppedRows.EDGES_AND_LOOPS):
            repeats_E[:equal] += near.repeats_before
    return repeats_E
