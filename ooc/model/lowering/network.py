# SPDX-License-Identifier: Apache-2.0
"""A model lowered: two networks of values, one for training, one for evaluation.

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
from ooc.model.lowering.projection import Made, Projection
from ooc.model.lowering.values import Aggregate, Dense, Dropout, Learnt, Moments, Value
from ooc.plan.cost import aggregating_first_pays, transforming_constants_pays
from ooc.plan.workload import EdgeData

_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
"""How torch's and PyG's names end of what a module keeps hooks in that may change a result."""
EVERYWHERE = 1 << 30
"""Hops for what is needed of every row, however far it lies from those that are scored."""


@dataclass(slots=True)
class Network:
    """A model as values: ``training`` and ``evaluation`` are its outputs in the two modes."""

    training: Value
    evaluation: Value
    scalings: tuple[AnyScaling, ...]
    """How its sums are scaled, each way once; of a graph with types all types of edges that it goes along."""
    dtype: torch.dtype
    parameters: list[nn.Parameter]
    """Those that are trained and have a part in the output, or a gradient that is always zero."""
    idle: list[nn.Parameter]
    """Those that would be trained and have none: they have no gradient, as in PyG."""
    cut_off: list[nn.Parameter]
    """Of ``parameters``, those that a ``detach`` keeps from having a gradient: what tiles add up for them is zero, and
    dropped, since an optimizer moves what has a gradient of zero, too."""
    embeddings: list[Value]
    """In evaluation, what each convolution but the last leaves to the next one."""
    hops: int
    """Aggregations one behind the other, at most."""
    called_alike: bool
    """Whether the model, and modules within its convolutions, make the same calls in both modes."""
    result_columns: tuple[int, ...] = ()
    """Of a model that gives several results, side by side in training; the first is scored."""
    flat_result: bool = False
    """Whether the model gives a number a row, [N], which is a column here."""
    traced: tuple[fx.Graph, Mapping[fx.Node, Any], dict[str, Tensor]] | None = None
    """Its calls in training, what each stands for, and the tensors that its forward makes."""
    _projections: tuple[list[Projection], ...] = field(init=False)
    """What is multiplied by weights, in training and in evaluation."""

    def __post_init__(self) -> None:
        modes = self.training, self.evaluation
        self._projections = tuple([v for v in values_of(one) if isinstance(v, Projection)] for one in modes)

    @property
    def learnt(self) -> dict[str, Value]:
        """The embeddings that have a part in the output, by type of nodes."""
        found = (*values_of(self.training), *values_of(self.evaluation))
        return {value.space: value for value in found if isinstance(value, Learnt)}

    @property
    def depth(self) -> int:
        """Convolutions."""
        return len(self.embeddings) + 1

    @property
    def outputs(self) -> int:
        """Columns of what the model gives, of several results the first."""
        return self.evaluation.columns

    def layer(self, index: int, space: str = "") -> Value:
        """What convolution ``index`` (from 1) gives in evaluation after norm and activation; the last: the output. 0:
        the embedding of the nodes of type ``space``."""
        if index == 0:
            return self.learnt[space]
        return self.evaluation if index == self.depth else self.embeddings[index - 1]

    @property
    def aggregated_once(self) -> tuple[AnyScaling, ...]:
        """The scalings of which A(X) of the features as they are is needed: the same in every epoch."""
        values = [v for v in values_of(self.training) if not (isinstance(v, Aggregate) and v.once)]
        once = {source for value in values for source in value.inputs if isinstance(source, Aggregate) and source.once}
        return tuple(s for s in self.scalings if any(v.hops == 1 and v.scaling == s for v in once))

    def first_aggregation(self, scaling: AnyScaling, hops: int = 1) -> str:
        """The name of the matrix that holds A^hops(X), aggregated once."""
        name = "ax" if hops == 1 else f"ax{hops}"
        return name if scaling == self.scalings[0] else f"{name}.{scaling.label}"

    @property
    def same_in_evaluation(self) -> bool:
        """Whether training computes what evaluation does: no dropout, no statistics of the rows themselves, and the
        same calls. It is always right to compute both."""
        tells_modes = any(isinstance(v, Opaque) and v.probed.tells_modes for v in values_of(self.training))
        return self.called_alike and not tells_modes and _shapes(self.training) == _shapes(self.evaluation)

    @property
    def attends(self) -> bool:
        """Whether some values come of a softmax over edges."""
        return any(isinstance(value, Attention) for value in values_of(self.training))

    @property
    def statistics_nbytes(self) -> int:
        """What the moments of all norms take."""
        found = {*values_of(self.training), *values_of(self.evaluation)}
        return sum(value.statistics.nbytes for value in found if isinstance(value, Moments))

    @property
    def rounded_nbytes(self) -> int:
        """What its weights take besides where they are multiplied in a narrower type: those of one of the modes."""
        return max(
            sum(v.product.weights_nbytes(v.source.columns, v.columns) for v in mode) for mode in self._projections
        )

    @property
    def made_nbytes(self) -> int:
        """What weights made of several parameters take, with their gradients."""
        return max(sum(v.made.nbytes for v in mode) for mode in self._projections)

    @property
    def makes_dense(self) -> bool:
        """Whether features that come without their zeros are needed with them."""
        return any(isinstance(v, Dense) for output in (self.training, self.evaluation) for v in values_of(output))

    def columns_of_edges(self, widest: int) -> int:
        """How wide matrices are, at most, that have a row for each edge, where some layer is run as it is: as the
        ``widest`` of nodes; of links as embeddings are. 0 where none is."""
        layers = (v for output in (self.training, self.evaluation) for v in values_of(output) if isinstance(v, Opaque))
        return max((widest if one.direction.of_edges else one.source.columns for one in layers), default=0)

    @property
    def drops_sparse(self) -> bool:
        """Whether there is dropout of features that come without their zeros."""
        return any(isinstance(v, Dropout) and v.entries_per_row is not None for v in values_of(self.training))

    def forget_weights(self) -> None:
        """Weights may have changed: what was made of them is to be made anew."""
        for projections in self._projections:
            for projection in projections:
                projection.product.forget_weights()
                projection.made.forget()

    @contextmanager
    def summing_gradients(self) -> Iterator[None]:
        """Within it tiles add what they have for weights made of parameters, which these get at its end, or when they
        are all there (``finish_gradients``)."""
        try:
            for made in self._made:
                made.begin()
            yield
            self.finish_gradients()
        finally:
            for made in self._made:
                made.end()

    def finish_gradients(self) -> None:
        """Parameters get what all tiles have added so far."""
        for made in self._made:
            made.finish()
            made.begin()

    @property
    def _made(self) -> list[Made]:
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
    """The values of ``model``; ModelError names what cannot be run exactly, or has nothing to train if it ``trains``.

    ``active`` gives the rows to be computed for a network of so many layers; with ``edges_per_row`` they decide the
    order of product and sum in each layer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check(model, learns=not trains or bool(setting.embedding_columns))
    if not 0 <= setting.input_dropout < 1:
        raise ModelError(f"input_dropout must be at least 0 and below 1, not {setting.input_dropout}")

    asked: list[tuple[int, int, tuple[int, ...], bool, AnyScaling]] = []

    def every_sum_first(*question: Any) -> bool:
        asked.append(question)
        return True

    dtype = dtype_of(model) if next(model.parameters(), None) is not None else setting.dtype
    setting = replace(setting, dtype=dtype, sum_first=every_sum_first)
    draft, output = _assembled(model, setting)
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
                read_beside=_summed_from(draft.products[place]) in read_by_rows,
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
        assembly, training = _assembled(model, setting)
    aggregates = [v for v in values_of(training) if isinstance(v, Aggregate)]
    once = any(v.once for v in aggregates)
    evaluated, evaluation = _assembled(model, replace(setting, training=False, aggregate_once=once))
    _check_embeddings(model, setting, training, evaluation, assembly.inputs_cut_off)
    aggregates += [v for v in values_of(evaluation) if isinstance(v, Aggregate)]
    # Those that ask for rows' factors, or for edges of a type.
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
    """ModelError where a model with so many outputs leaves out classes."""
    if columns < num_classes:
        remedy = "; for one number that says which of two, convert with task='multilabel'" * (num_classes == 2)
        remedy += ", or give the data itself and loss=torch.nn.BCEWithLogitsLoss()" * (num_classes == 2)
        raise ModelError(f"the model has {columns} outputs, the store has {num_classes} classes (from 0 on){remedy}")


def _assembled(model: nn.Module, setting: Setting) -> tuple[Assembly, Value]:
    """What the model gives, and what is known of how."""
    assembly = Assembly(setting)
    if isinstance(model, ModelShape):
        return assembly, model.values(assembly)
    from ooc.model.layers.decoders import LinkPredictor
    from ooc.model.layers.links import lower_links
    from ooc.model.lowering.tracing import trace  # imports PyG, which is there if the model is of it

    if isinstance(model, LinkPredictor):
        return assembly, lower_links(model, trace(model.encoder, assembly), assembly)
    return assembly, trace(model, assembly)


def values_of(output: Value) -> list[Value]:
    """All that ``output`` depends on, and itself, inputs first."""
    found = {output}
    waiting = [output]
    while waiting:
        for value in waiting.pop().inputs:
            if value not in found:
                found.add(value)
                waiting.append(value)
    return sorted(found, key=lambda value: value.index)


def hops(output: Value, above: Collection[Value] = ()) -> dict[Value, int]:
    """How many aggregations lie between each value and ``output``, at most, or of those that lie ``above`` some values;
    EVERYWHERE below moments and sums over out-neighbours."""
    found = {output: 0}
    for value in reversed(values_of(output)):
        if value not in found or value in above:
            continue
        below = found[value]
        if isinstance(value, Moments):
            below = EVERYWHERE
        elif isinstance(value, Aggregate) and value.scaling.basic.reversed:
            below = EVERYWHERE  # hops are counted against the edges
        elif isinstance(value, Aggregate):
            below = min(EVERYWHERE, below + 1)
        for source in value.inputs:
            is_own = isinstance(value, EdgeAggregate) and source is value.before
            found[source] = max(found[value] if is_own else below, found.get(source, 0))
    return found


def _check_edge_data(model: nn.Module, left_out: Collection[EdgeData]) -> None:
    """Refuse to leave out what edges carry unasked: it would be another result."""
    for data in EdgeData:
        if data in left_out:
            what = "weights" if data is EdgeData.WEIGHT else "features"
            raise ModelError(
                f"the store's edges carry {what}, of which model {type(model).__name__} takes none; give "
                f"ignore_edge_data={data.value!r} to train without, or a "
                f"model that gives {ARGUMENTS[data]} to its convolutions, beside edge_index or adj_t"
            )


def _check_running_statistics(model: nn.Module, assembly: Assembly, training: Value, evaluation: Value) -> None:
    """Warn of those that stay as they are, as no output depends on their norm, and refuse where one does later."""
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
    """Refuse embeddings of which none is trained, or one that has a part in the output is not."""
    spaces, read = (
        {value.space for value in values_of(output) if isinstance(value, Learnt)} for output in (training, evaluation)
    )
    untrained = (spaces & set(cut_off)) | (read - spaces)
    if setting.embedding_columns and (untrained or not spaces):
        whose = f" of nodes {min(untrained)!r}" if untrained and setting.types is not None else ""
        raise ModelError(
            f"model {type(model).__name__} gives its input{whose} no gradient: an embedding would not be trained"
        )


def dtype_of(model: nn.Module) -> torch.dtype:
    """What a model computes in: the type of its parameters; of one without any torch's default."""
    return next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())


def _summed_from(value: Value) -> Value:
    """What neighbours' rows are summed of, by one hop or several."""
    while isinstance(value, Aggregate):
        value = value.source
    return value


def _check(model: nn.Module, *, learns: bool) -> None:
    """Refuse what no value can be made of, whatever the model does; ``learns``: it need not have parameters itself."""
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
    """The kinds of hooks that ``module`` has. Modules are not called here, so that hooks would not be either."""
    return [kept.strip("_") for kept, value in vars(module).items() if kept.endswith(_HOOKS) and value]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether it has hooks: autograd never adds up its gradient here, so that they would not be called."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _shapes(output: Value) -> list[tuple[object, ...]]:
    """Of all values that ``output`` depends on: kind, shape of a row, and which ones its inputs are. Of aggregations
    over edges what they keep for a backward pass does not count; whether they drop something does."""
    values = [value for value in values_of(output) if not isinstance(value, Result)]
    places = {value: place for place, value in enumerate(values)}

    def shape(value: Value) -> tuple[object, ...]:
        if isinstance(value, EdgeAggregate):
            return value.groups, value.result, value.p
        return value.tail

    def place(value: Value) -> int:
        return places[value.inputs[0] if isinstance(value, Result) else value]

    return [(type(value), *shape(value), *map(place, value.inputs)) for value in values]
