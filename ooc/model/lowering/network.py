# SPDX-License-Identifier: Apache-2.0
"""A lowered model: two networks of values, one for training and one for evaluation.

Parameters are shared with the user's model, not copied. What cannot be run exactly is refused by name.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ooc.errors import ModelError
from ooc.model.graph import ActiveRows, AnyScaling, RelationScaling, ends_of
from ooc.model.layers.layer import ARGUMENTS
from ooc.model.layers.opaque import Opaque
from ooc.model.layers.per_edge import Attention, EdgeAggregate, Result
from ooc.model.lowering.assembly import Assembly, Setting
from ooc.model.lowering.model_shape import ModelShape
from ooc.model.lowering.projection import ComputedWeight, Projection
from ooc.model.lowering.values import Aggregate, Dense, Dropout, EmbeddingRows, Moments, Value
from ooc.plan.cost import aggregating_first_pays, transforming_constants_pays
from ooc.plan.workload import EdgeData

_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
"""The endings of the names under which torch and PyG keep a module's hooks that may change a result."""
EVERYWHERE = 1 << 30
"""The number of hops for values that are needed for every row, however far it is from the scored ones."""


@dataclass(slots=True)
class Network:
    """A model as values: ``training`` and ``evaluation`` are its outputs in the two modes."""

    training: Value
    evaluation: Value
    scalings: tuple[AnyScaling, ...]
    """The scalings of its sums, each once; for a graph with types, with all edge types it uses."""
    dtype: torch.dtype
    parameters: list[nn.Parameter]
    """The parameters that are trained and take part in the output, including those whose gradient is always zero."""
    idle: list[nn.Parameter]
    """The parameters that would be trained but take no part in the output: they have no gradient, as in PyG."""
    cut_off: list[nn.Parameter]
    """Those of ``parameters`` that a ``detach`` cuts off from gradients. What tiles add up for them is zero and is
    dropped, since an optimizer would also move a parameter whose gradient is zero."""
    embeddings: list[Value]
    """In evaluation, the output of each convolution but the last, as the next one gets it."""
    hops: int
    """The longest chain of aggregations."""
    called_alike: bool
    """Whether the model, and modules within its convolutions, make the same calls in both modes."""
    result_columns: tuple[int, ...] = ()
    """The columns of each result, if the model returns several, which are side by side in training; the first is
    scored."""
    flat_result: bool = False
    """Whether the model returns one number a row, [N], which is a column here."""
    traced: tuple[fx.Graph, Mapping[fx.Node, Any], dict[str, Tensor]] | None = None
    """Its calls in training, what each stands for, and the tensors made in its forward."""
    _projections: tuple[list[Projection], ...] = field(init=False)
    """The products with weights, in training and in evaluation."""

    def __post_init__(self) -> None:
        modes = self.training, self.evaluation
        self._projections = tuple([v for v in values_of(one) if isinstance(v, Projection)] for one in modes)

    @property
    def learnt(self) -> dict[str, Value]:
        """The embeddings that take part in the output, by node type."""
        found = (*values_of(self.training), *values_of(self.evaluation))
        return {value.space: value for value in found if isinstance(value, EmbeddingRows)}

    @property
    def depth(self) -> int:
        """The number of convolutions."""
        return len(self.embeddings) + 1

    @property
    def outputs(self) -> int:
        """The columns of the model's output; of several results, the first."""
        return self.evaluation.columns

    def layer(self, index: int, space: str = "") -> Value:
        """Return what convolution ``index`` (from 1) gives in evaluation, after norm and activation; the last one gives
        the output. 0: the embedding of nodes of type ``space``."""
        if index == 0:
            return self.learnt[space]
        return self.evaluation if index == self.depth else self.embeddings[index - 1]

    @property
    def aggregated_once(self) -> tuple[AnyScaling, ...]:
        """The scalings for which A(X) of the unchanged features is needed, which is the same in every epoch."""
        values = [v for v in values_of(self.training) if not (isinstance(v, Aggregate) and v.once)]
        once = {source for value in values for source in value.inputs if isinstance(source, Aggregate) and source.once}
        return tuple(s for s in self.scalings if any(v.hops == 1 and v.scaling == s for v in once))

    def first_aggregation(self, scaling: AnyScaling, hops: int = 1) -> str:
        """Return the name of the matrix that holds A^hops(X), aggregated once."""
        name = "ax" if hops == 1 else f"ax{hops}"
        return name if scaling == self.scalings[0] else f"{name}.{scaling.label}"

    @property
    def same_in_evaluation(self) -> bool:
        """Whether training computes the same as evaluation: no dropout, no batch statistics, and the same calls.
        Computing both is always correct."""
        tells_modes = any(isinstance(v, Opaque) and v.probed.tells_modes for v in values_of(self.training))
        return self.called_alike and not tells_modes and _shapes(self.training) == _shapes(self.evaluation)

    @property
    def attends(self) -> bool:
        """Whether some values come from a softmax over edges."""
        return any(isinstance(value, Attention) for value in values_of(self.training))

    @property
    def statistics_nbytes(self) -> int:
        """Bytes of the moments of all norms."""
        found = {*values_of(self.training), *values_of(self.evaluation)}
        return sum(value.statistics.nbytes for value in found if isinstance(value, Moments))

    @property
    def rounded_nbytes(self) -> int:
        """Bytes that weights take besides if they are multiplied in a narrower type, in one of the modes."""
        return max(
            sum(v.product.weights_nbytes(v.source.columns, v.columns) for v in mode) for mode in self._projections
        )

    @property
    def made_nbytes(self) -> int:
        """Bytes of weights made of several parameters, with their gradients."""
        return max(sum(v.made.nbytes for v in mode) for mode in self._projections)

    @property
    def makes_dense(self) -> bool:
        """Whether sparse features are needed in dense form."""
        return any(isinstance(v, Dense) for output in (self.training, self.evaluation) for v in values_of(output))

    def columns_of_edges(self, widest: int) -> int:
        """Return the widest matrix with a row for each edge, in columns, if some layer runs as it is: as wide as the
        ``widest`` of nodes, or, for links, as embeddings; otherwise 0."""
        layers = (v for output in (self.training, self.evaluation) for v in values_of(output) if isinstance(v, Opaque))
        return max((widest if one.direction.of_edges else one.source.columns for one in layers), default=0)

    @property
    def drops_sparse(self) -> bool:
        """Whether there is dropout of sparse features."""
        return any(isinstance(v, Dropout) and v.entries_per_row is not None for v in values_of(self.training))

    def forget_weights(self) -> None:
        """Discard what was made of weights, which may have changed."""
        for projections in self._projections:
            for projection in projections:
                projection.product.forget_weights()
                projection.made.forget()

    @contextmanager
    def summing_gradients(self) -> Iterator[None]:
        """A context in which tiles add up the gradients of weights made of parameters. The parameters get theirs at its
        end, or in ``finish_gradients``."""
        try:
            for made in self._made_weights:
                made.begin()
            yield
            self.finish_gradients()
        finally:
            for made in self._made_weights:
                made.end()

    def finish_gradients(self) -> None:
        """Give parameters the gradients that all tiles have added so far."""
        for made in self._made_weights:
            made.finish()
            made.begin()

    @property
    def _made_weights(self) -> list[ComputedWeight]:
        return [projection.made for projection in self._projections[0] if projection.own_trains]


def lower(
    model: nn.Module,
    setting: Setting,
    *,
    num_classes: int,
    active: Callable[[int], ActiveRows],
    edges_per_row: Callable[[AnyScaling], float],
    trains: bool = True,
) -> Network:
    """Return the values of ``model``. Raises ModelError naming what cannot be run exactly, or, if it ``trains``, if it
    has nothing to train.

    ``active`` gives the rows to be computed for a network of a given depth; with ``edges_per_row`` they decide the
    order of product and sum in each layer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check_lowerable(model, learns=not trains or bool(setting.embedding_columns))
    if not 0 <= setting.input_dropout < 1:
        raise ModelError(f"input_dropout must be at least 0 and below 1, not {setting.input_dropout}")

    asked: list[tuple[int, int, tuple[int, ...], bool, AnyScaling]] = []

    def every_sum_first(*question: Any) -> bool:
        asked.append(question)
        return True

    dtype = dtype_of(model) if next(model.parameters(), None) is not None else setting.dtype
    setting = replace(setting, dtype=dtype, sum_first=every_sum_first)
    draft, output = _assemble(model, setting)
    _check_edge_data(model, setting.edge_data - draft.edge_data)
    distances = hops(output)
    longest = max((h for h in distances.values() if h < EVERYWHERE), default=0)
    rows = active(longest)
    read_by_rows = {read for value in values_of(output) if not isinstance(value, Aggregate) for read in value.inputs}

    def sum_first(place: int, hops: int, shape: tuple[int, ...], once: bool, scaling: AnyScaling) -> bool:
        out_columns, in_columns = shape
        edges = hops * edges_per_row(scaling)
        if once:
            return not transforming_constants_pays(
                edges_per_row=edges,
                in_columns=in_columns,
                out_columns=out_columns,
                read_beside=_summed_sources(draft.products[place]) in read_by_rows,
            )
        after = distances.get(draft.products[place], 0)
        source, target = ends_of(scaling)
        return aggregating_first_pays(
            rows_before=rows.of(source).training_rows(min(EVERYWHERE, after + hops)),
            rows_after=rows.of(target).training_rows(after),
            edges_per_row=edges,
            in_columns=in_columns,
            out_columns=out_columns,
        )

    setting = replace(setting, sum_first=sum_first)
    assembly, training = draft, output
    if not all(sum_first(*question) for question in asked):
        assembly, training = _assemble(model, setting)
    aggregates = [v for v in values_of(training) if isinstance(v, Aggregate)]
    once = any(v.once for v in aggregates)
    evaluated, evaluation = _assemble(model, replace(setting, training=False, aggregate_once=once))
    _check_embeddings(model, setting, training, evaluation, assembly.inputs_cut_off)
    aggregates += [v for v in values_of(evaluation) if isinstance(v, Aggregate)]
    # Scalings that need rows' factors, or edges of a type.
    are_scaled = (v for v in aggregates if isinstance(v.scaling, RelationScaling) or not isinstance(v, EdgeAggregate))
    _check_running_statistics(model, assembly, training, evaluation)
    if not evaluation.columns:
        raise ModelError("the model has no outputs")
    check_outputs(evaluation.columns, num_classes)
    taking_part = {id(parameter) for value in values_of(training) for parameter in value.parameters}
    taking_part |= {id(parameter) for parameter in assembly.reached}
    cut_off = {id(parameter) for parameter in assembly.cut_off}
    if trains and parameters and cut_off.issuperset(map(id, parameters)):
        raise ModelError(f"model {type(model).__name__} cannot be trained: none of its parameters gets a gradient")
    return Network(
        training=training,
        evaluation=evaluation,
        scalings=tuple(dict.fromkeys(v.scaling for v in are_scaled)),
        dtype=setting.dtype,
        parameters=[parameter for parameter in parameters if id(parameter) in taking_part],
        idle=[parameter for parameter in parameters if id(parameter) not in taking_part],
        cut_off=[parameter for parameter in parameters if id(parameter) in cut_off & taking_part],
        embeddings=evaluated.convolved[1:],
        hops=longest,
        called_alike=[*map(repr, assembly.calls)] == [*map(repr, evaluated.calls)],
        result_columns=assembly.result_columns,
        flat_result=assembly.flat_result,
        traced=assembly.traced,
    )


def check_outputs(columns: int, num_classes: int) -> None:
    """Raise ModelError if a model with this many outputs leaves out classes."""
    if columns < num_classes:
        remedy = "; for one number that says which of two, convert with task='multilabel'" * (num_classes == 2)
        remedy += ", or give the data itself and loss=torch.nn.BCEWithLogitsLoss()" * (num_classes == 2)
        raise ModelError(f"the model has {columns} outputs, the store has {num_classes} classes (from 0 on){remedy}")


def _assemble(model: nn.Module, setting: Setting) -> tuple[Assembly, Value]:
    """Return the assembly of the model's values, and its output."""
    assembly = Assembly(setting)
    if isinstance(model, ModelShape):
        return assembly, model.values(assembly)
    from ooc.model.layers.decoders import LinkPredictor
    from ooc.model.layers.links import lower_links
    from ooc.model.lowering.tracing import trace  # imports PyG, which is installed if the model uses it

    if isinstance(model, LinkPredictor):
        return assembly, lower_links(model, trace(model.encoder, assembly), assembly)
    return assembly, trace(model, assembly)


def values_of(output: Value) -> list[Value]:
    """Return everything ``output`` depends on, and itself, inputs first."""
    found = {output}
    waiting = [output]
    while waiting:
        for value in waiting.pop().inputs:
            if value not in found:
                found.add(value)
                waiting.append(value)
    return sorted(found, key=lambda value: value.index)


def hops(output: Value, above: Collection[Value] = ()) -> dict[Value, int]:
    """Return the most aggregations between each value and ``output``, or only for values that lie ``above`` some;
    EVERYWHERE for values below moments and sums over out-neighbours."""
    found = {output: 0}
    for value in reversed(values_of(output)):
        if value not in found or value in above:
            continue
        below = found[value]
        if isinstance(value, Moments):
            below = EVERYWHERE
        elif isinstance(value, Aggregate) and value.scaling.basic.reversed:
            below = EVERYWHERE  # hops are counted backwards along edges
        elif isinstance(value, Aggregate):
            below = min(EVERYWHERE, below + 1)
        for source in value.inputs:
            is_own = isinstance(value, EdgeAggregate) and source is value.before
            found[source] = max(found[value] if is_own else below, found.get(source, 0))
    return found


def _check_edge_data(model: nn.Module, left_out: Collection[EdgeData]) -> None:
    """Refuse to leave out edge data unless asked, since the result would be different."""
    for data in EdgeData:
        if data in left_out:
            what = "weights" if data is EdgeData.WEIGHT else "features"
            raise ModelError(
                f"the store's edges carry {what}, of which model {type(model).__name__} takes none; give "
                f"ignore_edge_data={data.value!r} to train without, or a "
                f"model that gives {ARGUMENTS[data]} to its convolutions, beside edge_index or adj_t"
            )


def _check_running_statistics(model: nn.Module, assembly: Assembly, training: Value, evaluation: Value) -> None:
    """Warn of running statistics that stay unchanged because no output depends on their norm; refuse a norm that only
    evaluation uses."""
    in_use = set(values_of(training))
    if not (unused := [one for one in assembly.observed if one not in in_use]):
        return
    later = [one.running for one in values_of(evaluation)]
    for one in unused:
        if one.running is None or any(one.running is other for other in later):
            raise ModelError(
                f"model {type(model).__name__} is not supported: the output does not depend on {one.of or 'a norm'}, "
                "whose running statistics would not be kept; put that norm into evaluation mode, by its eval(), before "
                "it is trained here"
            )
    more = f" and of {len(unused) - 1} more" if len(unused) > 1 else ""
    warnings.warn(
        f"running statistics of {unused[0].of}{more} stay as they are: no output of the model depends on them",
        RuntimeWarning,
        stacklevel=2,
    )


def _check_embeddings(
    model: nn.Module, setting: Setting, training: Value, evaluation: Value, cut_off: Collection[str]
) -> None:
    """Refuse embeddings if none of them is trained, or if one that takes part in the output is not."""
    spaces, read = (
        {value.space for value in values_of(output) if isinstance(value, EmbeddingRows)}
        for output in (training, evaluation)
    )
    untrained = (spaces & set(cut_off)) | (read - spaces)
    if setting.embedding_columns and (untrained or not spaces):
        whose = f" of nodes {min(untrained)!r}" if untrained and setting.types is not None else ""
        raise ModelError(
            f"model {type(model).__name__} gives its input{whose} no gradient: an embedding would not be trained"
        )


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the type a model computes in: that of its parameters, or torch's default."""
    return next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())


def _summed_sources(value: Value) -> Value:
    """Return what neighbours' rows are summed from, by one hop or several."""
    while isinstance(value, Aggregate):
        value = value.source
    return value


def _check_lowerable(model: nn.Module, *, learns: bool) -> None:
    """Refuse what no value can be made of, whatever the model does. ``learns``: rows are learnt, so the model itself
    need not have parameters."""
    name = type(model).__name__
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters) and not learns:
        raise ModelError(f"model {name} has no parameters to train")
    for path, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"{name}: {path} has no size yet, and forward does not use it; give its in_channels")
    dtypes = {p.dtype for p in parameters} or {dtype_of(model)}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ModelError(f"{name}: parameters must all be float32 or all float64, not {sorted(map(str, dtypes))}")
    devices = {str(p.device) for p in parameters}
    if not devices <= {"cpu"}:
        places = ", ".join(sorted(devices))
        raise ModelError(
            f"{name}: parameters must be on the CPU, not on {places}: leave out .to(device), the trainer's device= "
            "says where they are used"
        )
    for path, module in model.named_modules():
        if hooks := hooks_of(module):
            where = f"{type(module).__name__} ({path})" if path else name
            raise ModelError(f"{where}: {hooks[0]} are not supported")
    for path, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise ModelError(f"parameter {path} of {name}: hooks on parameters are not supported")


def hooks_of(module: nn.Module) -> list[str]:
    """Return the kinds of hooks that ``module`` has. Modules are not called here, so their hooks would not run."""
    return [kept.strip("_") for kept, value in vars(module).items() if kept.endswith(_HOOKS) and value]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks. Autograd never accumulates its gradient here, so they would not run."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _shapes(output: Value) -> list[tuple[object, ...]]:
    """Return kind, shape of a row and inputs of all values that ``output`` depends on. What aggregations keep for a
    backward pass does not count; whether they drop something does."""
    values = [value for value in values_of(output) if not isinstance(value, Result)]
    places = {value: place for place, value in enumerate(values)}

    def shape(value: Value) -> tuple[object, ...]:
        if isinstance(value, EdgeAggregate):
            return value.groups, value.result, value.p
        return value.tail

    def place(value: Value) -> int:
        return places[value.inputs[0] if isinstance(value, Result) else value]

    return [(type(value), *shape(value), *map(place, value.inputs)) for value in values]
