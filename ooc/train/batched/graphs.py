# SPDX-License-Identifier: Apache-2.0
"""Training on many graphs: a batch consists of whole graphs, and the model returns a row of outputs for each of them.

The module runs on batches as it is, under plain autograd, so PyG's pooling layers and any others do. Scores and
predictions use the same batches. Which batches fit into a memory is measured for the given graphs and model: a step is
run on torch's meta device for the largest possible batch. G graphs of the store; of a batch g graphs, n nodes, e edges,
P paths, H pairs of near nodes.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.errors import ModelError, OptionError
from ooc.events import reported
from ooc.interruption import interruptible_by_ctrl_c
from ooc.model.layers.conformance import Watch
from ooc.model.layers.layer import in_modes
from ooc.model.lowering.network import check_outputs
from ooc.model.lowering.tracing import takes_data
from ooc.model.lowering.whole import as_data, named
from ooc.offloading.measure import META, DryRuns, on_meta
from ooc.plan import Hardware
from ooc.plan.workload import EdgeData
from ooc.sampling.graphs import Bounds, GraphLoader, GraphSizes, Size, batch_nbytes
from ooc.sampling.runs import Ints
from ooc.storage.array import AnyArray
from ooc.storage.store import SPLITS, Store, Task
from ooc.suggestions import checked
from ooc.train.batched.batches import BatchTrainer
from ooc.train.loss import of_results, resolve_loss, takes_results
from ooc.train.metrics import Scorer, Scores, make_scorer, named_scores
from ooc.train.prediction import Predictions, What
from ooc.train.resources import Resources
from ooc.train.setup import edge_data_used, inputs_of, unused_attributes

if TYPE_CHECKING:
    from torch_geometric.data import Data

_NAMED_ARGUMENTS = ("edge_weight", "edge_attr", "path_index", "hop_index", "ptr", "batch_size")
"""Arguments of a model's ``forward`` that are given by name, after features, edges and the graph of each node."""
_POSITIONAL_ARGUMENTS = ("x", "edge_index", "batch")
_CARRIED = {EdgeData.WEIGHT: "edge_weight", EdgeData.FEATURES: "edge_attr"}
_MADE_FROM_EDGES = {"path_index": "paths", "hop_index": "hops"}
"""Inputs made from edges, and the options that enable them."""


class GraphModel:
    """A wrapper that runs ``model`` on batches of graphs of ``store`` and returns ``outputs`` columns per graph.

    ``paths`` and ``hops``: the lengths of paths and of walks between near nodes. ``forward`` is given ``x`` [n, F],
    ``edge_index`` [2, e] and ``batch`` [n], by these names if it has all three, in this order otherwise; and by name
    those it takes of ``edge_weight``, ``edge_attr``, ``path_index`` [paths + 1, P], ``hop_index`` [2, H], ``ptr`` [g +
    1] and ``batch_size`` (g); or PyG's data, which has all this. If it also takes inputs beside ``x``, all are given by
    name, and those of the three that it does not take are left out. Integers and single numbers per edge come as PyG
    has them, or, if the model does not run on these, as floating point and [e, 1]. ModelError where it takes no edge
    data, wants paths that are not made, or does not return a row per graph.
    """

    def __init__(self, model: nn.Module, store: Store, *, paths: int, hops: int, ignore_edge_data: str) -> None:
        self.store, self._path_edges = store, paths
        name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._as_data = takes_data(model)
        takes = None if self._as_data else {"x", *parameters}
        self._inputs, self._of_edges = inputs_of(store, takes), inputs_of(store, takes, "of_edges")
        inputs = [one for one, *_ in self._inputs if one not in ("x", "")]
        everything = self._as_data or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        there = {made for made, edges in (("path_index", paths), ("hop_index", hops)) if edges}
        there |= {_CARRIED[data] for data in edge_data_used(store, ignore_edge_data)}
        for given in sorted(there):
            if given not in parameters and not everything:
                remedy = (
                    f"give {_MADE_FROM_EDGES[given]}=0"
                    if given in _MADE_FROM_EDGES
                    else "leave it out with ignore_edge_data="
                )
                raise ModelError(f"{name} takes no {given}, which there is; let its forward take it, or {remedy}")
        for given in _NAMED_ARGUMENTS[:4]:
            if given in parameters and given not in there and parameters[given].default is inspect.Parameter.empty:
                made = _MADE_FROM_EDGES.get(given)
                remedy = f"give {made}=2 or {made}=3" if made else f"edges of {store.path} have none"
                raise ModelError(f"{name} wants {given}; {remedy}")
        always = {*_POSITIONAL_ARGUMENTS}.intersection(parameters) if inputs else {*_POSITIONAL_ARGUMENTS}
        self._by_name = always if (is_named := always <= parameters.keys()) else {"batch"}.intersection(parameters)
        self._by_place = [] if is_named else [one for one in _POSITIONAL_ARGUMENTS if one not in self._by_name]
        asked = ("ptr",) if self._as_data else _NAMED_ARGUMENTS[4:]
        self._given = [
            one for one in _NAMED_ARGUMENTS if one in there or (one in asked and (self._as_data or one in parameters))
        ]
        try:
            if not self._as_data:
                by_name = {*self._by_name, *self._given, *inputs}
                inspect.signature(model.forward).bind(*self._by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            raise ModelError(
                f"{name}: its forward must take ({', '.join(_POSITIONAL_ARGUMENTS)}), and by name of "
                f"{', '.join(_NAMED_ARGUMENTS)} what there is, or (data), which has these; other attributes of nodes "
                f"belong into columns of x. It takes "
                f"{inspect.signature(model.forward)}"
            ) from error
        self.result_columns = self._probe_columns(model, name)
        self.outputs = self.result_columns[0]
        self.looks_up = any(whole for _, _, whole in self._inputs)
        """Whether node inputs are given as integers."""

    def __call__(self, model: nn.Module, batch: "Data", input_dropout: float = 0.0, *, every: bool = False) -> Tensor:
        """Return the outputs for a batch's graphs [g, C]; of several results the first, or ``every`` one side by
        side."""
        found = of_results(self._results(model, batch, input_dropout), every=every)
        if not found.is_meta and len(found) != len(batch.ptr) - 1:
            raise ModelError(f"{type(model).__name__} gives {len(found)} rows for {len(batch.ptr) - 1} graphs")
        return found

    def _results(self, model: nn.Module, batch: "Data", input_dropout: float = 0.0) -> Any:
        x = F.dropout(batch.x.to(self.dtype), input_dropout, training=True) if input_dropout else batch.x.to(self.dtype)
        given: dict[str, Any] = {one: batch[one] for one in self._given if one != "batch_size"}
        given |= {"batch_size": len(batch.ptr) - 1} if "batch_size" in self._given else {}
        given |= {one: given[one].to(self.dtype) for one in _CARRIED.values() if one in given}
        for one, columns, whole in self._of_edges:
            if one in given:
                found = given[one].reshape(-1, columns) if columns else given[one].reshape(-1)
                given[one] = found.long() if whole else found
        of_nodes = named(x, self._inputs) if self._inputs else {"x": x}
        x, given = of_nodes.pop("x", None), given | of_nodes
        if self._as_data:
            return model(as_data(x, batch.edge_index, given | {"batch": batch.batch}, unused_attributes(self.store)))
        always = {"x": x, "edge_index": batch.edge_index, "batch": batch.batch}
        by_name = {one: always[one] for one in self._by_name}
        return model(*(always[one] for one in self._by_place), **by_name, **given)

    def zero_batch(self, most: Size, place: torch.device | None = None) -> "Data":
        """Return a batch of that size, of zeros; on the meta device without content."""
        from torch_geometric.data import Data

        whole = partial(torch.zeros, dtype=torch.int64, device=place)
        real = partial(torch.zeros, dtype=self.dtype, device=place)
        return Data(
            x=real(most.nodes, self.store.num_features),
            edge_index=whole(2, most.edges),
            batch=whole(most.nodes),
            ptr=whole(most.graphs + 1),
            edge_weight=real(most.edges),
            edge_attr=real(most.edges, self.store.num_edge_features),
            path_index=whole(self._path_edges + 1, most.paths),
            hop_index=whole(2, most.near),
        )

    def measured(self, most: Size) -> tuple["Data", list[Tensor]]:
        """Return a batch of that size on the meta device, and all inputs of a step there."""
        batch = self.zero_batch(most, META)
        return batch, [value for value in batch.to_dict().values() if isinstance(value, Tensor)]

    def forward_bytes(self, model: nn.Module, most: Size) -> int:
        """Return the bytes of the forward pass of a batch of that size, without a backward pass."""
        copy = on_meta(model).eval()
        batch, given = self.measured(most)
        try:
            with (
                torch.no_grad(),
                META,
                Watch([*given, *copy.parameters(), *copy.buffers()]) as watch,
                LargestNumbers(batch, most),
            ):
                self(copy, batch)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return 0  # as in training, which reports it
        return int(watch.peak_bytes) + self.cast_bytes(most)

    def cast_bytes(self, most: Size) -> int:
        """Return the bytes of a copy of a batch where the store's dtype differs from the model's."""
        x, features = self.store.array("x"), self.store.num_edge_features * ("edge_attr" in self._given)
        numbers = most.nodes * x.columns + most.edges * (features + ("edge_weight" in self._given))
        return numbers * self.dtype.itemsize if x.dtype.name != str(self.dtype).removeprefix("torch.") else 0

    def _probe_columns(self, model: nn.Module, name: str) -> tuple[int, ...]:
        """Return the columns of each result, found by running two graphs of two nodes."""
        batch = self.zero_batch(Size(graphs=2, nodes=4, edges=2, paths=0, largest=2))
        batch.batch, batch.ptr = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 4])
        batch.edge_index = torch.tensor([[1, 0], [0, 1]])
        with torch.random.fork_rng(devices=[]), torch.no_grad(), eval_mode(model):
            try:
                with suppress(TypeError, RuntimeError, ValueError, IndexError, AttributeError):
                    return self._columns(self._results(model, batch), name)
                self._inputs = [(given, columns, False) for given, columns, _ in self._inputs]
                self._of_edges = []
                outputs = self._results(model, batch)
            except (TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
                reason = " ".join(str(error).split())
                if "scalar types: Long" in reason:
                    reason = "x and edge_attr are floating-point numbers here; look categories up by x.long()"
                takes = inspect.signature(model.forward)
                if not self._as_data and not {"x", "edge_index"} <= takes.parameters.keys():
                    reason += (
                        f"; its forward takes {takes}, and is given ({', '.join(_POSITIONAL_ARGUMENTS)}) in this order"
                    )
                raise ModelError(f"{name} does not run on a batch of two graphs: {reason}") from error
        return self._columns(outputs, name)

    def _columns(self, outputs: Any, name: str) -> tuple[int, ...]:
        """Return the columns of each result for two graphs."""
        results = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        self.is_flat = len(results) == 1 and isinstance(results[0], Tensor) and results[0].dim() == 1
        results = [results[0][:, None]] if self.is_flat else results
        for one in results:
            if not isinstance(one, Tensor) or one.dim() != 2 or len(one) != 2:
                shape = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
                of_all = isinstance(one, Tensor) and not one.dim() and one is not results[0]
                remedy = (
                    "give a penalty as one.expand(len(out), 1), for a loss of your own" if of_all else "does it pool?"
                )
                raise ModelError(f"{name} gives {shape} for two graphs, not a row of outputs each, [2, C]; {remedy}")
        return tuple(one.shape[1] for one in results)


_NONE_MARKED = (torch.ops.aten.zeros.default, torch.ops.aten.new_zeros.default, torch.ops.aten.zeros_like.default)


class LargestNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for the meta device in which data-dependent sizes are as large as they can be in the ``batch``, of size
    ``most``.

    A number that a model reads from its indices is that of the last graph if it derives from ``batch``, as PyG's
    pooling reads it to count graphs, and otherwise the nodes of the largest graph. The results of comparing values are
    unknown, and torch refuses to read them. A mask with marked places, as in ``to_dense_batch``, selects just as many;
    any other mask selects everything.
    """

    def __init__(self, batch: "Data", most: Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graphs, self._largest = most.graphs - 1, most.largest
        self._of_graphs, self._of_values = {_storage(batch.batch)}, set[int]()
        self._marked = dict[int, int]()
        """By storage of a mask: how many places in it are marked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and not self._is_value(args[0]):
            return self._number(args[0])
        if func is torch.ops.aten.bincount.default and args[0].is_meta:  # torch has no meta kernel for it
            least = args[2] if len(args) > 2 else 0  # whoever gives it means all numbers that there are
            return args[0].new_empty(least or self._number(args[0]) + 1)
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in self._places(index)]
        if func is torch.ops.aten.nonzero.default and len(places := self._places(args[0])) > 1:
            return torch.stack(places, dim=1)
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype is torch.bool and not func.is_view:
            marked = self._marked.pop(_storage(made), None)
            if func in _NONE_MARKED:
                self._marked[_storage(made)] = 0
            elif func is torch.ops.aten.index_put_.default and marked is not None and len(args[1]) == 1:
                self._marked[_storage(made)] = marked + args[1][0].numel()
        given = [one for one in args if isinstance(one, Tensor)]
        of_graphs = given[:1] == [*args[:1]] and _storage(given[0]) in self._of_graphs
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if not isinstance(one, Tensor):
                continue
            if not one.dim() or _storage(one) not in map(_storage, given):  # what was there before has been freed
                _mark(self._of_graphs, one, of_graphs and not one.dim())
            if one.dtype is torch.bool:
                _mark(self._of_values, one, any(map(self._is_value, given)))
        return made

    def _places(self, index: Any) -> list[Any]:
        """Return the indices that ``index`` stands for, one per dimension of a mask that is known to select so many."""
        if index is None or index.dtype is not torch.bool or (marked := self._marked.get(_storage(index))) is None:
            return [index]
        return [index.new_empty(marked, dtype=torch.int64) for _ in range(index.dim())]

    def _number(self, indices: Tensor) -> int:
        return self._graphs if _storage(indices) in self._of_graphs else self._largest

    def _is_value(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() or (tensor.dtype is torch.bool and _storage(tensor) in self._of_values)


def _mark(those: set[int], made: Tensor, belongs: bool) -> None:
    """Record whether ``made`` is one of ``those``, whatever had its storage before."""
    (those.add if belongs else those.discard)(_storage(made))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model in eval mode within this context; afterwards each part is in its mode again."""
    return in_modes(dict.fromkeys(model.modules(), False))


class GraphTrainer(BatchTrainer):
    """Trains ``model`` in place on many graphs, within the memory it is given.

    ``graph`` is a store of many graphs, its path, or anything that ``ooc.convert`` makes one of. Batches are those of
    ``ooc.GraphLoader``, shuffled: ``batch_size`` graphs (default: 32), or bounded by ``batch_nodes``, ``batch_edges``
    or ``batch_paths``; with ``paths`` of two or three edges, and pairs of nodes of two or three ``hops``. A step takes
    ``accumulate`` batches, with the gradients of one batch of all their graphs. ``forward`` takes (``x``,
    ``edge_index``, ``batch``) and by name, as far as it has them, ``edge_weight``, ``edge_attr``, ``path_index``,
    ``hop_index``, ``ptr`` and ``batch_size``, and returns a row of outputs, or a number, per graph. Other arguments as
    in ``Trainer``; ``compute_dtype="bfloat16"`` computes batches with torch's autocast. Where an epoch is interrupted,
    its steps remain, except in a run that is resumed.
    """

    _is_traced = False
    _scorer: Scorer
    loader: GraphLoader

    @checked
    def __init__(
        self,
        model: nn.Module,
        graph: Any,
        *,
        batch_size: int | None = None,
        batch_nodes: int | None = None,
        batch_edges: int | None = None,
        batch_paths: int | None = None,
        paths: int = 0,
        hops: int = 0,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        self._bounds = GraphBounds(batch_size, batch_nodes, batch_edges, batch_paths, paths, hops)
        self._is_bounded = any(options.get(name) is not None for name in ("memory", "gpu_budget", "host_budget"))
        super().__init__(model, graph, accumulate=accumulate, **options)

    def _extra_arguments(self) -> dict[str, Any]:
        return super()._extra_arguments() | {"bounds": self._bounds}

    def _size_lazy_parameters(self, ignore_edge_data: str) -> None:
        if any(map(is_lazy, self.model.parameters())):
            # Runs the model once.
            GraphModel(self.model, self.store, **self._bounds.made, ignore_edge_data=ignore_edge_data)

    def _ready(self, resources: Resources, models: list[nn.Module]) -> None:
        """Admit the memory of batches, of the model on the largest one, and of what scoring keeps of every graph."""
        model, store, asked = self.model, self.store, self._asked
        if not store.num_graphs:
            raise OptionError(f"{store.path} is one graph; ooc.Trainer trains on it")
        self._resources, self.limits, self._stepped = resources, resources.limits, [*model.parameters()]
        self._input_dropout, self._ignored = asked["input_dropout"], asked["ignore_edge_data"]
        loading = self._loader_options(model, resources, asked["seed"])
        self._runs = GraphModel(model, store, **self._bounds.made, ignore_edge_data=self._ignored)
        if self._input_dropout and self._runs.looks_up:
            raise OptionError(f"input_dropout={self._input_dropout} drops from x, which is looked up; leave it out")
        self._scored_columns, self._dtype = outputs, dtype = self._runs.outputs, self._runs.dtype
        self._takes_results = takes_results(asked["loss"])
        if store.task is Task.CLASSES and not self._takes_results:
            check_outputs(outputs, store.num_classes)
        columns = self._runs.result_columns if self._takes_results else (outputs,)
        shapes = {"flat_outputs": self._runs.is_flat, "flat_labels": asked["flat_labels"]}
        self._loss = resolve_loss(asked["loss"], store, columns=columns, dtype=dtype, **shapes)
        self._scorer = make_scorer(store, asked["metric"], rows=store.num_graphs, outputs=outputs, dtype=dtype)
        given = {"input_graphs": "train", "_others": np.arange(store.num_graphs), **loading}
        self.loader = GraphLoader(store, **self._bounds.of_loader(), **given)
        self._batches_bytes = self.loader.plan.nbytes
        self._members = {split: store.array(f"split/{split}").read() for split in SPLITS}

    # ---- the algorithm -----------------------------------------------------------------------------------------

    def _rows_of_step(self, epoch: int, first: int, last: int) -> list[Ints]:
        return self.loader.batches_of(epoch)[first:last]

    def _accumulate(self, batch: "Data", scale: float) -> float:
        with self._autocast():
            outputs_gC = self._runs(self.model, batch, self._input_dropout, every=self._takes_results)
            outputs_gC = outputs_gC.to(self._runs.dtype)
        return self._backward(outputs_gC, self._labels("train", batch.y), scale)

    def _evaluate_alone(self) -> Scores:
        members = self._members
        scored = np.flatnonzero(np.logical_or.reduce([*members.values()]))
        batches = self.loader.bounds.cut(scored)
        self._scorer.begin()
        task = reported(self._listener, "evaluation", len(batches), "batches")
        with self._averaging.in_place(), eval_mode(self.model), torch.no_grad(), task as advance:
            for number, batch in enumerate(self.loader.read(batches), start=1):
                with self._autocast():
                    outputs_gC = self._runs(self.model, batch).to(self._runs.dtype)
                for split, mask in members.items():
                    rows = torch.from_numpy(np.flatnonzero(mask[batch.graph_id.numpy()]))
                    if len(rows):
                        labels = self._labels(split, batch.y, rows)
                        tally = self._scorer.of_rows(batch.graph_id[rows], outputs_gC[rows], labels)
                        if tally is not None:
                            self._scorer.add(split, tally)
                advance(number)
        return named_scores(self._scorer.scores())

    @interruptible_by_ctrl_c()
    def predict(  # type: ignore[override]  # of graphs
        self,
        what: str = "logits",
        *,
        graphs: npt.ArrayLike | None = None,
        out: str | Path | None = None,
        force: bool = False,
    ) -> Tensor | None:
        """Return logits or labels of all graphs, or of those with these numbers in this order, [n, C] or [n].

        With ``out`` they are written to that file, as in ``Trainer.predict``.
        """
        options: dict[str, Any] = {"graphs": graphs, "ignore_edge_data": self._ignored}
        made = partial(GraphPrediction, self.model, self.store, self._resources, self._bounds, what, **options)
        return self._predicted(made, out, force=force)

    # ---- memory ------------------------------------------------------------------------------------------------

    def _model_bytes(self, most: Size, left: int) -> int:
        kept = self._kept_bytes() + self._scorer.host_bytes + len(SPLITS) * self.store.num_graphs
        kept += self._runs.cast_bytes(most)
        batch, given = self._runs.measured(most)
        step = partial(self._runs, batch=batch, input_dropout=self._input_dropout, every=self._takes_results)
        return kept + self._step_bytes(step, given, left - kept, lambda module: LargestNumbers(batch, most))

    def _start(self) -> None:
        self._snapshot.check()
        self._check_converted()
        if self._run is not None:
            self._run.start()


@dataclass(frozen=True, slots=True)
class GraphBounds:
    """The limits of batches of graphs; 32 graphs by default. ``paths``: edges of paths; ``hops``: those between near
    nodes."""

    batch_size: int | None = None
    batch_nodes: int | None = None
    batch_edges: int | None = None
    batch_paths: int | None = None
    paths: int = 0
    hops: int = 0

    @property
    def made(self) -> Mapping[str, int]:
        """The inputs made from edges, by option."""
        return {"paths": self.paths, "hops": self.hops}

    def of_loader(self) -> Mapping[str, Any]:
        """The limits as arguments of a loader."""
        given = {name: getattr(self, name) for name in ("batch_size", "batch_nodes", "batch_edges", "batch_paths")}
        usual = 32 if all(bound is None for bound in given.values()) else self.batch_size
        return {**given, "batch_size": usual, **self.made}


class GraphPrediction(Predictions):
    """A model's predictions for graphs of a store, as ``Prediction`` is for nodes.

    ``graphs``: their numbers, in order; by default all. BudgetError with the least memory that would suffice.
    """

    called = "graph"

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        resources: Resources,
        bounds: GraphBounds,
        what: str = "logits",
        *,
        graphs: npt.ArrayLike | None = None,
        ignore_edge_data: str = "none",
    ) -> None:
        if what not in (What.LOGITS.value, What.LABELS.value):
            raise OptionError(f"of graphs logits and labels can be predicted, not {what!r}")
        self._runs = GraphModel(model, store, **bounds.made, ignore_edge_data=ignore_edge_data)
        super().__init__(store, resources.limits, What.of(what, store.task), self._runs.dtype)
        self._model, self._listener = model, resources.listener
        memory = resources.limits.memory_bytes
        beside = lambda most, left: self._runs.forward_bytes(model, most)  # noqa: E731
        self._loader = GraphLoader(
            store, **bounds.of_loader(), input_graphs=graphs, memory=memory, _beside=beside, _listener=self._listener
        )
        self.shape = self._shape_of(len(self._loader.graphs), self._runs.outputs)

    @property
    def taken(self) -> tuple[int, int, int]:
        return 0, self._loader.plan.nbytes, 0

    def _run(self, put: Callable[[Ints, AnyArray, AnyArray], None]) -> None:
        done, task = 0, reported(self._listener, "predicting", len(self._loader.graphs), "graphs")
        with eval_mode(self._model), torch.no_grad(), task as advance:
            for batch in self._loader:
                rows = self._what.of_outputs(self._runs(self._model, batch), self._store.task)
                put(np.arange(done, done + len(rows)), rows, batch.graph_id.numpy())
                done += len(rows)
                advance(done)

    def close(self) -> None:
        self._loader.close()


# ---- which batches fit ----------------------------------------------------------------------------------------------


_PARAMETER_COPIES = 4
"""Copies of every parameter: itself, its gradient, and two numbers of an optimizer like Adam."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest batches that take at most ``memory_bytes``.

    ``bound``: their limit, in two digits, of what is ``counted`` (graphs, nodes, edges or paths); 0: not even the
    largest graph fits. They have ``graphs`` graphs on average and at most ``most``; then a step takes ``nbytes``, with
    parameters, gradients and Adam's state.
    """

    memory_bytes: int
    counted: str
    bound: int
    graphs: float
    most: Size | None
    nbytes: int


def fitting_batches(
    model: nn.Module,
    store: Store,
    memories: Sequence[int],
    *,
    paths: int,
    hops: int,
    ignore_edge_data: str,
    hardware: Hardware,
) -> list[Fit]:
    """Return, by memory, the largest batches by graphs, nodes and, if there are any, paths, with all saved tensors
    kept.

    ModelError for a model that does not run on the meta device.
    """
    sizes = GraphSizes(store, paths, hops)
    runs = GraphModel(model, store, paths=paths, hops=hops, ignore_edge_data=ignore_edge_data)
    every = np.arange(store.num_graphs)
    fixed = _PARAMETER_COPIES * sum(parameter.nbytes for parameter in model.parameters())
    counts = {name: found for name, found in sizes.of(every).items() if name not in ("edges", "near") and found.any()}

    @cache
    def taken(counted: str, bound: int) -> tuple[Size, int]:
        most = Bounds(sizes, every, {counted: bound}).largest(every)
        batch, given = runs.measured(most)

        try:
            step = DryRuns(
                model,
                lambda copy: runs(copy, batch),
                hardware,
                known=given,
                within=lambda module: LargestNumbers(batch, most),
            )
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{type(model).__name__} does not run on the meta device: {reason}") from error
        return most, fixed + batch_nbytes(store, most, paths) + runs.cast_bytes(most) + step.kept_bytes

    found = []
    for memory in memories:
        for counted, each in counts.items():
            least, total = int(each.max()), int(each.sum())
            low, high = least, total
            if taken(counted, low)[1] > memory:
                found.append(Fit(memory, counted, 0, 0.0, None, taken(counted, low)[1]))
                continue
            if taken(counted, total)[1] <= memory:
                low = total
            while low < (middle := _rounded(int(sqrt(low * high)), low)) < high:
                low, high = (middle, high) if taken(counted, middle)[1] <= memory else (low, middle)
            most, nbytes = taken(counted, low)
            found.append(Fit(memory, counted, low, min(store.num_graphs, low / float(each.mean())), most, nbytes))
    return found


def _rounded(number: int, least: int) -> int:
    """Return the number rounded down to two digits, but at least ``least``."""
    unit = 10 ** max(0, len(str(number)) - 2)
    down: int = number // unit * unit
    return max(least, down)
