# SPDX-License-Identifier: Apache-2.0
"""Opaque layers: any other layer that takes edges. The user's own forward runs on a tile's rows and their
in-neighbours.

Forward, a tile gathers its rows and their in-neighbours from the pulled matrix, and runs the layer on the graph that
they form (``kernels.neighbourhood``), in several runs of rows if there are many edges. Backward, it runs again under
autograd. The gradient goes to all of these rows: to the tile's own, of which each is a row of the result, and to those
of the in-neighbours, which are added up tile after tile in order. So two matrices in full width are read and added to
at random: the one that is gathered from, and its gradient. If they are not in memory whole, the first is shuffled to
the tiles that gather from it, and what is added to the second waits in a file (both: ``ooc.plan.layout.shuffle``). Then
nothing is read or written at random, but rows move once for every bucket with an edge from them, while a sum would need
only some columns of every row at a time. The rows of a tile are computed together by code that guarantees nothing for
single rows, so tiles are the same in every plan.

Shapes: R rows of the tile, S nodes of the graph around some of them, C columns of the source.
"""

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from io import BytesIO
from threading import local
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.kernels.dropout.edges import EdgeDropout
from ooc.kernels.dropout.opaque import InnerDropout
from ooc.kernels.edges import TileEdges
from ooc.kernels.fixed_order import in_fixed_order
from ooc.kernels.neighbourhood import (
    EDGES_AT_ONCE,
    EDGES_AT_ONCE_ON_DEVICE,
    PADDED_EDGE,
    PADDED_ROW,
    BucketRows,
    Neighbourhood,
    edges_at_once,
    neighbourhood,
    present,
    runs,
)
from ooc.kernels.pieces.caught_sums import Total
from ooc.kernels.tensors import gradients_of
from ooc.model.graph import Scaling
from ooc.model.layers.conformance import ProbeResult, check_sizes, probe_layer
from ooc.model.layers.layer import Layer, layer_of, sharing
from ooc.model.layers.per_edge import EdgeAggregate, Key, Pulling, Scattered
from ooc.model.layers.split_rows import Part, SplitRow, add_gradients
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value
from ooc.plan.workload import EdgeData, EdgeWork, PerEdge

R = TypeVar("R")

_BYTES_PER_EDGE = 96
"""Bytes of an edge while its tile's graph is made: both ends, which of them are the tile's own, their order; int64."""
_SORTING_BYTES_PER_EDGE = 64
"""Further bytes of an edge on a device, which sorts edges to add up in one order."""
_RUN_OPERATORS = 30
"""Operators of a run beside the layer's own: making its graph, gathering rows, adding gradients."""
_CALL_OPERATORS = 50
"""The further time of a call of PyG's layer, in Python, in operators, by the same measurements."""
_TIMES_STREAMED = 5, 3, 4
"""How often the CPU writes or reads a layer's temporaries of an edge: forward, and for gradients of parameters and of
rows. Measured on twelve layers of 32 to 96 columns with 10 and 30 edges a row, by the processor time of their
passes."""
_RUN_BYTES, _RUN_BYTES_ON_DEVICE = 8 << 20, 64 << 20
"""The most bytes of edge temporaries in a run, on the CPU and on a device, if rows have few enough edges or are
split."""
_SMALL_BYTES, _RUN_BYTES_OF_SMALL = 512 << 20, 16 << 20
"""If a layer makes at most the first number of bytes for all edges of the graph, its runs may make the second: in a run
of 8 MiB with 32 columns, calls of operators take half the time, and such graphs do not lack memory."""
_RUN_BYTES_OF_NODES = 12 << 20
"""The same for layers that make little for edges and most for nodes, which few edges bring: a run of 8 MiB takes 1.4
times as long."""
_FEWEST_EDGES = 256
"""The fewest edges of a run, whatever they take."""
_WAITING_BYTES = 16 << 20
"""The most bytes of a tile's gradients of in-neighbours that wait. With more, they are computed a second time as they
are added; an average tile has half as many edges."""
_NUMBER_BYTES = 8
"""Further bytes for the in-neighbour's number."""
_FEW_NUMBERS = 8
"""Numbers of a parameter small enough that a forward may branch on it, as it may on one whose numbers are all equal."""


class _JoinedRows:
    """Sources [N, C] and ``own`` rows of targets [R, C], from number ``first`` on, with the interface of one matrix of
    ``columns`` columns: targets follow sources, and the narrower one is padded with zeros."""

    def __init__(self, source: Tensor | BucketRows, own: Tensor, first: int, columns: int) -> None:
        self._source, self._own, self._first, self._columns = source, own, len(source) + first, columns

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._widened(self._own[rows.start - self._first : rows.stop - self._first])

    def index_select(self, dim: int, rows_S: Tensor) -> Tensor:
        """Return rows of sources. The stand-in where there is none is an arbitrary row of numbers."""
        if rows_S.shape[0] and int(rows_S[-1]) >= len(self):
            numbers = torch.arange(1, self._columns + 1, dtype=self._own.dtype, device=self._own.device)
            return numbers[None] / (self._columns + 1)
        return self._widened(self._source.index_select(dim, rows_S))

    def _widened(self, rows_RC: Tensor) -> Tensor:
        more = self._columns - rows_RC.shape[1]
        return F.pad(rows_RC, (0, more)) if more else rows_RC


class Opaque(EdgeAggregate):
    """The aggregation by an opaque ``layer`` of ``source``. ``module``: a copy of it in the mode it runs in; ``site``
    keys the masks of its first dropout, further ones follow. ``target``: the rows themselves, if neighbours are of
    another node type; ``most_edges``: of a row, in either direction; ``all_edges``: of the graph."""

    pulls_targets = True

    def __init__(
        self,
        index: int,
        source: Value,
        layer: Layer,
        module: nn.Module,
        probed: ProbeResult,
        *,
        site: int,
        keep: bool,
        most_edges: int,
        all_edges: float,
        target: Value | None = None,
    ) -> None:
        super().__init__(index, source, target, groups=1, result=math.prod(probed.tail), kept=0, keep=keep)
        self.space = self.brought.space
        self.scaling = Scaling.REVERSED_SUM if layer.flipped != layer.sums_at_sources else Scaling.SUM
        self.parameters = probed.of(module)
        self.layer = replace(layer, pairs=probed.pairs, looks_up=probed.looks_up)
        self.probed = probed
        self.site = site
        self.most_edges = most_edges
        self.all_edges = all_edges
        self._module = module
        self._of_thread = local()

    @property
    def edge_data(self) -> tuple[EdgeData, ...]:
        return self.layer.edge_data

    @property
    def brought(self) -> Value:
        return self.source if self.target is None else self.target

    @property
    def rows_train(self) -> bool:
        """Whether any of its input rows have a gradient."""
        return any(value.trains for value in self.inputs)

    @property
    def trains_target(self) -> bool:
        return self.own_trains or self.rows_train

    @property
    def pulled_target_columns(self) -> int:
        """The columns of the rows; if no rows have a gradient, one column of zeros, since a pull must give
        something."""
        return self.brought.columns if self.rows_train else 1

    def needs(self) -> tuple[Value, ...]:
        return ()

    def rehearse(self, key: Key, dtype: torch.dtype, kept: torch.dtype) -> None:
        """Nothing of it is compiled."""

    @property
    def splits_rows(self) -> bool:
        """Whether a row's edges are taken in pieces, if there are many."""
        return bool(self.probed.calls)

    def edges_at_once(self, *, on_device: bool) -> int:
        """The most edges of a run, which does not depend on budgets."""
        of_edge = self.temporaries(self.probed.itemsize)[1]
        if on_device:
            return min(EDGES_AT_ONCE_ON_DEVICE, max(_FEWEST_EDGES, _RUN_BYTES_ON_DEVICE // of_edge))
        run_bytes = _RUN_BYTES_OF_SMALL if self.all_edges * of_edge <= _SMALL_BYTES else _RUN_BYTES
        if self.layer.looks_up and self.probed.edge_bytes < self.probed.node_bytes:
            run_bytes = max(run_bytes, _RUN_BYTES_OF_NODES)
        return min(EDGES_AT_ONCE, max(_FEWEST_EDGES, run_bytes // of_edge))

    def forward(self, key: Key, tile: TileEdges, source: Tensor | BucketRows, own: Tensor, groups: range) -> Tensor:
        module, parts = self._module_of_thread(), []
        tile, source = self.with_own_rows(tile, source, own)
        for run, split in self._runs(key, tile, source, {}):
            if split is not None:
                parts.append(split.forward())
                continue
            near = self._graph(run, len(source))
            x_SC = near.gather(source)
            if self.keep and x_SC.device.type == "cpu":
                parts.append(self._compute_recorded(key, module, run, near, x_SC, len(source)))
            else:
                parts.append(self._run(key, near, partial(self.layer.forward, module, x_SC, near)))
        return torch.cat(parts)

    def _graph(self, run: TileEdges, rows: int) -> Neighbourhood:
        """Return the graph of a run, which is the same in every epoch."""
        retained, name = run.retained, _run_key(run, rows)
        found: Neighbourhood | None = None if retained is None else retained.get(name)
        if found is not None and not found.edge_index_2E._version:  # and the layer has not written to it
            return replace(found, weight_E=run.weight_E, features_EK=run.features_EK)
        near = neighbourhood(run, rows)
        is_whole = not near.stands_in and near.edge_index_2E.shape[1] == run.indices_E.shape[0]
        if retained is not None and found is None and is_whole:
            retained.keep(name, near.nbytes, lambda: replace(near, weight_E=None, features_EK=None))
        return near

    def _compute_recorded(
        self, key: Key, module: nn.Module, run: TileEdges, near: Neighbourhood, x_SC: Tensor, rows: int
    ) -> Tensor:
        """Return a run's rows computed under autograd, whether retained or not, so that the bits are the same."""
        name, found = (self, _run_key(run, rows)), self.probed
        padding = found.padding_bytes
        edge_bytes = found.edge_bytes + _BYTES_PER_EDGE + (PADDED_EDGE - 1) * padding
        nbytes = near.edge_index_2E.shape[1] * edge_bytes + near.rows * PADDED_ROW * padding
        nbytes += x_SC.shape[0] * (found.node_bytes + self.layer.columns * found.itemsize)
        kept: list[Any] | None = None if run.retained is None else run.retained.keep(name, nbytes, list)
        if kept is not None:
            near = near.with_copies()
        x_SC = x_SC.requires_grad_(self.rows_train)

        def compute() -> Tensor:
            with torch.enable_grad():
                return self.layer.run(module, x_SC, near)[: near.rows]

        result = self._run(key, near, compute)
        if kept is not None:
            kept += x_SC, near, result, self._parameter_versions(key)
        return result.detach()

    def _parameter_versions(self, key: Key) -> tuple[int, ...]:
        """Return epoch and versions of the parameters, which an optimizer's step changes."""
        return key.epoch, *(parameter._version for parameter in self.parameters)

    def _runs(
        self, key: Key, tile: TileEdges, source: Tensor | BucketRows, totals: dict[int, list[Total]]
    ) -> Iterator[tuple[TileEdges, SplitRow | None]]:
        """Yield the runs of a tile. A row with more edges than are taken at once is split; ``totals`` are its own, by
        row."""
        place, module = tile.indices_E.device, self._module_of_thread()
        most = min(edges_at_once(place), self.edges_at_once(on_device=place.type != "cpu"))
        taken, itemsize = self.probed, self.probed.itemsize
        of_edge = self._bytes_per_edge(taken.edge_bytes + taken.node_bytes, itemsize)
        # A piece of a row takes no more memory than so many edges of whole rows.
        piece = max(1, most * of_edge // max(of_edge, self._bytes_per_edge(taken.piece_bytes, itemsize)))
        running = partial(self._run_context, key)
        for run in runs(tile, most, pads=bool(self.probed.padding_bytes)):
            row = present(run, len(source)) if self.splits_rows and run.indices_E.shape[0] > most else None
            if row is None or row.indices_E.shape[0] <= most:
                yield run, None
                continue
            of_row = totals.setdefault(run.start, [])
            yield run, SplitRow(self.layer, module, self.probed.calls, running, row, piece, source, of_row)

    def backward_targets(
        self, key: Key, tile: TileEdges, source: Tensor | BucketRows, own: Tensor, groups: range
    ) -> Scattered:
        """Return the gradients of everything it depends on, from a tile's rows of the result's gradient, ``own``,
        followed by the target's rows if there is a target."""
        trains = self.rows_train
        tile, source = self.with_own_rows(tile, source, own[:, self.result :])
        own = own[:, : self.result]
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        parts = partial(self._backward_parts, key, tile, source, own, parameters, {})
        wait = tile.indices_E.shape[0] <= self.waiting_edges
        others: Iterable[tuple[Tensor, Tensor]] = []
        sums: list[Tensor | None] = [None] * len(parameters)
        rows = own.new_zeros(tile.rows, self.pulled_target_columns)
        for start, (of_rows, of_others, of_parameters) in parts():
            sums = [
                add_gradients(total, part)
                for total, part in zip(sums, of_parameters or [None] * len(sums), strict=True)
            ]
            if trains:
                rows[start : start + of_rows.shape[0]] += of_rows[:, : self.brought.columns]
                if of_others is not None and isinstance(others, list) and wait and self.source.trains:
                    others.append(self._source_columns(of_others))
        if not wait and self.source.trains:
            others = (self._source_columns(of_others) for _, (_, of_others, _) in parts() if of_others is not None)
        pairs = [(p, total) for p, total in zip(parameters, sums, strict=True) if total is not None]
        return Scattered(rows, others, pairs)

    def _source_columns(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return gradients of sources' rows, without the columns that only targets have."""
        return found[0], found[1][:, : self.source.columns]

    def with_own_rows(self, tile: TileEdges, source: Any, own: Tensor) -> tuple[TileEdges, Any]:
        """Return the tile and what it gathers from, if targets' own rows are in another matrix than sources'."""
        if self.target is None:
            return tile, source
        columns = self.layer.columns
        return replace(tile, start=len(source) + tile.start), _JoinedRows(source, own, tile.start, columns)

    def _backward_parts(
        self,
        key: Key,
        tile: TileEdges,
        source: Tensor | BucketRows,
        own: Tensor,
        parameters: Sequence[nn.Parameter],
        totals: dict[int, list[Total]],
    ) -> Iterator[tuple[int, Part]]:
        """Yield the gradients run by run, from a tile's rows of the result's gradient, with where the run's rows begin
        in the tile."""
        module, trains = self._module_of_thread(), self.rows_train
        for run, split in self._runs(key, tile, source, totals):
            start = run.start - tile.start
            gradient = own[start : start + run.rows]
            if split is not None:
                for part in split.backward(gradient, parameters, trains=trains):
                    yield start, part
                continue
            known = None if run.retained is None else run.retained.take((self, _run_key(run, len(source))))
            if known and known[-1] == self._parameter_versions(key):
                x_SC, near, result, _ = known
                found = gradients_of([result], [x_SC, *parameters], [gradient])
                d_x, of_parameters = found[0], found[1:]
            else:
                near = self._graph(run, len(source))
                x_SC = near.gather(source)
                differentiate = partial(self.layer.backward, module, x_SC, near, gradient, parameters, trains=trains)
                d_x, of_parameters = self._run(key, near, differentiate)
            d_x = torch.zeros_like(x_SC) if d_x is None else d_x
            others = (near.others_S, d_x[run.rows :]) if self.source.trains and not near.stands_in else None
            yield start, (d_x[: run.rows], others, of_parameters)

    def target_gradient(self, pulled: Tensor) -> tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]:
        return pulled, []  # parameters' gradients came with the scattered rows

    def _bytes_per_edge(self, own_bytes: int, itemsize: int) -> int:
        """Return the bytes of an edge, for a layer that takes ``edge_bytes`` for it, including the node that it
        brings."""
        rows_bytes = (1 + (self.target is not None)) * self.layer.columns * itemsize  # of two matrices, as wide as both
        return (
            own_bytes + rows_bytes + self._mask_bytes + _BYTES_PER_EDGE + (PADDED_EDGE - 1) * self.probed.padding_bytes
        )

    @property
    def _mask_bytes(self) -> int:
        return 2 * max((dropped.row_nbytes for dropped in self.probed.dropped), default=0)  # a loop for each edge

    def temporaries(self, itemsize: int) -> tuple[int, int, int]:
        taken, columns, between = self.probed, self.layer.columns, self.target is not None
        of_row = (2 + between) * (columns + self.result) * itemsize + PADDED_ROW * taken.padding_bytes
        of_row += taken.node_bytes + (1 + between) * columns * itemsize + self._mask_bytes
        return EDGES_AT_ONCE, self._bytes_per_edge(taken.edge_bytes + taken.node_bytes, itemsize), of_row

    def device_temporaries(self, itemsize: int) -> tuple[int, int, int]:
        _, bytes_per_edge, bytes_per_row = self.temporaries(itemsize)
        bytes_per_edge += _SORTING_BYTES_PER_EDGE
        return EDGES_AT_ONCE_ON_DEVICE, bytes_per_edge, bytes_per_row + bytes_per_edge  # rows count as edges, too

    def per_edge(
        self, pulling: Pulling, columns: int, own: str | None, itemsize: int, *, on_device: bool = False
    ) -> PerEdge:
        is_forward, found = pulling is Pulling.FORWARD, self.probed
        waiting = 0 if is_forward or not self.rows_train else self.layer.columns * itemsize + _NUMBER_BYTES
        _, of_edge, of_row = self.device_temporaries(itemsize) if on_device else self.temporaries(itemsize)
        operators = found.forward_operators if is_forward else found.backward_operators
        at_once = self.edges_at_once(on_device=on_device)
        work = EdgeWork(of_edge, operators=_RUN_OPERATORS + operators)
        if not on_device:
            parts = 1 if is_forward else 2 + self.rows_train  # shares of a run's time, with as many products each
            # The layer is run forward again.
            products, once = found.multiplies // (3 if self.keep else 1), int(not is_forward)
            work = EdgeWork(
                sum(_TIMES_STREAMED[:parts]) * of_edge,
                operators=work.operators + (1 + once) * _CALL_OPERATORS,
                multiplies_per_edge=parts * products,
                retainable_bytes_per_edge=once * _TIMES_STREAMED[0] * of_edge,
                retainable_operators=once * (found.forward_operators + _CALL_OPERATORS),
                retainable_multiplies_per_edge=once * products,
            )
        return PerEdge(
            *(self.groups, columns, own, at_once, of_edge, of_row),
            opaque=True,
            pads=bool(found.padding_bytes),
            apart=self.target is not None,
            together=found.together,
            held_bytes=sum(call.held_bytes for call in found.calls),
            waiting_bytes_per_edge=waiting,
            waiting_edges=self.waiting_edges,
            work=work,
        )

    @property
    def waiting_edges(self) -> int:
        """The most edges of a tile whose gradients of in-neighbours wait until they are added."""
        return _WAITING_BYTES // (self.layer.columns * self.probed.itemsize)

    def _run(self, key: Key, near: Neighbourhood, compute: Callable[[], R]) -> R:
        """Return ``compute()`` for ``near``. If no dropout was found, its calls are not watched on the CPU, which saves
        a quarter of the time for few edges; that torch's generator has not advanced shows the same."""
        if self._module.training and not self.probed.dropped and near.others_S.device.type == "cpu":
            before = torch.get_rng_state()
            found = compute()
            if torch.equal(torch.get_rng_state(), before):
                return found
        with self._run_context(key, near):
            return compute()

    @contextmanager
    def _run_context(self, key: Key, near: Neighbourhood) -> Iterator[None]:
        """A context while the layer runs on ``near``: sums in one order, and in training the masks of this epoch, which
        also detect dropout in a layer that had none when tried."""
        where, dropped = self.layer.where, self.probed.dropped

        def mask(call: int, p: float) -> EdgeDropout:
            return EdgeDropout(p, key.seed, key.epoch, self.site + call)

        training = self._module.training
        with (
            in_fixed_order(near.others_S.device, where),
            InnerDropout(near, dropped, mask, where) if training else nullcontext(),
        ):
            yield

    def _module_of_thread(self) -> nn.Module:
        """Return this thread's copy, since a layer may keep state while it runs."""
        module: nn.Module | None = getattr(self._of_thread, "module", None)
        if module is None:
            module = self._of_thread.module = sharing(self._module, self.layer.where)
        return module


def _run_key(run: TileEdges, rows: int) -> tuple[int, ...]:
    """Return a key of a run of rows and of how many rows it gathers from."""
    return run.start, run.rows, run.indices_E.shape[0], rows


class Content(pickle.Pickler):
    """Pickles objects by content: tensors by their numbers, weights by their shape only, since what is found about a
    layer must hold for others, too; classes and functions by name."""

    def reducer_override(self, one: Any) -> Any:
        if type(one).__module__ == "torch_geometric.inspector":  # a cache by class, which grows from call to call
            return tuple, ((one._cls,),)
        if not isinstance(one, Tensor):
            return NotImplemented
        kept = type(one).__name__, one.dtype, one.requires_grad, tuple(one.shape), str(one.device)
        numbers = one.detach().cpu().contiguous().view(-1)
        is_weights = (
            isinstance(one, nn.Parameter) and len(numbers) > _FEW_NUMBERS and bool((numbers != numbers[0]).any())
        )
        return tuple, ((*kept, None if is_weights else sha256(numbers.view(torch.uint8).numpy().data).digest()),)


def digest(*objects: Any, pickler: type[Content] = Content) -> bytes | None:
    """Return a digest that is equal for objects made alike, except for the values of weights; None for nameless classes
    and functions, and for anything that cannot be pickled."""
    content = BytesIO()
    try:
        pickler(content).dump(objects)
    except Exception:  # only the user's classes count
        return None
    return sha256(content.getbuffer()).digest()


def lower_opaque(
    conv: nn.Module,
    where: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    assembly: Assembly,
    *,
    parts: tuple[Any, ...] = (),
    kind: type[Opaque] = Opaque,
) -> Value:
    """Return what an opaque layer gives for these arguments, or ``parts`` of it if it gives several. Raises ModelError
    if it cannot be run tile by tile."""
    layer, values = layer_of(conv, where, args, kwargs, parts)
    rows, setting, relation = dict(zip(layer.rows, values, strict=True)), assembly.setting, layer.relation
    source = assembly.matrix(where, [rows[name] for name in layer.of_sources])  # since a run gathers rows of one matrix
    target = assembly.matrix(where, [rows[name] for name in layer.own]) if layer.own else None
    if setting.types is not None and kind is Opaque and relation is None:
        raise layer.refuse("of a graph with types it must be given edges of one")
    assembly.edge_data.update(layer.edge_data)
    module, all_edges = sharing(conv, where), setting.edges_of(relation)
    rows_train = source.trains or (target is not None and target.trains)
    record = setting.training and (rows_train or any(p.requires_grad for p in conv.parameters()))
    options: dict[str, Any] = {
        "edge_features": 1 if kind is not Opaque else setting.features_of_edges(relation),  # of links
        "dtype": setting.dtype,
        "record": record,
        "on_cpu": setting.on_cpu,
        "in_pieces": setting.most_edges(relation) > min(_FEWEST_EDGES, edges_at_once(torch.device("cpu"))),
    }
    in_either_mode = conv, layer.kind, str(options | {"record": None})
    # Answers are shared by equal layers, as in deep models or for several edge types.
    question = digest(module, layer.kind, options) or (*in_either_mode, record, module.training)
    probed = setting.probed.get(question)
    if probed is None:
        trained = None if setting.training else setting.probed.get(in_either_mode)
        in_training = None if trained is None or trained.tells_modes else trained
        probed = setting.probed[question] = probe_layer(layer, module, **options, in_training=in_training)
    if setting.training:
        setting.probed[in_either_mode] = probed
    if kind is Opaque:
        sizes = tuple(assembly.num_rows(one) for one in (target or source, source)), all_edges
        if (question, sizes) not in setting.probed:
            check_sizes(layer, module, probed, *sizes, **options)
            setting.probed[question, sizes] = probed
    keep = setting.training and (rows_train or bool(probed.parameters))
    site = assembly.sites + 1
    assembly.sites += len(probed.dropped)
    if relation is None:
        assembly.convolved.append(source)
    most_edges, of_all = int(min(setting.most_edges(relation), 1 << 62)), all_edges if kind is Opaque else math.inf
    own: dict[str, Any] = {"site": site, "keep": keep, "most_edges": most_edges, "all_edges": of_all}
    made = kind(assembly.next_index(), source, layer, module, probed, target=target, **own)
    if relation is not None:
        made.over(relation)
    tail = probed.tail
    return made if len(tail) == 1 else assembly.rowwise(where, lambda rows: rows.reshape(len(rows), *tail), [made])
