# SPDX-License-Identifier: Apache-2.0
"""The conformance probe: try on a small graph, in double precision, whether an opaque layer may be run tile by tile.

What such a layer gives for a row must depend on the row, its in-neighbours and the edges between them, and on nothing
else: not on degrees of sources, the number of nodes, statistics over nodes, other tiles, or chance. Its code cannot
tell that. So the layer is run on a graph as a whole and again tile by tile, each tile with its in-neighbours alone, as
training will run it. Both must give the same values and, if it trains, the same gradients. This is repeated with other
parameters, since one that is 0 may hide what it multiplies; on a larger graph with nodes of many edges and a row of
large values, since a layer may branch on these; and half of the tiles use a copy that has not run before, since it may
keep what it finds first.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ooc.errors import ModelError
from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.dropout.opaque import Discovery, Dropped, DroppedRows, InnerDropout
from ooc.kernels.edges import TileEdges
from ooc.kernels.neighbourhood import Neighbourhood, neighbourhood
from ooc.kernels.pieces.caught_sums import CaughtSum, Finding
from ooc.kernels.pulls import are_compiled
from ooc.kernels.tensors import fractions
from ooc.model.layers.layer import Layer, in_modes, inspectors, sharing
from ooc.model.layers.split_rows import Part, SplitRow, levels_of
from ooc.model.lowering.assembly import first_line
from ooc.model.told_sizes import ReportedSizes, SizeReporting, logarithms_of_reported_sizes
from ooc.plan.workload import EdgeData

_NODES, _TILE, _EDGES = 23, 5, 70
_WITHOUT_EDGES = range(15, 20)
"""A tile of rows that have no in-edges but are in-neighbours of others."""
_LOOPS, _REPEATS = 3, 4
_OTHER_TYPE_SHARE = 0.8
"""With two node types, the number of nodes of the other type, relative to the rows."""
_MANY_NODES, _HIGH_TILE, _MANY_EDGES = 160, 40, 640
"""The larger graph's nodes, tile height and edges: as large as the one on which memory is measured, in half the number
size."""
_HUB_EDGES, _OUTLIER = 80, 100.0
"""The in-edges and out-edges of a hub there, and how much larger the values of the last node are, which is nobody's
in-neighbour."""
_PIECE, _PIECE_STRIDE = 2, 4
"""The edges of a piece, and the step between rows that are tried in pieces."""
_TOLERANCE = 1e-9
_TOLERANCE_OF_LARGE_VALUES = 1e-6
"""The tolerance on a graph with large values, for which scores and their exponentials round more."""
_PERTURBATION = 0.1

_MARGIN = 1.25
"""A margin for the temporaries of operators: a copy of an index, partial sums."""
_FEW_NODES, _MORE_NODES = 64, 320
_FEW_EDGES, _MORE_EDGES = 256, 1280
_SKEW_BOUND = 1.5
"""How much more memory a layer may take if one row has all the edges."""
_GROWTH_BOUND, _DOUBLING_BOUND = 1.2 * _MORE_NODES / _FEW_NODES, 1.2 * 2
"""How much more memory it may take for this many more nodes and edges, and for twice as many edges of one row."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that a user's code runs, views included, the multiply-adds of its dense products, and the
    peak bytes of storages that they create; ``known`` storages do not count. Temporaries within an operator are not
    seen."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # imported here, since it imports triton

        self.flops = flop_registry
        self.peak_bytes: int = 0
        self.operators = self.multiplies = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._alive_bytes = 0

    @classmethod
    def of(cls, run: Callable[[], object], known: Iterable[Tensor] = ()) -> "Watch":
        """Return what was counted during ``run``."""
        watch = cls(known)
        with watch:
            run()
        return watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        if func.is_view:  # this operator allocates no storage
            return result
        if (flops := self.flops.get(func._overloadpacket)) is not None:
            self.multiplies += flops(*args, **(kwargs or {}), out_val=result) // 2
        for leaf in tree_leaves(result):
            parts = [leaf] if isinstance(leaf, Tensor) else []
            if parts and leaf.layout is torch.sparse_coo:
                parts = [leaf._indices(), leaf._values()]
            for part in parts:
                storage = part.untyped_storage()
                if storage._cdata not in self._known:
                    _, before = self._alive.get(storage._cdata, (None, 0))
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                    self._alive_bytes += storage.nbytes() - before
        if self._alive_bytes > self.peak_bytes:  # only then can the peak grow: finding freed storages is slow
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
            self._alive_bytes = sum(nbytes for _, nbytes in self._alive.values())
            self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        return result


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of trying a layer.

    ``tail``: the shape of an output row. ``parameters``: which of those that require gradients take part. Bytes of a
    run: for every edge and node, for every place of padded rows (0: none), and for an edge of a row in pieces, with the
    node it brings. ``multiplies``: multiply-adds of an edge and a node together, including gradients if recorded; and
    the operators forward, and backward with the gradient. ``tells_modes``: it computes something else in training than
    in evaluation. ``dropped``: what it drops entries from. ``calls``: what it adds up over a row's edges, if these may
    come in pieces. ``itemsize``: bytes of a number. ``pairs``, ``looks_up``: as in ``Layer``. ``together``: the known
    reason why edges may not come in pieces.
    """

    tail: tuple[int, ...]
    parameters: tuple[int, ...]
    edge_bytes: int
    node_bytes: int
    padding_bytes: int
    piece_bytes: int
    multiplies: int
    forward_operators: int
    backward_operators: int
    tells_modes: bool
    dropped: tuple[Dropped, ...]
    calls: tuple[CaughtSum, ...]
    itemsize: int
    pairs: bool
    together: str
    looks_up: bool

    def of(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        """Return the participating ``parameters`` of a layer made like the one that was tried."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return tuple(parameters[i] for i in self.parameters)


def probe_layer(
    layer: Layer,
    module: nn.Module,
    *,
    edge_features: int,
    dtype: torch.dtype,
    record: bool,
    on_cpu: bool = True,
    in_pieces: bool = True,
    in_pairs: bool = True,
    in_training: ProbeResult | None = None,
) -> ProbeResult:
    """Try ``module``, a copy of the layer in one of its modes. Raises ModelError naming what prevents running it tile
    by tile.

    ``record``: it will be differentiated; ``on_cpu``: it will run there; ``in_pieces``: some row has so many edges that
    they should come in pieces; ``in_pairs``: it may be given rows in pairs, if it accepts them, and will then run so.
    ``in_training``: the result of trying it in training, if it gives the same in both modes; then only caching, the
    larger graph and memory are tried.
    """
    with torch.random.fork_rng(devices=[]):
        probe = _Probe(layer, module, edge_features, record=record)
        if in_training is not None:
            tail = probe.check_whole()  # it may keep state in training mode only
            probe.layer = replace(layer, pairs=in_training.pairs, looks_up=in_training.looks_up)
            taken = probe.footprint(dtype, (), math.prod(tail), in_training.calls)
            probe.grow()
            probe.check_tiles(_HIGH_TILE)
            return replace(in_training, **taken)
        probe.find_dropout()
        tail = probe.check_whole()
        outputs = math.prod(tail)
        looks_up = on_cpu and probe.looks_up(outputs)
        layer = probe.layer = replace(layer, looks_up=looks_up)
        probe.check_own()
        probe.check_order()
        operators = Watch.of(lambda: probe._forward(probe.near, probe.x_NC)).operators
        calls = probe.find_sums() if in_pieces else ()
        unused = probe.takes_pairs() if in_pairs and not layer.own else None
        pairs = unused is not None
        unused = probe.check_tiles() if unused is None else unused
        splits = probe.may_be_split(calls, differentiated=False)
        probe.change()
        others = probe.takes_pairs() if pairs else probe.check_tiles()
        if others is None:
            return probe_layer(
                layer,
                module,
                edge_features=edge_features,
                dtype=dtype,
                record=record,
                on_cpu=on_cpu,
                in_pieces=in_pieces,
                in_pairs=False,
            )
        unused &= others
        calls = calls if splits and probe.may_be_split(calls, differentiated=record) else ()
        used = [i for i in range(len(probe.parameters)) if i not in unused]
        tells_modes = probe.tells_modes()
        pairs = pairs or bool(layer.own)
        probe.layer = replace(layer, pairs=pairs)
        taken = probe.footprint(dtype, used, outputs, calls)
        probe.grow()
        probe.check_tiles(_HIGH_TILE)
        return ProbeResult(
            tail,
            tuple(used),
            **taken,
            forward_operators=operators,
            tells_modes=tells_modes or probe.tells_modes(),
            dropped=tuple(probe.dropped),
            calls=calls,
            itemsize=dtype.itemsize,
            pairs=pairs,
            together="" if calls else " and ".join(probe.together),
            looks_up=looks_up,
        )


def check_sizes(
    layer: Layer, module: nn.Module, found: ProbeResult, nodes: Sequence[int], edges: int, **options: Any
) -> None:
    """Raise ModelError if a layer, for which ``probe_layer`` has ``found`` this with the same ``options``, branches on
    how many ``nodes`` (targets and sources) and ``edges`` the whole graph has."""
    with torch.random.fork_rng(devices=[]):
        probe = _Probe(layer, module, options["edge_features"], record=options["record"])
        probe.layer = replace(layer, pairs=found.pairs, looks_up=found.looks_up)
        probe.dropped = found.dropped
        probe.change()
        probe.grow()
        probe.check_sizes(nodes, edges)
        if not edges:
            probe.check_without_edges()


class _Probe:
    """A layer's copy in double precision, and the graph it is tried on: rows, the whole graph, and where each row's
    in-edges start. With two node types, sources come after the rows. ``record``: it will be differentiated; otherwise
    gradients are not compared."""

    def __init__(self, layer: Layer, module: nn.Module, edge_features: int, *, record: bool) -> None:
        self.layer, self.given = layer, module
        self.record = record
        self.training = module.training
        self.module = copy.deepcopy(module, inspectors(module)).double()
        self.unused = sharing(self.module, layer.where)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.edge_features = edge_features
        self.whole = layer.whole_columns
        self.whole_weights = layer.whole_of_edges(EdgeData.WEIGHT, 1)
        self.whole_features = layer.whole_of_edges(EdgeData.FEATURES, edge_features)
        self.generator = torch.Generator().manual_seed(1)
        self.of_fractions = False
        self.x_NC, self.near, self.offsets_N1 = self._small_graph(loops=_LOOPS)
        self.dropped: Sequence[Dropped] = ()
        self.together: dict[str, None] = {}
        self.tolerance = _TOLERANCE
        self._choose_numbers()

    def _choose_numbers(self) -> None:
        """Make rows and edge data fractions if more of the results are finite then, as for logarithms and roots: NaN
        does not tell what it depends on."""

        def finite_share() -> float:
            try:
                with torch.no_grad():
                    found = self.layer.call(sharing(self.unused, self.layer.where), self.x_NC, self.near)
                are = self._are_finite(found)
            except Exception:  # errors of the user's code, reported when the layer is checked
                return 0.0
            return float(are.double().mean()) if are.numel() else 1.0

        before, share = (self.x_NC, self.near, self.offsets_N1), finite_share()
        if share == 1:
            return
        self.of_fractions = True
        self.x_NC, self.near, self.offsets_N1 = self._small_graph(loops=_LOOPS)
        if finite_share() <= share:
            self.of_fractions = False
            self.x_NC, self.near, self.offsets_N1 = before

    def _are_finite(self, found_NX: Tensor) -> Tensor:
        """Return which numbers of rows with in-edges are finite; other rows may hold an aggregation's result for
        nothing."""
        has_edges_N = self.offsets_N1.diff() > 0
        return found_NX[: len(has_edges_N)][has_edges_N[: len(found_NX)]].isfinite()

    def find_dropout(self) -> None:
        """Find what the layer drops entries from; refuse anything but nodes and edges."""
        discovery = Discovery(self.near)
        self._run_whole(discovery)
        if discovery.other_shapes:
            shape = list(discovery.other_shapes[0])
            raise self.layer.refuse(f"it drops entries of a tensor of shape {shape}, not a row a node or edge")
        if discovery.calls and not self.training:
            raise self.layer.refuse("dropout in evaluation is not supported; give F.dropout(…, training=self.training)")
        self.dropped = discovery.calls

    def _dropout_masks(self, near: Neighbourhood) -> AbstractContextManager[Any]:
        """Return a context with any masks for a run on ``near``; in pairs and without masks, dropout is not watched."""
        if self.layer.pairs and not self.dropped:
            return nullcontext()
        return InnerDropout(near, self.dropped, lambda call, p: EdgeDropout(p, 1, 1, call + 1), self.layer.where)

    def _forward(self, near: Neighbourhood, x_SC: Tensor, module: nn.Module | None = None) -> Tensor:
        with self._dropout_masks(near):
            return self.layer.forward(module or self.module, x_SC, near)

    def _backward(
        self, near: Neighbourhood, x_SC: Tensor, gradient_RO: Tensor, module: nn.Module | None = None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        with self._dropout_masks(near):
            return self.layer.backward(module or self.module, x_SC, near, gradient_RO, self.parameters, trains=True)

    def check_whole(self) -> tuple[int, ...]:
        """Return the shape of a row of the result. Refuse a layer without one row a node, or with different rows each
        time."""
        layer, x_NC = self.layer, self.x_NC
        # Imported here, so that models without such layers need no PyG.
        from ooc.model.lowering.symbolic import ModuleState

        given, unused = x_NC.clone(), ModuleState(self.module)
        before = torch.default_generator.manual_seed(1).get_state()
        first = self._run_whole(self._dropout_masks(self.near))
        drawn = not torch.equal(before, torch.random.get_rng_state())
        rows = self.near.rows
        if not isinstance(first, Tensor) or first.dim() < 1 or len(first) != rows or first.dtype != x_NC.dtype:
            of_others = isinstance(first, Tensor) and first.dtype != x_NC.dtype
            types = f", but {first.dtype} where x is {x_NC.dtype}" if of_others else ""
            raise layer.refuse(f"it does not give one row of numbers a node{types}")
        if first.numel() and not self._are_finite(first).any():
            raise layer.refuse("none of what it gives on a small graph is a finite number")
        run_once, kept = ModuleState(self.module), unused.spoil()
        again = self._run_whole(self._dropout_masks(self.near))
        if kept and not _almost_equal(again, first):
            raise layer.refuse(f"it uses its attribute {kept[0]} of another run, and is run once for every tile")
        for what in run_once.changed(tensors=False):
            raise layer.refuse(f"it changes its {what} whenever it is run, which is once for every tile")
        if not torch.equal(x_NC, given):
            raise layer.refuse("it writes into the rows that it is given; let it work on x.clone()")
        if drawn or not _almost_equal(again, first):
            when = " in training" if self.training else ""
            raise layer.refuse(
                f"it draws random numbers{when} other than by F.dropout, which could not be drawn again for the "
                "gradient; set that to 0"
            )
        return tuple(first.shape[1:])

    def looks_up(self, outputs: int) -> bool:
        """Whether results and gradients are the same, and memory is less, with stand-ins for the rows at edges'
        ends."""
        generator = torch.Generator().manual_seed(1)
        gradient_NO = torch.randn(self.near.rows, outputs, generator=generator, dtype=self.x_NC.dtype)
        found = list[list[Tensor | None]]()

        def run(layer: Layer) -> None:
            with self._dropout_masks(self.near):
                found.append([layer.forward(self.module, self.x_NC, self.near)])
            if self.record:
                given = self.module, self.x_NC, self.near, gradient_NO, self.parameters
                with self._dropout_masks(self.near):
                    of_rows, of_parameters = layer.backward(*given, trains=True)
                found[-1] += of_rows, *of_parameters

        if not are_compiled():
            return False
        try:
            layers = [replace(self.layer, looks_up=looks_up) for looks_up in (False, True)]
            taken = [Watch.of(partial(run, layer)).peak_bytes for layer in layers]
        except Exception:  # the code cannot run on proxies for its rows
            return False
        pairs = zip(*found, strict=True)
        is_same = all(a is b if a is None or b is None else _almost_equal(b, a) for a, b in pairs)
        return is_same and taken[1] < taken[0]

    def check_own(self) -> None:
        """Refuse a copy that uses parts of its original, as a stored function may: it would follow the original's mode,
        and gradients would be lost."""
        layer, near = self.layer, self.near
        originals = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
        expected = self._forward(near, self.x_NC)
        with in_modes({part: not part.training for part in layer.module.modules()}):
            result = self._forward(near, self.x_NC)
        with self._dropout_masks(near):
            gradient_NO = torch.ones_like(expected)
            _, found = layer.backward(self.module, self.x_NC, near, gradient_NO, originals, trains=False)
        if not _almost_equal(result, expected) or any(gradient is not None for gradient in found):
            raise layer.refuse(
                "a function that it keeps refers to the layer itself, and would in every thread's copy; use a method"
            )

    def check_order(self) -> None:
        """Refuse a layer that depends on the order of a node's edges, since a store has its own."""
        near = self.near
        order_E = torch.randperm(near.edge_index_2E.shape[1], generator=self.generator)
        order_E = order_E[near.edge_index_2E[1, order_E].argsort(stable=True)]
        other = _select_edges(near, order_E)
        with Discovery(near):  # without dropout, repeated edges are distinguished by order
            result = self.layer.forward(self.module, self.x_NC, other)
            expected = self.layer.forward(self.module, self.x_NC, near)
        if not _almost_equal(result, expected):
            raise self.layer.refuse("what it gives depends on the order of edges, which a store does not keep")

    def check_tiles(self, height: int = _TILE) -> set[int]:
        """Return which parameters take no part in the result. Refuse a layer that gives something else tile by tile."""
        with self._refusing_failures("some rows with their in-neighbours, or without any"):
            agrees, unused = self._matches_whole_graph(height, self._run_tile, every=height, differentiated=self.record)
        if not agrees:
            raise self.layer.refuse(
                "what it gives for a node depends on more than the node, its in-neighbours and the edges between them, "
                "as it does with degrees of sources, the number of nodes, statistics over nodes, several hops in one "
                "layer, or what is kept from another run"
            )
        return unused

    def takes_pairs(self) -> set[int] | None:
        """Return which parameters take no part, if tiles give the same with separate rows for all nodes and for
        targets; otherwise None."""
        layer = self.layer
        of_nodes = any(dropped.rows not in (DroppedRows.EDGES, DroppedRows.OTHER_EDGES) for dropped in self.dropped)
        if of_nodes or layer.codes or layer.sums_at_sources:
            return None
        self.layer = replace(layer, pairs=True)
        try:
            agrees, unused = self._matches_whole_graph(_TILE, self._run_tile, every=_TILE, differentiated=self.record)
            return unused if agrees else None
        except Exception:  # code that takes no pairs may raise anything
            return None
        finally:
            self.layer = layer

    def find_sums(self) -> tuple[CaughtSum, ...]:
        """Return what it adds up over edges."""

        def run(finding: Finding) -> None:
            with self._dropout_masks(self.near), finding, torch.no_grad():
                replace(self.layer, looks_up=False).run(self.module, self.x_NC, self.near)
            self.together.update(dict.fromkeys(finding.together))

        return levels_of(run, self.near)

    def may_be_split(self, calls: Sequence[CaughtSum], *, differentiated: bool) -> bool:
        """Whether rows get the same in pieces as whole, and so do all gradients if ``differentiated``, which takes most
        of the time."""

        def run(tile: TileEdges, gradient_RO: Tensor) -> tuple[Tensor, Iterable[Part]]:
            if len(tile.indices_E) <= _PIECE:
                return self._run_tile(tile, gradient_RO)
            row = SplitRow(self.layer, self.module, calls, self._dropout_masks, tile, _PIECE, self.x_NC)
            return row.forward(), row.backward(gradient_RO, self.parameters, trains=True)

        try:
            return (
                bool(calls) and self._matches_whole_graph(1, run, every=_PIECE_STRIDE, differentiated=differentiated)[0]
            )
        except Exception:  # the user's code may raise anything on a piece; then it is run as a whole
            return False

    def _matches_whole_graph(
        self,
        height: int,
        run: Callable[[TileEdges, Tensor], tuple[Tensor, Iterable[Part]]],
        *,
        every: int,
        differentiated: bool,
    ) -> tuple[bool, set[int]]:
        """Whether rows get the same from ``run``, on the first of ``every`` rows, as from the whole graph, and so do
        all gradients if ``differentiated``; and which parameters have no gradient."""
        values_NO = self._forward(self.near, self.x_NC)
        gradient_NO = torch.randn(values_NO.shape, generator=self.generator, dtype=values_NO.dtype)
        nodes = self.near.rows
        gradient_NO[torch.arange(nodes) % every >= height] = 0
        whole = self._backward(self.near, self.x_NC, gradient_NO)
        expected = [_zeros_if_none(whole[0], self.x_NC), *map(_zeros_if_none, whole[1], self.parameters)]
        found = [torch.zeros_like(part) for part in expected]
        unused = {i for i, part in enumerate(whole[1]) if part is None}
        for start in range(0, nodes, every):
            tile = self._cut_tile(start, height)
            here = slice(start, start + tile.rows)
            rows_RO, parts = run(tile, gradient_NO[here])
            if not _almost_equal(rows_RO, values_NO[here], self.tolerance):
                return False, unused
            for own, others, d_parameters in parts if differentiated else ():
                found[0][here] += own
                if others is not None:
                    found[0][others[0]] += others[1]
                for total, part in zip(found[1:], d_parameters, strict=False):
                    total += _zeros_if_none(part, total)
        pairs = zip(found, expected, strict=True) if differentiated else ()
        return all(_almost_equal(*pair, self.tolerance) for pair in pairs), unused

    def _run_tile(self, tile: TileEdges, gradient_RO: Tensor) -> tuple[Tensor, Iterable[Part]]:
        """Run a tile by the copy that has run before, or, for every other tile, by a new one."""
        near = neighbourhood(tile, len(self.x_NC))
        x_SC = near.gather(self.x_NC)
        is_new = tile.start // tile.rows % 2 == 0
        module = sharing(self.unused, self.layer.where) if is_new else self.module

        def parts() -> Iterator[Part]:
            d_x, of_parameters = self._backward(near, x_SC, gradient_RO, module)
            d_x = _zeros_if_none(d_x, x_SC)
            yield d_x[: near.rows], (near.others_S, d_x[near.rows :]), of_parameters

        return self._forward(near, x_SC, module), parts()

    @torch.no_grad()
    def change(self) -> None:
        """Change parameters, since one that is 0 hides what it multiplies, and use a graph without self-loops, so that
        both rows of an edge differ."""
        self.x_NC, self.near, self.offsets_N1 = self._small_graph(loops=0)
        for parameter in self.module.parameters():
            parameter.add_(
                _PERTURBATION * torch.randn(parameter.shape, generator=self.generator, dtype=parameter.dtype)
            )

    def grow(self) -> None:
        """Use another graph, with more rows, nodes of many edges, and a row and an edge into it with large values."""
        some = {"nodes": _MANY_NODES, "edges": _MANY_EDGES, "of_hubs": _HUB_EDGES}
        self.tolerance = _TOLERANCE_OF_LARGE_VALUES
        self.x_NC, self.near, self.offsets_N1 = self._small_graph(loops=_LOOPS, **some)
        of_rows = (self.x_NC[: self.near.rows], self.whole), (self.x_NC[self.near.rows :], self.whole)
        of_edges = (self.near.weight_E, self.whole_weights), (self.near.features_EK, self.whole_features)
        for values, whole in (*of_rows, *of_edges):
            if values is not None and len(values):
                last = values.view(len(values), -1)[-1]
                scale = torch.full_like(last, _OUTLIER)
                scale[whole] = 1.0
                last *= scale

    def check_without_edges(self) -> None:
        """Refuse a layer for which a graph without any edges differs from rows without edges."""
        has_none_N = self.offsets_N1.diff() == 0
        expected = self._forward(self.near, self.x_NC)[has_none_N]
        with self._refusing_failures("a graph without edges"):
            found = self._forward(_select_edges(self.near, slice(0)), self.x_NC)
        if found.shape[:1] != has_none_N.shape or not _almost_equal(found[has_none_N], expected, self.tolerance):
            raise self.layer.refuse(
                "it makes something else of a graph that has no edges at all than of rows without any"
            )

    def check_sizes(self, nodes: Sequence[int], edges: int) -> None:
        """Refuse a layer whose Python code branches on the number of rows or edges, for the graph's numbers."""
        rows = self.near.rows, len(self.near.others_S) or self.near.rows
        least = min(rows) - 1  # the largest index is one less
        widths = {size for part in (*self.module.parameters(), self.x_NC[0]) for size in part.shape}
        expected = self._forward(self.near, self.x_NC)
        with logarithms_of_reported_sizes():
            for reporting, more in product(SizeReporting, (0, 1)):  # one more gives an even number
                ratios = {
                    size: max(1.0, (of_all + more) / tried)
                    for tried, of_all in zip(rows, nodes, strict=True)
                    for size in (tried, tried - 1)
                } | dict.fromkeys(widths, 1.0)
                usual = max(1.0, (edges + more) / self.near.edge_index_2E.shape[1])
                try:
                    with ReportedSizes(least, ratios, usual, reporting):
                        found = self._forward(self.near, self.x_NC)
                except Exception:  # the user's code may raise anything for these sizes
                    continue
                if found.shape == expected.shape and not _almost_equal(found, expected, self.tolerance):
                    raise self.layer.refuse(
                        "it goes another way by how many rows or edges it is given, which is fewer for a tile than for "
                        "the graph"
                    )

    def footprint(
        self, dtype: torch.dtype, used: Sequence[int], outputs: int, calls: Sequence[CaughtSum]
    ) -> dict[str, Any]:
        """Return the bytes that a run takes for an edge, a node, a place in a padded row and an edge of a row in
        pieces, the multiply-adds and the operators, as in ``ProbeResult``. They are derived from how they grow with the
        graph, forward and, if recorded, backward. ``used``: parameters with a gradient; ``calls``: those of a row in
        pieces."""
        layer, record, module = self.layer, self.record, sharing(self.given, self.layer.where)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        parameters = [trained[i] for i in used]

        def run(nodes: int, edges: int, skewed: bool = False, split: bool = False) -> Watch:
            generator = torch.Generator().manual_seed(1)
            rows = nodes // 2
            sources = torch.randint(rows if layer.own else 0, nodes, (edges,), generator=generator)
            targets = torch.randint(0, 1 if skewed else rows, (edges,), generator=generator).sort().values
            near = self._make_neighbourhood(torch.stack((sources, targets)), rows, dtype, generator)
            near = replace(near, others_S=torch.arange(rows, nodes))
            x_SC = self._random_numbers(nodes, self.layer.columns, self.whole, dtype, generator)
            gradient_RO = torch.randn(rows, outputs, generator=generator, dtype=dtype)
            carried = [v for v in (near.weight_E, near.features_EK) if v is not None]
            offsets, here = torch.tensor([0, edges]), sources.sort().values
            row = TileEdges(here, offsets, 0, nodes, weight_E=near.weight_E, features_EK=near.features_EK)
            whole = SplitRow(layer, module, calls, self._dropout_masks, row, edges, x_SC)
            known = [x_SC, gradient_RO, near.edge_index_2E, *carried, *module.parameters(), *module.buffers()]

            def compute() -> object:
                if split:
                    parts = whole.backward(gradient_RO[:1], parameters, trains=True) if record else [whole.forward()]
                    return sum(1 for _ in parts)
                with self._dropout_masks(near):
                    if record:
                        return layer.backward(module, x_SC, near, gradient_RO, parameters, trains=True)
                    return layer.forward(module, x_SC, near)

            return Watch.of(compute, known)

        base, skewed, padding = run(_FEW_NODES, _FEW_EDGES), run(_FEW_NODES, _FEW_EDGES, True).peak_bytes, 0
        if skewed > _SKEW_BOUND * base.peak_bytes:
            half = run(_FEW_NODES, _FEW_EDGES // 2, True).peak_bytes
            if not layer.pairs or skewed > _DOUBLING_BOUND * half:
                raise layer.refuse("it takes memory for every node or edge times the most edges of any row")
            padding = (skewed - half) // (_FEW_EDGES // 2 * (_FEW_NODES // 2))
        elif run(_MORE_NODES, _MORE_EDGES).peak_bytes > _GROWTH_BOUND * base.peak_bytes:
            raise layer.refuse("it takes memory for every row times every edge, which no budget can hold")
        of_edges, of_nodes = run(_FEW_NODES, _MORE_EDGES), run(_MORE_NODES, _FEW_EDGES)
        more_edges = max(0, of_edges.peak_bytes - base.peak_bytes) / (_MORE_EDGES - _FEW_EDGES)
        more_nodes = of_piece = max(0, of_nodes.peak_bytes - base.peak_bytes) / (_MORE_NODES - _FEW_NODES)
        if calls:
            shapes = (_FEW_NODES, _FEW_EDGES), (_FEW_NODES, _MORE_EDGES), (_MORE_NODES, _FEW_EDGES)
            few, edges, nodes = (run(*shape, True, True).peak_bytes for shape in shapes)
            of_piece = (edges - few) / (_MORE_EDGES - _FEW_EDGES) + (nodes - few) / (_MORE_NODES - _FEW_NODES)
        products = (of_edges.multiplies - base.multiplies) // (_MORE_EDGES - _FEW_EDGES)
        products += (of_nodes.multiplies - base.multiplies) // (_MORE_NODES - _FEW_NODES)
        return {
            "edge_bytes": int(_MARGIN * more_edges) + 1,
            "node_bytes": int(_MARGIN * more_nodes) + 1,
            "padding_bytes": int(_MARGIN * padding),
            "piece_bytes": int(_MARGIN * of_piece) + 1,
            "multiplies": products,
            "backward_operators": base.operators,
        }

    def tells_modes(self) -> bool:
        """Whether it gives something else in the other mode, or fails there."""
        if self.dropped:
            return True
        here = self.layer.forward(self.module, self.x_NC, self.near)
        other = sharing(self.unused, self.layer.where).train(not self.training)
        try:
            return not _almost_equal(self.layer.forward(other, self.x_NC, self.near), here)
        except Exception:
            return True

    def _run_whole(self, dropout: AbstractContextManager[Any]) -> Tensor:
        with self._refusing_failures("a small graph"), dropout, self._requiring_num_nodes(), torch.no_grad():
            result: Tensor = self.layer.call(self.module, self.x_NC, self.near)
        return result

    @contextmanager
    def _refusing_failures(self, on: str) -> Iterator[None]:
        """A context in which a failure of the user's code ``on`` this becomes a refusal."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            raise self.layer.refuse(f"it fails on {on}: {first_line(error)}") from error

    @contextmanager
    def _requiring_num_nodes(self) -> Iterator[None]:
        """A context that refuses PyG's self-loops without a number of nodes: PyG adds none after the last node with an
        edge, which a tile does not know."""
        from torch_geometric.nn.conv import gcn_conv
        from torch_geometric.utils import laplacian, loop

        own, as_before = get_ident(), loop.maybe_num_nodes

        def checked_num_nodes(edge_index: Tensor, num_nodes: int | None = None) -> Any:
            if num_nodes is None and get_ident() == own:
                raise self.layer.refuse(
                    "it adds self-loops without saying how many nodes there are, and PyG adds none to the last ones "
                    "where these have no edges; give num_nodes=x.size(0), or have the data's AddRemainingSelfLoops() "
                    "add them and none here"
                )
            return as_before(edge_index, num_nodes)

        with ExitStack() as stack:
            for module in (gcn_conv, laplacian, loop):
                stack.enter_context(mock.patch.object(module, "maybe_num_nodes", checked_num_nodes))
            yield

    def _cut_tile(self, start: int, rows: int) -> TileEdges:
        near, offsets = self.near, self.offsets_N1
        stop = min(start + rows, near.rows)
        here = _select_edges(near, slice(int(offsets[start]), int(offsets[stop])))
        return TileEdges(
            here.edge_index_2E[0],
            offsets[start : stop + 1] - offsets[start],
            start,
            len(self.x_NC),
            weight_E=here.weight_E,
            features_EK=here.features_EK,
        )

    def _small_graph(
        self, *, loops: int, nodes: int = _NODES, edges: int = _EDGES, of_hubs: int = 0
    ) -> tuple[Tensor, Neighbourhood, Tensor]:
        """Return a graph with ``loops`` self-loops, if edges are within a type. It has repeated edges, rows without
        in-edges, a tile's last one and a whole tile among them, and a node with many out-edges and one with many
        in-edges."""
        generator, others = self.generator, int(_OTHER_TYPE_SHARE * nodes) if self.layer.own else 0
        sources = torch.randint(0, others or nodes, (edges,), generator=generator)
        targets = torch.randint(0, nodes - len(_WITHOUT_EDGES), (edges,), generator=generator)
        targets += len(_WITHOUT_EDGES) * (targets >= _WITHOUT_EDGES.start)
        targets -= (targets == _TILE - 1).long()
        sources[edges - of_hubs :], targets[edges - 2 * of_hubs : edges - of_hubs] = 1, 2
        if others:
            sources += nodes
        else:
            sources = torch.where(sources == targets, (sources + 1) % nodes, sources)
            sources[:loops] = targets[:loops]
        again = slice(loops, loops + _REPEATS)
        sources, targets = torch.cat((sources, sources[again])), torch.cat((targets, targets[again]))
        order = (targets * (nodes + others) + sources).argsort(stable=True)
        near = self._make_neighbourhood(torch.stack((sources, targets))[:, order], nodes, torch.float64, generator)
        near = replace(near, others_S=torch.arange(nodes, nodes + others))
        counts = torch.bincount(targets, minlength=nodes)
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        x_NC = self._random_numbers(nodes + others, self.layer.columns, self.whole, torch.float64, generator)
        positive = self.layer.positive_columns
        x_NC[:, positive] = x_NC[:, positive].abs() + 0.1
        return x_NC, near, offsets

    def _random_numbers(
        self, rows: int, columns: int, whole: Sequence[int], dtype: torch.dtype, generator: torch.Generator
    ) -> Tensor:
        """Return random numbers; zeros and ones in columns that must be ``whole`` numbers."""
        normal = torch.randn(rows, columns, generator=generator, dtype=dtype)
        found = fractions(normal) if self.of_fractions else normal.clone()
        found[:, list(whole)] = (normal[:, list(whole)] > 0).to(dtype)
        return found

    def _make_neighbourhood(
        self, edge_index: Tensor, rows: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Neighbourhood:
        """Return edges into the first ``rows`` nodes, with their data."""
        edges, carried = edge_index.shape[1], self.layer.edge_data
        weight = 0.1 + torch.rand(edges, generator=generator, dtype=dtype)
        weight = (weight > 0.5).to(dtype) if self.whole_weights else weight
        features = self._random_numbers(edges, self.edge_features, self.whole_features, dtype, generator)
        return Neighbourhood(
            0,
            rows,
            torch.empty(0, dtype=torch.int64),
            edge_index,
            weight if EdgeData.WEIGHT in carried else None,
            features if EdgeData.FEATURES in carried else None,
        )


def _almost_equal(found: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether two results are equal except for rounding; NaN equals NaN."""
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return found.shape == expected.shape and torch.allclose(
        found, expected, rtol=0.0, atol=tolerance * max(scale, 1e-3), equal_nan=True
    )


def _select_edges(near: Neighbourhood, which: slice | Tensor) -> Neighbourhood:
    """Return the graph with only these of its edges, in this order."""
    weight_E, features_EK = (None if v is None else v[which] for v in (near.weight_E, near.features_EK))
    return replace(near, edge_index_2E=near.edge_index_2E[:, which], weight_E=weight_E, features_EK=features_EK)


def _zeros_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
