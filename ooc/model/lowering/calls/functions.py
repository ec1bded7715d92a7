# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors, and methods, called on values: rows of functions that work row by row, sums over all rows."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from ooc.errors import ModelError
from ooc.kernels.functions import Activation
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.calls.rowwise import (
    ARITHMETIC,
    HEAVY_FUNCTIONS,
    MAKE_ROWS,
    MAY_BE_SUMS,
    OF_OTHER_SHAPES,
    ROWWISE_FUNCTIONS,
    ROWWISE_METHODS,
    WHOLE,
    assigned,
)
from ooc.model.lowering.calls.stand_ins import (
    ROW_RESULTS,
    Computed,
    Free,
    Known,
    OneBatch,
    OneGraph,
    Parts,
    Stacked,
    leaves_of,
    parameter_of,
)
from ooc.model.lowering.rectified import ExponentialLinear
from ooc.model.lowering.symbolic import join_relations
from ooc.model.lowering.values import Codes, Dense, Features, Moments, RowCount, Rowwise, Sum, Value
from ooc.model.lowering.whole import both_types, side_by_side

_ACTIVATIONS: dict[Any, Activation] = {nn.ReLU: Activation.RELU, nn.LeakyReLU: Activation.LEAKY_RELU}
_ACTIVATIONS |= {getattr(nn, name): Activation[name.upper()] for name in ["ELU", "Sigmoid", "Tanh", "SiLU", "Softplus"]}
_ACTIVATIONS |= {name: Activation[name.upper()] for name in ("relu", "sigmoid", "tanh")}
_ACTIVATIONS |= {
    getattr(owner, one.name.lower()): one
    for owner, one in product((F, torch), Activation)
    if hasattr(owner, one.name.lower())
}
"""Activations by module, name of a method, or function."""
_RANDOM_NAMES = (
    "rand_like randint_like bernoulli poisson normal multinomial gumbel_softmax rrelu alpha_dropout dropout1d"
)
_RANDOM_FUNCTIONS = frozenset(_RANDOM_NAMES.split())
_RANDOM_REFUSAL = (
    "it draws random numbers; F.dropout does, of torch.ones_like(x) for a mask, of torch.ones(x.size(0), 1) for whole "
    "rows, and torch.randn_like of rows"
)
_MADE_LIKE = "new_zeros", "new_ones", "new_full"
_ORDINARY = object()
"""What a special function gives for values for which it is an ordinary one."""


@dataclass
class Call:
    """A call of a function, or of a method by its name, with values in place of tensors."""

    name: str
    target: Any
    args: list[Any]
    kwargs: dict[str, Any]
    is_used: bool
    """Whether something uses the result."""
    writes: bool
    """Whether it writes into its first operand."""


class Functions:
    """What functions and methods give for values: another value, or a stand-in for what is none."""

    def __init__(self, assembly: Assembly, model_name: str) -> None:
        self._assembly = assembly
        self._model_name = model_name

    def call(self, call: Call) -> Any:
        """Return the result of a call. ModelError if it is not known to work row by row."""
        target = call.target
        if (activated := self.activation(target, call.args, call.kwargs)) is not None:
            return activated
        if target in _SPECIAL and (found := _SPECIAL[target](self, call)) is not _ORDINARY:
            return found
        args, kwargs = map_aggregate((call.args, call.kwargs), self.stack_batch)
        if args and (shape := self._shape(target, args)) is not None:
            return shape
        is_method = isinstance(target, str)
        is_known = target in (ROWWISE_METHODS if is_method else ROWWISE_FUNCTIONS)
        if not is_known:
            values = [a for a in leaves_of((args, kwargs)) if isinstance(a, (Value, Parts))]
            if values or (is_method and (not isinstance(args[0], Free) or call.writes)):
                is_random = call.name.rstrip("_") in _RANDOM_FUNCTIONS
                why = _RANDOM_REFUSAL if is_random else "it is not known to work row by row"
                raise ModelError(f"{call.name} is not supported: {why}")
        result = self.apply(call.name, target, args, kwargs)
        if not is_known and isinstance(result, Free):
            self._check_not_random(result)
        return result

    # ---- special functions -------------------------------------------------------------------------------

    def _drop(self, call: Call) -> Any:
        if call.args and isinstance(call.args[0], Stacked):
            return replace(call.args[0], rows=self.dropout(call.args[0].rows, *call.args[1:], **call.kwargs))
        return self.dropout(*call.args, **call.kwargs)

    def _stack(self, call: Call) -> Any:
        """Stack matrices, or join batches of one, [1, N, …]."""
        parts = call.args[0] if call.args and isinstance(call.args[0], (list, tuple)) else []
        kind = Value if call.target is torch.stack else OneBatch
        is_first = call.kwargs.get("dim", (call.args[1:] or [0])[0]) == 0
        if not parts or not is_first or not all(isinstance(one, kind) for one in parts):
            return _ORDINARY
        matrices = [one.rows if isinstance(one, OneBatch) else one for one in parts]
        return Stacked(self.apply("stack", torch.stack, [matrices], {"dim": 1}))

    def _draw_noise(self, call: Call) -> Any:
        if not isinstance(call.args[0], Value):
            return _ORDINARY
        if not self._assembly.setting.training:
            raise ModelError("randn_like in evaluation is not supported; draw noise if self.training")
        return self._assembly.noise(call.args[0])

    def _map_linearly(self, call: Call) -> Any:
        if not isinstance(call.args[0], Value):
            return _ORDINARY
        given = dict(zip(("weight", "bias"), call.args[1:], strict=False)) | call.kwargs
        of_weight, of_bias = parameter_of(given.get("weight")), parameter_of(given.get("bias"))
        if of_weight is None or (of_bias is None) != (given.get("bias") is None):
            return _ORDINARY
        return self.linear(call.args[0], of_weight, of_bias, call.name)

    def _assign(self, call: Call) -> Any:
        self._check_assigned(*call.args)
        return _ORDINARY

    def _keep_second(self, call: Call) -> Any:
        first, self._assembly.second = call.args
        return first

    def _index(self, call: Call) -> Any:
        source, key = call.args
        self._check_all_rows(call.name, source, key)
        if isinstance(source, Value):
            if key == slice(None, RowCount(source)) and key.stop.of.space == source.space:  # as many as exist
                return source
            return OneBatch(source) if key in (None, (None, slice(None)), (None, ...)) else _ORDINARY
        if isinstance(source, Codes):
            return self._part_of_codes(call, source)
        if isinstance(source, tuple):
            return source[key]
        return _ORDINARY if call.is_used or not isinstance(source, Parts) else None

    def _squeeze(self, call: Call) -> Any:
        source = call.args[0]
        if isinstance(source, OneBatch) and call.args[1:] == [0]:
            return source.rows
        rows = source.rows if isinstance(source, Codes) else source
        of_any = len(call.args) == 1 and not call.kwargs and isinstance(rows, Value)
        if of_any and self._assembly.num_rows(rows) > 1:  # a tile may have one row
            call.kwargs = {"dim": tuple(at for at, size in enumerate(source.tail, start=1) if size == 1)}
        return self._part_of_codes(call, source) if isinstance(source, Codes) else _ORDINARY

    def _unsqueeze(self, call: Call) -> Any:
        before_rows = call.args[1:] == [0] and isinstance(call.args[0], Value)
        return OneBatch(call.args[0]) if before_rows else _ORDINARY

    def _split(self, call: Call) -> Any:
        source, *rest = call.args
        if isinstance(source, Value) and call.kwargs.get("dim", (rest[1:] or [0])[0]) in (0, -1 - len(source.tail)):
            raise ModelError(f"{call.name} looks across rows: how many are in a part says where they lie")
        return _ORDINARY

    def _number_rows(self, call: Call) -> Any:
        """Return whole numbers of rows of features."""
        source, *rest = call.args
        part = partial(_call_on_rows, call.target, rest, call.kwargs)
        return self._make_codes(call.name, source, part) if isinstance(source, Value) else _ORDINARY

    def _number_graphs(self, call: Call) -> Any:
        """Return the graph of every row if that is made as zeros, a whole number a row."""
        is_one_a_row = [*map(type, leaves_of(call.args[-1:]))] == [RowCount]
        return OneGraph() if is_one_a_row and call.kwargs.get("dtype") is torch.long else _ORDINARY

    def _convert_computed(self, call: Call) -> Any:
        if not isinstance(call.args[0], (Free, Parts)):
            return _ORDINARY
        wanted = [one for one in call.args if one != torch.device("cpu")]
        if len(wanted) == 1 and call.target == "to":
            return call.args[0]
        return self.apply(call.name, call.target, wanted, call.kwargs)

    def _part_of_codes(self, call: Call, codes: Codes) -> Codes:
        part = partial(_call_on_rows, call.target, call.args[1:], call.kwargs)
        return self._make_codes(call.name, codes.rows, lambda rows: part(codes.of(rows)))

    # ---- rows ------------------------------------------------------------------------------------------

    def convert(self, name: str, one: Any, wanted: Sequence[Any]) -> Any:
        """Return rows, edges and their data unchanged if they have the type already; or whole numbers as floating-point
        ones of the model's type, which holds them exactly."""
        dtype = self._assembly.setting.dtype
        if isinstance(one, Codes):
            kinds = [kind for kind in wanted if isinstance(kind, torch.dtype)]
            if name == "to" and not any(kind.is_floating_point for kind in kinds):
                return one
            return self._assembly.detached(name, lambda rows: one.of(rows).to(rows.dtype), [one.rows])
        wanted = [*wanted, {"float": torch.float32, "double": torch.float64}.get(name, dtype)]
        if any(asked not in (dtype, torch.device("cpu"), "cpu") for asked in wanted if not isinstance(asked, bool)):
            raise ModelError(f"{name}: another type than the model's, {dtype}, is not supported")
        return one

    def stack_batch(self, leaf: Any) -> Any:
        """Return a batch of one as stacked matrices."""
        if not isinstance(leaf, OneBatch):
            return leaf
        return Stacked(self._assembly.rowwise("unsqueeze", lambda rows: rows[:, None], [leaf.rows]))

    def dropout(
        self, input: Any, p: float = 0.5, training: bool = True, train: bool = True, inplace: bool = False
    ) -> Value:
        """Return ``F.dropout`` of rows, whose mask is the same in every run."""
        if not isinstance(input, Value):
            if isinstance(input, Free):
                what = "what all rows share, as sums, parameters and numbers are, is not supported"
                raise ModelError(f"dropout of {what}; a mask of rows is one of torch.ones_like(x)")
            raise ModelError("dropout of something that is no matrix of rows is not supported")
        drops = training and train
        if drops and p and not self._assembly.setting.training:
            raise ModelError("dropout in evaluation is not supported; give F.dropout(…, training=self.training)")
        return self._assembly.dropout(input, float(p)) if drops else input

    def linear(self, source: Value, weight: Any, bias: Any, where: str) -> Value:
        """Return ``F.linear`` of rows by a parameter."""
        if not isinstance(weight, nn.Parameter) or not (bias is None or isinstance(bias, nn.Parameter)):
            raise ModelError(f"{where}: its weight or bias is no parameter; F.linear takes any")
        if len(source.tail) != 1:
            parameters = (weight,) if bias is None else (weight, bias)
            return self._assembly.rowwise(where, lambda x: F.linear(x, weight, bias), [source], parameters, heavy=True)
        product = self._assembly.linear(source, weight)
        return self._assembly.sum([(1.0, product)], () if bias is None else (bias,))

    def activation(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value | None:
        """Return an activation whose gradient needs only its result, or the signs of its input; None for any other."""
        known = activation_of(target, args, kwargs) if args and isinstance(args[0], Value) else None
        match known:
            case (Activation.RELU | Activation.LEAKY_RELU as kind, slope):
                return self._assembly.rectified(args[0], None if kind is Activation.RELU else slope)
            case (Activation.ELU, alpha):
                return ExponentialLinear(self._assembly.next_index(), args[0], alpha)
            case (Activation.TANH | Activation.SIGMOID as kind, _):
                return self._assembly.sigmoidal(args[0], logistic=kind is Activation.SIGMOID)
            case _:
                return None

    def apply(self, name: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Apply a known function, module, or method by its name to rows, parameters or plain numbers: a sum, or another
        function of rows."""
        if name in _MADE_LIKE and isinstance(args[0], Value):
            asked = leaves_of((args[1:], kwargs))
            if not any(isinstance(one, (*ROW_RESULTS, Computed)) for one in asked):  # for rows only the type counts
                args = [torch.empty(0, dtype=self._assembly.setting.dtype), *args[1:]]
        leaves = leaves_of((args, kwargs))
        rows = [leaf.rows if isinstance(leaf, (Codes, Stacked)) else leaf for leaf in leaves]
        computed = [leaf for leaf in leaves if isinstance(leaf, Computed)]
        rows += [value for leaf in computed for value in leaf.inputs]
        values = tuple(dict.fromkeys(leaf for leaf in rows if isinstance(leaf, Value)))
        counted = [leaf.of for leaf in leaves if isinstance(leaf, RowCount)]
        if counted and name in ARITHMETIC:
            of_all = self._assembly.num_rows
            args, kwargs = map_aggregate(
                (args, kwargs), lambda leaf: of_all(leaf.of) if isinstance(leaf, RowCount) else leaf
            )
        elif counted and not values:
            if target not in MAKE_ROWS:
                if str(name).startswith("rand"):
                    raise ModelError(f"{name} is not supported: {_RANDOM_REFUSAL}")
                raise ModelError(f"{name} computes with the number of rows, which is not supported")
            values = (counted[0],)
        parameters = [parameter for leaf in computed for parameter in leaf.parameters]
        of_module, in_place = isinstance(target, nn.Module), bool(getattr(target, "inplace", False))
        parameters += target.parameters() if of_module else ()

        def evaluate(known: Known) -> Any:
            def replaced(leaf: Any) -> Any:
                if isinstance(leaf, Value):
                    return known[leaf]
                if isinstance(leaf, Codes):
                    return leaf.of(known[leaf.rows])
                if isinstance(leaf, (Stacked, Computed)):
                    one = known[leaf.rows].movedim(0, leaf.at) if isinstance(leaf, Stacked) else leaf.of(known)
                    return one.clone() if in_place else one
                return len(known[values[0]]) if isinstance(leaf, RowCount) else leaf

            a, k = map_aggregate((args, kwargs), replaced)
            return getattr(a[0], target)(*a[1:], **k) if isinstance(target, str) else target(*a, **k)

        found = Parts(
            name=name,
            evaluate=evaluate,
            inputs=values,
            parameters=tuple(dict.fromkeys(parameters)),
            moments=tuple(dict.fromkeys(one for leaf in computed for one in leaf.moments)),
        )
        if not values:
            made = None if computed or of_module else evaluate({})
            if made is not None and not isinstance(made, Tensor):
                return made
            return Free(name=name, evaluate=evaluate, parameters=found.parameters, moments=found.moments)
        summed = self._sum(target, args, kwargs)
        if summed is not None:
            return summed
        if name in MAY_BE_SUMS and (total := self._reduce_over_rows(target, found, args, kwargs)) is not None:
            return total
        heavy = target in HEAVY_FUNCTIONS or (of_module and any(p.dim() > 1 for p in target.parameters()))
        of_other_shapes = of_module or name in OF_OTHER_SHAPES or target in MAKE_ROWS
        if of_other_shapes or any(isinstance(leaf, (Parts, Stacked)) for leaf in leaves):
            return self._rows_or_parts(found, heavy=heavy)
        return self._rows(found, heavy=heavy)

    def _rows(self, of: Parts, at: int = 0, *, heavy: bool = False) -> Value:
        """Return a function's matrix of rows, which has the rows in dimension ``at``."""
        function = of.function if at == 0 else lambda *tensors: of.function(*tensors).movedim(at, 0)
        return self._assembly.rowwise(of.name, function, of.inputs, of.parameters, moments=of.moments, heavy=heavy)

    def _rows_or_parts(self, of: Parts, *, heavy: bool = False) -> Value | Stacked | Parts:
        """Return the result of a function of rows if that is a matrix of numbers, or several stacked; otherwise its
        parts."""
        tried, more = (self._try_on_rows(of, count) for count in (2, 3))
        at = 0
        if isinstance(tried, Tensor):
            at = next((at for at, pair in enumerate(zip(tried.shape, more.shape, strict=True)) if len({*pair}) > 1), 0)
        if isinstance(tried, Tensor) and tried.dtype == self._assembly.setting.dtype:
            found = self._rows(of, at, heavy=heavy)
            return Stacked(found, at) if at else found
        if isinstance(tried, Tensor):
            sums = [part for one in self._samples(of.moments).values() for part in one]

            def truths(*rows: Tensor) -> Any:
                return of.function(*rows, *sums).movedim(at, 0).to(self._assembly.setting.dtype)

            self._assembly.tried(of.name, truths, of.inputs)
        return replace(of, at=at)

    @torch.no_grad()
    def _try_on_rows(self, of: Parts, rows: int) -> Any:
        """Return the result for this many rows of zeros."""
        dtype = self._assembly.setting.dtype
        return of.of({one: torch.zeros(rows, *one.tail, dtype=dtype) for one in of.inputs} | self._samples(of.moments))

    def _samples(self, moments: Sequence[Moments]) -> Known:
        return {one: one.statistics.sample(self._assembly.setting.dtype) for one in moments}

    def _sum(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
        """Return a sum or a multiple of matrices, which needs nothing kept for its gradient; None for anything else."""
        if kwargs or len(args) != 2:
            return None
        sign = {operator.add: 1.0, torch.add: 1.0, "add": 1.0, operator.sub: -1.0, torch.sub: -1.0, "sub": -1.0}
        left, right = args
        if target in sign:
            if isinstance(left, Value) and isinstance(right, Value):
                if left is not right and left.tail == right.tail and len(left.tail) == 1:
                    return self._assembly.sum([(1.0, left), (sign[target], right)])
            elif isinstance(left, Value) and len(left.tail) == sign[target] == 1:
                bias = parameter_of(right)
                if bias is not None and left.tail == tuple(bias.shape):
                    return self._assembly.sum([(1.0, left)], (bias,))
        if target in (operator.mul, torch.mul, "mul"):
            value, factor = (left, right) if isinstance(left, Value) else (right, left)
            if isinstance(value, Value) and len(value.tail) == 1 and isinstance(factor, (int, float)):
                return self._assembly.sum([(float(factor), value)])
        return None

    def _shape(self, target: Any, args: list[Any]) -> Any:
        """Return the shape, type and parts of a value; None for any other question."""
        first, rest = args[0], args[1:]
        if isinstance(first, Value):
            if target == "size" or (target is getattr and rest[0] == "shape"):
                sizes = (RowCount(first), *first.tail)
                return sizes[rest[0]] if target == "size" and rest else sizes
            if target == "dim" or (target is getattr and rest[0] == "ndim"):
                return 1 + len(first.tail)
            if target is getattr:
                fixed = {"dtype": self._assembly.setting.dtype, "device": torch.device("cpu")}
                if rest[0] in ("T", "mT"):
                    return None
                if rest[0] not in fixed:
                    raise ModelError(f"the attribute {rest[0]} of a matrix of rows is not supported")
                return fixed[rest[0]]
        if isinstance(first, Stacked) and (target in ("size", "dim") or target is getattr):
            found = self._shape(target, [first.rows, *([] if target == "size" else rest)])
            sizes = (*found[1 : first.at + 1], found[0], *found[first.at + 1 :]) if isinstance(found, tuple) else found
            return sizes[rest[0]] if target == "size" and rest else sizes
        if isinstance(first, Free) and (target == "size" or (target is getattr and rest[0] == "shape")):
            sizes = first.of(self._samples(first.moments)).shape
            return sizes[rest[0]] if target == "size" and rest else tuple(sizes)
        if isinstance(first, Parts) and target in (operator.getitem, getattr):
            return self._rows_or_parts(replace(first, evaluate=lambda known: target(first.of(known), rest[0])))
        return None

    def _make_codes(self, name: str, source: Value, function: Callable[[Tensor], Tensor]) -> Codes:
        """Return whole numbers that a function makes of features, as they are in the store."""
        if not _is_of_features(source):
            raise ModelError(f"{name}: whole numbers are taken of the store's features, as they are, alone")

        def side_by_side(rows: Tensor) -> Tensor:
            return function(rows).to(rows.dtype).reshape(len(rows), -1)

        tail = function(torch.zeros(1, *source.tail)).shape[1:]
        return Codes(self._assembly.detached(name, side_by_side, [source], whole=True), tuple(tail))

    def _combine_edge_types(self, found: Sequence[Value], aggr: str) -> Value:
        """Return what rows get over several edge types, combined by ``aggr``."""
        if aggr in ("sum", "mean") and len(set(found)) == len(found) and all(len(one.tail) == 1 for one in found):
            factor = 1.0 if aggr == "sum" else 1.0 / len(found)
            return self._assembly.sum([(factor, one) for one in found])

        def joined(*rows: Tensor) -> Any:
            return join_relations(list(rows), aggr)

        return self._assembly.rowwise(f"HeteroConv's {aggr}", joined, found)

    def _concatenate_results(self, results: Sequence[Any]) -> Value:
        """Return a model's results side by side, and record how many columns each has."""
        for number, result in enumerate(results):
            if not isinstance(result, Value) or len(result.tail) != 1:
                flat = isinstance(result, Value) and not result.tail
                description = "a number a node, [N]: give it as [N, 1]" if flat else "not one row of numbers a node"
                raise ModelError(f"result {number} of forward of {self._model_name} is {description}")
        self._assembly.result_columns = tuple(result.columns for result in results)
        return self._assembly.rowwise("the results", lambda *rows: torch.cat(rows, dim=1), results)

    # ---- sums over all rows ----------------------------------------------------------------------------

    def _reduce_over_rows(self, target: Any, of: Parts, args: list[Any], kwargs: dict[str, Any]) -> Free | None:
        """Return a sum, mean, norm or deviation over all rows, or a product that is such a sum; None for anything
        else."""
        try:
            tried, more = (self._try_on_rows(of, count) for count in (2, 3))
        except Exception:  # an error is raised when it is tried as a function of rows
            return None
        if not isinstance(tried, Tensor) or not isinstance(more, Tensor) or tried.shape != more.shape:
            return None
        if of.moments or of.parameters or tried.dtype != self._assembly.setting.dtype:
            raise ModelError(f"{of.name} over all rows is supported of rows alone, in the model's type")
        first, count, shape = args[0], self._assembly.num_rows(of.inputs[0]), tried.shape
        if of.name in ("var", "std"):
            return self._deviation(of.name, first, args, kwargs, shape)
        given = [one for name, one in kwargs.items() if name in ("p", "ord")] or args[1:] or [2]
        p = given[0] if of.name.endswith("norm") else 1
        power = 2.0 if p in ("fro", None) else float(p)  # a norm is the root of a sum of squares
        if not 0 < power < inf:
            return None

        def total(*rows: Tensor) -> Tensor:
            found: Tensor = of.function(*rows)
            return found * len(rows[0]) if of.name == "mean" else found if power == 1 else found**power

        def found(known: Known) -> Tensor:
            (numbers,) = known[moments]
            numbers = numbers.view(shape)
            return (
                numbers / count
                if of.name == "mean"
                else numbers
                if power == 1
                else _differentiable_root(numbers, power)
            )

        moments = self._assembly.total(of.name, of.inputs, total)
        return Free(name=of.name, evaluate=found, moments=(moments,))

    def _deviation(
        self, name: str, rows: Any, args: list[Any], kwargs: dict[str, Any], shape: Sequence[int]
    ) -> Free | None:
        """Return variance or deviation of every column, or of all numbers."""
        given = dict(zip(("dim", "unbiased", "keepdim"), args[1:], strict=False)) | kwargs
        dims = leaves_of(given.get("dim"))
        if not isinstance(rows, Value) or (dims != [None] and dims not in ([0], [-1 - len(rows.tail)])):
            return None
        count, less = self._assembly.num_rows(rows), given.get("correction", int(given.get("unbiased", True)))
        count *= rows.columns if dims == [None] else 1
        moments = self._assembly.moments(self._assembly.matrix(name, [rows]))

        def found(known: Known) -> Tensor:
            mean, variance = known[moments]
            variance = (variance + (mean - mean.mean()) ** 2).mean() if dims == [None] else variance
            variance = variance.view(shape) * (count / (count - less))
            return variance if name == "var" else _differentiable_root(variance, 2)

        return Free(name=name, evaluate=found, moments=(moments,))

    # ---- what is refused -------------------------------------------------------------------------------

    def _check_not_random(self, found: Free) -> None:
        """Refuse random numbers, which would be different at each use."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            found.of(self._samples(found.moments))
            if not torch.equal(before, torch.get_rng_state()):
                raise ModelError(f"{found.name} is not supported: {_RANDOM_REFUSAL}")

    def _check_all_rows(self, name: str, source: Any, key: Any) -> None:
        """Refuse a slice of some rows. The few rows on which functions are tried would not show it."""
        keys = [*key] if isinstance(key, (tuple, list)) else [key]
        rows = keys[isinstance(source, Stacked) :][:1] or [None]
        source, (rows,) = source.rows if isinstance(source, Stacked) else source, rows
        if not isinstance(source, Value) or not isinstance(rows, slice):
            return
        bounds, nodes = (rows.start, rows.stop, rows.step), self._assembly.num_rows(source)
        if all(bound is None or isinstance(bound, int) for bound in bounds) and rows.indices(nodes) != (0, nodes, 1):
            raise ModelError(f"{name} looks across rows: it takes some rows and leaves out others")

    def _check_assigned(self, source: Any, key: Any, value: Any) -> None:
        """Check ``source[key] = value``: allowed for columns of all rows, for entries chosen by truth values, and for
        anything without rows."""
        if isinstance(source, Free) and not any(isinstance(leaf, ROW_RESULTS) for leaf in leaves_of((key, value))):
            return
        first, *others = [*key] if isinstance(key, (tuple, list)) else [key]
        self._check_all_rows("item assignment", source, key)
        chosen = isinstance(first, (Value, Parts)) and not others and not isinstance(value, ROW_RESULTS)
        of_all = (isinstance(first, slice) or first is Ellipsis) and not any(isinstance(a, ROW_RESULTS) for a in others)
        if not isinstance(source, Value) or len(others) > len(source.tail) or not (chosen or of_all):
            raise ModelError(
                "item assignment is not supported but of numbers to columns of all rows, x[:, 0] = …, or where "
                "something holds, x[x < 0] = 0; torch.where and torch.cat make a new matrix"
            )


_SPECIAL: dict[Any, Callable[[Functions, Call], Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout), Functions._drop),
    **dict.fromkeys((torch.stack, torch.cat, torch.concat), Functions._stack),
    torch.randn_like: Functions._draw_noise,
    F.linear: Functions._map_linearly,
    assigned: Functions._assign,
    join_relations: lambda functions, call: functions._combine_edge_types(*call.args),
    side_by_side: lambda functions, call: functions._concatenate_results(call.args),
    both_types: Functions._keep_second,
    operator.getitem: Functions._index,
    **dict.fromkeys(("squeeze", torch.squeeze), Functions._squeeze),
    **dict.fromkeys(("unsqueeze", torch.unsqueeze), Functions._unsqueeze),
    **dict.fromkeys(("split", torch.split), Functions._split),
    **dict.fromkeys(WHOLE, Functions._number_rows),
    **dict.fromkeys((torch.zeros, "new_zeros"), Functions._number_graphs),
    **dict.fromkeys(("to", "float", "double"), Functions._convert_computed),
}
"""Functions and methods that mean something special for some values."""


def _differentiable_root(numbers: Tensor, power: float) -> Tensor:
    """Return the root, with a gradient of 0 at 0, as torch's norms and deviations have it."""
    is_zero = numbers == 0
    return torch.where(is_zero, numbers, torch.where(is_zero, 1.0, numbers) ** (1 / power))


def _call_on_rows(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Tensor) -> Any:
    """Return a method, by its name, or a function, called on ``rows``."""
    return getattr(rows, target)(*args, **kwargs) if isinstance(target, str) else target(rows, *args, **kwargs)


def _is_of_features(value: Value) -> bool:
    """Whether it comes from the store's features alone, without parameters and random numbers."""
    of_others = isinstance(value, (Rowwise, Sum, Dense)) and not value.parameters
    return isinstance(value, Features) or (of_others and all(map(_is_of_features, value.inputs)))


def activation_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Activation, float] | None:
    """Return which activation of its one operand a function, method or module is, with its constant; or None."""
    if isinstance(target, nn.Module):
        kind, options = _ACTIVATIONS.get(type(target)), vars(target)
        is_usual = (options.get("beta", 1), options.get("threshold", 20)) == (1, 20)
        if kind is None or len(args) != 1 or kwargs or not is_usual:
            return None
        return kind, float(options.get("negative_slope", options.get("alpha", 0.0)))
    kind = _ACTIVATIONS.get(target)
    constants = [one for one in (*args[1:], *kwargs.values()) if not isinstance(one, bool)]  # but for ``inplace``
    if kind in (Activation.LEAKY_RELU, Activation.ELU) and len(constants) < 2:
        defaults = {Activation.LEAKY_RELU: 0.01, Activation.ELU: 1.0}
        return kind, float(*constants or [defaults[kind]])
    return None if kind is None or constants else (kind, 0.0)
