# SPDX-License-Identifier: Apache-2.0
"""The names of matrices and stages. k counts the aggregations from 1, including those computed once.

x, y, split/…    the store's (nodes/paper/x, … in a heterogeneous graph)
ax, ax2, …       A(x), A(A(x)), …, aggregated once; ax.mean, … for another A
m<k>, p<k>       what aggregation k pulls, and its sum over in-edges
dp<k>, dm<k>     the gradients of both, the latter pulled over out-edges
dt<k>, pt<k>     the gradient of the targets' own rows in attention k, and what they pull for it; for an opaque layer
                 the gradient of its rows as targets, and dm<k> that of the same rows as in-neighbours
q<k>             t · p<k>, kept where a weight's gradient needs it
z<k>             what follows aggregation k, up to the first norm or activation, or after it if that is a ReLU, kept to
                 recompute the rest
s<k>…            the signs of a rectifier's input, a bit each
h<k>…            other kept values
emb, emb.<name>  an embedding of the nodes (nodes/paper/emb, … of node types), and its optimizer state; demb.all: its
                 whole gradient
dh<k>…           the gradient of a value of an earlier stage that a later one used
z<k>.<j>, …      z<k>, m<k>, … recomputed for backward j
"""

from collections.abc import Iterator
from itertools import chain, count
from string import ascii_lowercase

from ooc.model.layers.per_edge import EdgeAggregate
from ooc.model.lowering.network import Network
from ooc.model.lowering.projection import Linear
from ooc.model.lowering.rectified import Rectified, Sigmoidal, Signs
from ooc.model.lowering.values import Aggregate, EmbeddingRows, Features, Moments, Rowwise, Sum, Value
from ooc.stages.schedule import Schedule, is_constant, is_told_by_result
from ooc.storage.types import NODES, features_name


def embedding_name(node_type: str) -> str:
    """Return the matrix of the embedding of a node type; "" is the type in a homogeneous graph."""
    return f"{NODES}/{node_type}/emb" if node_type else "emb"


def embedding_gradient(node_type: str) -> str:
    """Return the matrix of the embedding's whole gradient, used where rows are not stepped as it is computed."""
    return f"d{embedding_name(node_type)}.all"


class Names:
    """The names of one schedule's matrices and stages.

    ``columns`` holds the widths of all named matrices and takes in these: schedules share a name only for matrices of
    equal width.
    """

    def __init__(self, schedule: Schedule, network: Network, columns: dict[str, int]) -> None:
        self._schedule = schedule
        self._network = network
        self._once = max((v.hops for v in schedule.values if isinstance(v, Aggregate) and v.once), default=0)
        self._stages: list[str] = []
        for stage in range(schedule.last + 1):
            self._stages.append(next(n for n in _variants(str(self._layer(stage))) if n not in self._stages))
        self._given: dict[Value, str] = {}
        taken: set[str] = set()
        stored = schedule.kept | schedule.dropped
        for value in sorted(schedule.values, key=lambda value: (value not in stored, value.index)):
            name = self._name(value)
            if not is_constant(value):
                name = next(n for n in _variants(name) if n not in taken and columns.get(n) in (None, value.columns))
                columns.setdefault(name, value.columns)
            taken.add(name)
            self._given[value] = name
        self._letters: dict[Aggregate, str] = {}
        for barrier in schedule.barriers:
            if isinstance(barrier, Aggregate):
                number = str(self._layer(schedule.stage[barrier]))
                widths = _widths(barrier)
                self._letters[barrier] = next(
                    n
                    for n in _variants(number)
                    if all(columns.get(f"{kind}{n}") in (None, width) for kind, width in widths.items())
                )
                columns |= {f"{kind}{self._letters[barrier]}": width for kind, width in widths.items()}

    def forward(self, stage: int) -> str:
        """Return the name of the forward of ``stage``: by the aggregations done, before the first one by what it
        computes."""
        name = self._stages[stage]
        return f"messages 1{name[1:]}" if name[0] == "0" else f"forward {name}"

    def backward(self, stage: int) -> str:
        """Return the name of the backward of ``stage``."""
        return f"backward {self._stages[stage]}"

    def value(self, value: Value, backward: int | None = None) -> str:
        """Return the matrix that holds ``value``; with ``backward``: recomputed for the backward of that stage."""
        return self._given[value] + self._suffix(backward)

    def of(self, kind: str, aggregate: Aggregate, backward: int | None = None) -> str:
        """Return the matrix of this kind, ``m`` … ``pt``, for ``aggregate``; ``backward`` as for values."""
        aggregate = aggregate.upstream_of if kind == "dp" else aggregate
        return f"{kind}{self._letters[aggregate]}{self._suffix(backward)}"

    def _suffix(self, backward: int | None) -> str:
        return "" if backward is None else f".{self._stages[backward]}"

    def gradient(self, value: Value, writers: list[int], stage: int) -> str:
        """Return the gradient of ``value`` after ``stage`` has added to it; ``writers`` are all stages that do."""
        name = f"d{self._given[value]}"
        return name if len(writers) == 1 else f"{name}.{stage}"

    def _layer(self, stage: int) -> int:
        """Return the number of aggregations up to this stage."""
        return self._once + sum(isinstance(b, Aggregate) for b in self._schedule.barriers[: stage + 1])

    def _name(self, value: Value) -> str:
        if isinstance(value, Features):
            return features_name(value.space)
        if isinstance(value, EmbeddingRows):
            return embedding_name(value.space)
        if isinstance(value, Aggregate) and value.once:
            return self._network.first_aggregation(value.scaling, value.hops)
        layer = self._layer(self._schedule.stage[value])
        if isinstance(value, Aggregate):
            return f"q{layer}"
        if isinstance(value, Signs):
            return f"s{layer}"
        return f"z{layer}" if self._is_first_sum(value) else f"h{layer}"

    def _is_first_sum(self, value: Value) -> bool:
        """Return whether it is kept, with only sums and products between it and what its stage begins with."""
        kinds = (Sum, Linear, Rectified, Sigmoidal, Rowwise)
        if value not in self._schedule.kept | self._schedule.dropped or not isinstance(value, kinds):
            return False
        if isinstance(value, Rowwise) and value.moments:
            return False
        waiting: list[Value] = [value.source if is_told_by_result(value) else value]
        stage = self._schedule.stage[value]
        begun = False
        while waiting:
            source = waiting.pop()
            if isinstance(source, (Aggregate, Moments)) or is_constant(source):
                begun = begun or isinstance(source, Aggregate)
            elif self._schedule.stage[source] == stage:
                if not isinstance(source, (Sum, Linear)):
                    return False
                waiting.extend(source.inputs)
        return begun


def _widths(aggregate: Aggregate) -> dict[str, int]:
    """Return the columns of an aggregation's matrices, by kind."""
    source = aggregate.source.columns
    widths = {"m": source, "p": aggregate.columns}
    if isinstance(aggregate, EdgeAggregate) and not aggregate.keep:
        return widths
    widths |= {"dm": source, "dp": aggregate.upstream_columns}
    if isinstance(aggregate, EdgeAggregate) and aggregate.brought is not None:
        widths["dt"] = aggregate.brought.columns
    if isinstance(aggregate, EdgeAggregate) and aggregate.pulls_targets:
        widths["pt"] = aggregate.pulled_target_columns
    return widths


def _variants(name: str) -> Iterator[str]:
    """Yield ``name``, then ``name`` with a letter, and so on."""
    suffixes = chain(["", *ascii_lowercase[1:]], (f"_{number}" for number in count(len(ascii_lowercase))))
    return (name + suffix for suffix in suffixes)
