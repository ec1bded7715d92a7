# SPDX-License-Identifier: Apache-2.0
"""Any other layer that is given the edges: the user's own forward, run on a tile's rows and their in-neighbours.

Forward, a tile gathers its rows and their in-neighbours out of the pulled matrix and runs the layer on the graph that
they make (``kernels.neighbourhood``), run after run of rows where there are many edges. Backward, it runs once more
under autograd, and the gradient goes to all of these rows: to the tile's own, which are a row of the result each, and
to those of the in-neighbours, which are added up, tile after tile in their order. Two matrices in full width are read
and added to anywhere: the one that is gathered from, and its gradient. Where they are not in memory whole, the first is
shuffled to the tiles that gather from it, and what is added to the second waits in a file (both:
``ooc.plan.layout.shuffle``): nothing is read or written at random, but rows move once for every bucket that has an edge
from them, where a sum gets by with some columns of every row. Rows of a tile are computed together by code that
promises nothing of single rows, so tiles are the same ones in every plan.

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
from ooc.model.layers.split_rows import Part, SplitRow, added
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value
from ooc.plan.workload import EdgeData, EdgeWork, PerEdge

R = TypeVar("R")

_BYTES_PER_EDGE = 96
"""Of an edge while its tile's graph is made: both ends, which of them are the tile's own, their order; int64."""
_SORTING_BYTES_PER_EDGE = 64
"""Of an edge besides where a device sorts, as it does to add up in one order."""
_RUN_OPERATORS = 30
"""Of a run besides the layer's own: its graph made, rows gathered, gradients added."""
_CALL_OPERATORS = 50
"""In the time that the Python of a call of a layer of PyG takes besides, by the same measurements."""
_TIMES_STREAMED = 5, 3, 4
"""How often the CPU writes or reads what a layer has at a time for an edge: forward, and for gradients, of parameters
and of rows. Of twelve layers of 32 to 96 columns over 10 and 30 edges a row, by the processor time of their passes."""
_RUN_BYTES, _RUN_BYTES_ON_DEVICE = 8 << 20, 64 << 20
"""Of what a layer makes of a run's edges, where rows have few enough of them, or are split."""
_SMALL_BYTES, _RUN_BYTES_OF_SMALL = 512 << 20, 16 << 20
"""Where a layer makes no more than that of all edges of the graph, so much is made of a run's: calls of operators are
half of the time of a run of 8 MiB of 32 columns, and nobody lacks the memory."""
_RUN_BYTES_OF_NODES = 12 << 20
"""Where a layer makes little for an edge itself, and most for nodes, of which most edges bring none: a run of 8 MiB
takes 1.4 times as long."""
_FEWEST_EDGES = 256
"""Of a run, however much that is."""
_WAITING_BYTES = 16 << 20
"""Of a tile's gradients of in-neighbours that wait. Where they would be more, they are computed once more as they are
added: tiles have half as many edges on average."""
_NUMBER_BYTES = 8
"""Of which in-neighbour that is, besides."""
_FEW = 8
"""Numbers of a parameter that a forward may go another way by, as by those that are all alike."""


class _JoinedRows:
    """Sources [N, C] and ``own`` rows of targets [R, C], the first of which is number ``first``, seen as one matrix of
    so many ``columns``, zeros behind the narrower: targets behind sources."""

    def __init__(self, source: Tensor | BucketRows, own: Tensor, first: int, columns: int) -> None:
        self._source, self._own, self._first, self._columns = source, own, len(source) + first, columns

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._widened(self._own[rows.start - self._first : rows.stop - self._first])

    def index_select(self, dim: int, rows_S: Tensor) -> Tensor:
        """Of sources; what stands in for one where there is none is a row of numbers like any."""
        if rows_S.shape[0] and int(rows_S[-1]) >= len(self):
            numbers = torch.arange(1, self._columns + 1, dtype=self._own.dtype, device=self._own.device)
            return numbers[None] / (self._columns + 1)
        return self._widened(self._source.index_select(dim, rows_S))

    def _widened(self, rows_RC: Tensor) -> Tensor:
        more = self._columns - rows_RC.shape[1]
        return F.pad(rows_RC, (0, more)) if more else rows_RC


class Opaque(EdgeAggregate):
    """What ``layer`` gives for ``source``. ``module``: a copy of it in the mode that it is to run in; ``site`` keys the
    masks of its first dropout, the next one those of its second. ``target``: where neighbours are
    nodes of another type, the rows themselves; ``most_edges``: of a row, whichever way; ``all_edges``: of the graph."""

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
        """Whether any of the rows that it is given have a gradient."""
        return any(value.trains for value in self.inputs)

    @property
    def trains_target(self) -> bool:
        return self.own_trains or self.rows_train

    @property
    def pulled_target_columns(self) -> int:
        """Those of the rows; where no rows have a gradient a column of zeros, since a pull gives something."""
        return self.brought.columns if self.rows_train else 1

    def needs(self) -> tuple[Value, ...]:
        return ()

    def rehearse(self, key: Key, dtype: torch.dtype, kept: torch.dtype) -> None:
        """Nothing of it is compiled."""

    @property
    def splits_rows(self) -> bool:
        """Whether a row's edges are taken in pieces, where there are many."""
        return bool(self.probed.calls)

    def edges_at_once(self, *, on_device: bool) -> int:
        """Of a run: no budget's affair."""
        of_edge = self.temporaries(self.probed.itemsize)[1]
        if on_device:
            return min(EDGES_AT_ONCE_ON_DEVICE, max(_FEWEST_EDGES, _RUN_BYTES_ON_DEVICE // of_edge))
        run_bytes = _RUN_BYTES_OF_SMALL if self.all_edges * of_edge <= _SMALL_BYTES else _RUN_BYTES
        if self.layer.looks_up and self.probed.edge_bytes < self.probed.node_bytes:
            run_bytes = max(run_bytes, _RUN_BYTES_OF_NODES)
        return min(EDGES_AT_ONCE, max(_FEWEST_EDGES, run_bytes // of_edge))

    def forward(self, key: Key, tile: TileEdges, source: Tensor | BucketRows, own: Tensor, groups: range) -> Tensor:
        module, parts = self._own_module(), []
        tile, source = self.joined(tile, source, own)
        for run, split in self._runs(key, tile, source, {}):
            if split is not None:
                parts.append(split.forward())
                continue
            near = self._graph(run, len(source))
            x_SC = near.gather(source)
            if self.keep and x_SC.device.type == "cpu":
                parts.append(self._recorded(key, module, run, near, x_SC, len(source)))
            else:
                parts.append(self._run(key, near, partial(self.layer.forward, module, x_SC, near)))
        return torch.cat(parts)

    def _graph(self, run: TileEdges, rows: int) -> Neighbourhood:
        """That of a run, which is the same in every epoch."""
        retained, name = run.retained, _name(run, rows)
        found: Neighbourhood | None = None if retained is None else retained.get(name)
        if found is not None and not found.edge_index_2E._version:  # nor has the layer written to it
            return replace(found, weight_E=run.weight_E, features_EK=run.features_EK)
        near = neighbourhood(run, rows)
        is_whole = not near.stands_in and near.edge_index_2E.shape[1] == run.indices_E.shape[0]
        if retained is not None and found is None and is_whole:
            retained.keep(name, near.nbytes, lambda: replace(near, weight_E=None, features_EK=None))
        return near

    def _recorded(
        self, key: Key, module: nn.Module, run: TileEdges, near: Neighbourhood, x_SC: Tensor, rows: int
    ) -> Tensor:
        """A run's rows, computed under autograd, be it retained or not, so that these have the same bits."""
        name, found = (self, _name(run, rows)), self.probed
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
            kept += x_SC, near, result, self._when(key)
        return result.detach()

    def _when(self, key: Key) -> tuple[int, ...]:
        """Epoch and versions of the parameters, which an optimizer's step changes."""
        return key.epoch, *(parameter._version for parameter in self.parameters)

    def _runs(
        self, key: Key, tile: TileEdges, source: Tensor | BucketRows, totals: dict[int, list[Total]]
    ) -> Iterator[tuple[TileEdges, SplitRow | None]]:
        """Those of a tile; where one is a row of more edges than are taken at once, split: ``totals`` are its own, by
        row."""
        place, module = tile.indices_E.device, self._own_module()
        most = min(edges_at_once(place), self.edges_at_once(on_device=place.type != "cpu"))
        taken, itemsize = self.probed, self.probed.itemsize
        of_edge = self._of_edge(taken.edge_bytes + taken.node_bytes, itemsize)
        # A piece of a row takes no more than so many edges of whole rows.
        piece = max(1, most * of_edge // max(of_edge, self._of_edge(taken.piece_bytes, itemsize)))
        running = partial(self._running, key)
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
        """From a tile's rows of the result's gradient, ``own``, with those of the target if there is one behind it, to
        those of all that it depends on."""
        trains = self.rows_train
        tile, source = self.joined(tile, source, own[:, self.result :])
        own = own[:, : self.result]
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        parts = partial(self._backward_parts, key, tile, source, own, parameters, {})
        wait = tile.indices_E.shape[0] <= self.waiting_edges
        others: Iterable[tuple[Tensor, Tensor]] = []
        sums: list[Tensor | None] = [None] * len(parameters)
        rows = own.new_zeros(tile.rows, self.pulled_target_columns)
        for start, (of_rows, of_others, of_parameters) in parts():
            sums = [added(total, part) for total, part in zip(sums, of_parameters or [None] * len(sums), strict=True)]
            if trains:
                rows[start : start + of_rows.shape[0]] += of_rows[:, : self.brought.columns]
                if of_others is not None and isinstance(others, list) and wait and self.source.trains:
                    others.append(self._of_sources(of_others))
        if not wait and self.source.trains:
            others = (self._of_sources(of_others) for _, (_, of_others, _) in parts() if of_others is not None)
        pairs = [(p, total) for p, total in zip(parameters, sums, strict=True) if total is not None]
        return Scattered(rows, others, pairs)

    def _of_sources(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of sources' rows without the columns that targets alone have."""
        return found[0], found[1][:, : self.source.columns]

    def joined(self, tile: TileEdges, source: Any, own: Tensor) -> tuple[TileEdges, Any]:
        """The tile and what it gathers from, where targets' own rows lie in another matrix than sources'."""
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
        """From a tile's rows of the result's gradient, run by run, and where its rows begin among the tile's."""
        module, trains = self._own_module(), self.rows_train
        for run, split in self._runs(key, tile, source, totals):
            start = run.start - tile.start
            gradient = own[start : start + run.rows]
            if split is not None:
                for part in split.backward(gradient, parameters, trains=trains):
                    yield start, part
                continue
            known = None if run.retained is None else run.retained.take((self, _name(run, len(source))))
            if known and known[-1] == self._when(key):
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
        return pulled, []  # those of parameters came with the scattered rows

    def _of_edge(self, own_bytes: int, itemsize: int) -> int:
        """Bytes of an edge, of which the layer takes so many, the node that it brings included."""
        rows_bytes = (1 + (self.target is not None)) * self.layer.columns * itemsize  # of two matrices, wide as both
        return own_bytes + rows_bytes + self._masks + _BYTES_PER_EDGE + (PADDED_EDGE - 1) * self.probed.padding_bytes

    @property
    def _masks(self) -> int:
        return 2 * max((dropped.row_nbytes for dropped in self.probed.dropped), default=0)  # a loop for each edge

    def temporaries(self, itemsize: int) -> tuple[int, int, int]:
        taken, columns, between = self.probed, self.layer.columns, self.target is not None
        of_row = (2 + between) * (columns + self.result) * itemsize + PADDED_ROW * taken.padding_bytes
        of_row += taken.node_bytes + (1 + between) * columns * itemsize + self._masks
        return EDGES_AT_ONCE, self._of_edge(taken.edge_bytes + taken.node_bytes, itemsize), of_row

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
            parts = 1 if is_forward else 2 + self.rows_train  # of a run's time, each with as many products
            products, once = found.multiplies // (3 if self.keep else 1), int(not is_forward)  # is run forward again
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
        """What ``compute`` gives of ``near``. Where nothing was found to be dropped, calls are not watched on the CPU,
        which takes a quarter of the time of few edges: that torch's generator has not moved on says the same."""
        if self._module.training and not self.probed.dropped and near.others_S.device.type == "cpu":
            before = torch.get_rng_state()
            found = compute()
            if torch.equal(torch.get_rng_state(), before):
                return found
        with self._running(key, near):
            return compute()

    @contextmanager
    def _running(self, key: Key, near: Neighbourhood) -> Iterator[None]:
        """While the layer runs on ``near``: sums in one order, and in training the masks of this epoch, of a layer that
        has dropped nothing too, in case that it does so after all."""
        where, dropped = self.layer.where, self.probed.dropped

        def mask(call: int, p: float) -> EdgeDropout:
            return EdgeDropout(p, key.seed, key.epoch, self.site + call)

        training = self._module.training
        with (
            in_fixed_order(near.others_S.device, where),
            InnerDropout(near, dropped, mask, where) if training else nullcontext(),
        ):
            yield

    def _own_module(self) -> nn.Module:
        """This thread's copy: a layer may keep something while it runs."""
        module: nn.Module | None = getattr(self._of_thread, "module", None)
        if module is None:
            module = self._of_thread.module = sharing(self._module, self.layer.where)
        return module


def _name(run: TileEdges, rows: int) -> tuple[int, ...]:
    """What tells a run of rows from any other, and how many rows it gathers from."""
    return run.start, run.rows, run.indices_E.shape[0], rows


class Content(pickle.Pickler):
    """Of objects: of tensors the numbers, not where these lie; of weights the shape, since what is found out about a
    layer must be true of others, too; classes and functions by their names."""

    def reducer_override(self, one: Any) -> Any:
        if type(one).__module__ == "torch_geometric.inspector":  # it knows of a class, and more from call to call
            return tuple, ((one._cls,),)
        if not isinstance(one, Tensor):
            return NotImplemented
        kept = type(one).__name__, one.dtype, one.requires_grad, tuple(one.shape), str(one.device)
        numbers = one.detach().cpu().contiguous().view(-1)
        is_weights = isinstance(one, nn.Parameter) and len(numbers) > _FEW and bool((numbers != numbers[0]).any())
        return tuple, ((*kept, None if is_weights else sha256(numbers.view(torch.uint8).numpy().data).digest()),)


def digest(*objects: Any, pickler: type[Content] = Content) -> bytes | None:
    """The same for objects that are made alike, but for the values of weights; None where that cannot be told: of
    nameless classes and functions, and of whatever does not let itself be pickled."""
    content = BytesIO()
    try:
        pickler(content).dump(objects)
    except Exception:  # of the user's classes
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
    """What an opaque layer gives for these arguments, ``parts`` of it if it gives several; ModelError where it
    cannot be run tile by tile."""
    layer, values = layer_of(conv, where, args, kwargs, parts)
    rows, setting, relation = dict(zip(layer.rows, values, strict=True)), assembly.setting, layer.relation
    source = assembly.matrix(where, [rows[name] for name in layer.of_sources])  # as a run gathers rows of one
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
    # The same question of layers that are made alike, as a deep model's are, or those of several types of edges.
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
