# SPDX-License-Identifier: Apache-2.0
"""The local stages of a network: what is computed for a tile of rows, forward and backward.

Shapes: R rows of the tile, I/O columns into/out of a layer, C classes. Matrices by name, one row a node:

    x, y, split/…    the store's         ax     t · A(s · x), aggregated once
    m<k>, p<k>       messages of layer k and their sum over in-edges
    z<k>             what layer k gives before norm, activation and dropout
    q<k>             t · p<k>, kept for the weight gradient of an aggregate-first layer
    dp<k>, dm<k>     gradients of p<k> and of m<k>, the latter pulled over out-edges
    dz<k>            gradient of z<k>, kept only where dp<k> does not give it back

Rows that cannot reach the loss are left out: what layer k gives is needed only within K - k hops of the rows
that are scored, and rows lie in the order of that distance, so every stage runs over the first so many rows.

The forward of layer k is one stage; so is the backward of everything that consumes z<k>: it draws h<k> again
from z<k> (cheap and row-wise), so that no activation, mask or normalised copy is ever kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ooc.errors import StoreError
from ooc.plan.workload import Direction, Pull, Stage
from ooc.train.graph import ActiveRows, GraphRows
from ooc.train.lowering import Layer, Network, Order

Tensors = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits [R, C], labels [R]) → sum of the rows' losses, a scalar."""


@dataclass(slots=True)
class Tile:
    """Rows ``start:stop`` with their inputs by name, and what they add to sums over all rows.

    Inputs may be views of long-lived buffers: not to be written to. ``counts`` are (rows, correct) by split.
    """

    start: int
    stop: int
    inputs: Tensors
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    loss: float = 0.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Scores:
    """What evaluation counts: rows and correct predictions by split."""

    rows: dict[str, int] = field(default_factory=dict)
    correct: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """A stage and the function that computes it."""

    spec: Stage
    compute: Callable[[Tile], Tensors]


SPLITS = ("train", "valid", "test")


class StageBuilder:
    """Makes the steps of the three programs of a network on a graph, and holds what they add up.

    ``aggregated``: A(X) is there already. ``recompute``: z1 is not kept but computed again from x and A(X), which
    its readers mostly need anyway. ``epoch`` keys the dropout masks; it is set before each run of the training
    program. Tiles are computed in any order and on any thread, and only read what is here; ``commit``
    adds their sums, in descending order of rows, whatever the plan.
    """

    def __init__(
        self,
        network: Network,
        rows: GraphRows,
        *,
        undirected: bool,
        loss: LossFunction,
        train_rows: int,
        num_columns: dict[str, int],
        aggregated: bool,
        recompute: bool,
        active: ActiveRows,
        seed: int,
    ) -> None:
        self.network = network
        self.rows = rows
        self.loss_function = loss
        self.train_rows = train_rows
        self.columns = num_columns
        self.aggregated = aggregated
        self.recompute = recompute and network.aggregates_once
        self.active = active
        self.seed = seed
        self.epoch = 0
        self.loss_sum = 0.0
        self.scores = Scores()
        self.score_sink: Callable[[int, Tensor], None] | None = None
        self.backward_direction = Direction.IN if undirected else Direction.OUT

    def commit(self, tile: Tile) -> None:
        """Add what a computed tile contributes to gradients, loss and scores."""
        for parameter, gradient in tile.gradients:
            assert parameter.grad is not None
            parameter.grad.add_(gradient)
        self.loss_sum += tile.loss
        for split, (rows, correct) in tile.counts.items():
            self.scores.rows[split] = self.scores.rows.get(split, 0) + rows
            self.scores.correct[split] = self.scores.correct.get(split, 0) + correct

    # ---- the three programs -------------------------------------------------------------------------

    def prepare(self) -> list[Step]:
        """What is computed once: t · A(s · x), where the first layer aggregates constant features."""
        if self.aggregated or not self.network.aggregates_once:
            return []
        n = self.active.nodes
        copy = self._stage("scale x", n, loads=("x",), stores=("m1",))
        sums = self._stage("aggregate x", n, pull=Pull("m1", "p1", Direction.IN), stores=("ax",))
        return [
            Step(copy, lambda tile: {"m1": self._before(self._value(tile, "x"), tile)}),
            Step(sums, lambda tile: {"ax": self._after(tile.inputs["p1"], tile)}),
        ]

    def train(self) -> list[Step]:
        """Forward by layers, the loss and its gradient, backward by layers."""
        depth = self.network.depth
        steps = [*self._first_messages(training=True)]
        steps += [self._forward(k, training=True) for k in range(1, depth)]
        steps.append(self._loss())
        lowest = 0 if self.network.layer(1).order is not Order.AGGREGATED_ONCE else 1
        steps += [self._backward(k) for k in range(depth - 1, lowest - 1, -1)]
        return steps

    def evaluate(self) -> list[Step]:
        """Forward without dropout, then correct predictions counted by split."""
        depth = self.network.depth
        steps = [*self._first_messages(training=False)]
        steps += [self._forward(k, training=False) for k in range(1, depth)]
        return [*steps, self._score()]

    # ---- forward --------------------------------------------------------------------------------------

    def _first_messages(self, *, training: bool) -> list[Step]:
        if self.network.layer(1).order is Order.AGGREGATED_ONCE:
            return []

        def compute(tile: Tile) -> Tensors:
            h = self._activated(0, self._value(tile, "x"), tile, training=training)
            return {"m1": self._message(self.network.layer(1), h, tile)}

        rows = self._rows(self.network.depth, training=training)
        return [Step(self._stage("messages 1", rows, loads=("x",), stores=("m1",)), compute)]

    def _inputs(self, layer: Layer) -> tuple[tuple[str, ...], Pull | None]:
        """What the forward of ``layer`` loads and pulls."""
        k = layer.index
        loads = self._value_inputs(k - 1) if layer.root is not None else ()
        if layer.order is Order.AGGREGATED_ONCE:
            return ("ax", *loads), None
        return loads, Pull(f"m{k}", f"p{k}", Direction.IN)

    def _combine(self, layer: Layer, tile: Tile, *, training: bool) -> tuple[Tensor, Tensor | None]:
        """z of ``layer`` for the tile, and q = t · p where the dense product comes after the sum."""
        k = layer.index
        q = None
        if layer.order is Order.TRANSFORM_FIRST:
            z = self._after(tile.inputs[f"p{k}"], tile)
        else:
            q = tile.inputs["ax"] if layer.order is Order.AGGREGATED_ONCE else self._after(tile.inputs[f"p{k}"], tile)
            z = q @ layer.weight.detach().T
        if layer.root is not None:
            h = self._activated(k - 1, self._value_of(k - 1, tile, training=training), tile, training=training)
            z = torch.addmm(z, h, layer.root.detach().T)
        if layer.bias is not None:
            z = z + layer.bias.detach()
        return z, q

    def _forward(self, k: int, *, training: bool) -> Step:
        layer, above = self.network.layer(k), self.network.layer(k + 1)
        loads, pull = self._inputs(layer)
        keep_z = (training or above.root is not None) and not (k == 1 and self.recompute)
        keep_q = training and layer.order is Order.AGGREGATE_FIRST
        stores = ((f"z{k}",) if keep_z else ()) + ((f"q{k}",) if keep_q else ()) + (f"m{k + 1}",)

        def compute(tile: Tile) -> Tensors:
            z, q = self._combine(layer, tile, training=training)
            out = {f"z{k}": z} if keep_z else {}
            if keep_q and q is not None:
                out[f"q{k}"] = q
            h = self._activated(k, z, tile, training=training)
            out[f"m{k + 1}"] = self._message(above, h, tile)
            return out

        rows = self._rows(self.network.depth - k, training=training)
        return Step(self._stage(f"forward {k}", rows, loads=loads, pull=pull, stores=stores), compute)

    def _score(self) -> Step:
        layer = self.network.layer(self.network.depth)
        loads, pull = self._inputs(layer)
        loads += ("y", *(f"split/{split}" for split in SPLITS))

        def compute(tile: Tile) -> Tensors:
            z, _ = self._combine(layer, tile, training=False)
            labels = tile.inputs["y"][:, 0]
            right = z.argmax(dim=1) == labels
            for split in SPLITS:
                mask = tile.inputs[f"split/{split}"][:, 0]
                tile.counts[split] = (int(mask.sum()), int((right & mask).sum()))
            if self.score_sink is not None:
                self.score_sink(tile.start, z)
            return {}

        rows = self._rows(0, training=False)
        return Step(self._stage("score", rows, loads=loads, pull=pull, stores=()), compute)

    # ---- loss and backward ------------------------------------------------------------------------------

    def _loss(self) -> Step:
        """The last layer's forward, the loss, its gradient, and as much backward as needs no other row."""
        layer = self.network.layer(self.network.depth)
        loads, pull = self._inputs(layer)
        loads += ("y", "split/train")

        def compute(tile: Tile) -> Tensors:
            z, q = self._combine(layer, tile, training=True)
            rows = tile.inputs["split/train"][:, 0].nonzero().squeeze(1)
            dz = torch.zeros_like(z)
            if rows.numel():
                labels = tile.inputs["y"][rows, 0]
                if not 0 <= int(labels.min()) <= int(labels.max()) < z.shape[1]:
                    raise StoreError("y of the store is damaged: a training row has no class; see ooc verify")
                with torch.enable_grad():
                    logits = z[rows].requires_grad_()
                    loss = self.loss_function(logits, labels)
                    (gradient,) = torch.autograd.grad(loss, logits)
                tile.loss = float(loss.detach().double())
                dz[rows] = gradient / self.train_rows
            return self._into_layer(layer, dz, q, tile)

        stores = self._gradient_stores(layer)
        rows = self._rows(0, training=True)
        return Step(self._stage("loss", rows, loads=loads, pull=pull, stores=stores, reverse=True), compute)

    def _backward(self, k: int) -> Step:
        """From the gradients of what layer k + 1 consumed to those of what layer k consumed."""
        layer = self.network.layer(k) if k else None
        above = self.network.layer(k + 1)
        loads = self._value_inputs(k)
        if above.root is not None:
            loads += (self._gradient_name(above),)
        if layer is not None:
            loads += self._weight_gradient_inputs(layer)
        loads = tuple(dict.fromkeys(loads))
        pull = Pull(f"dp{k + 1}", f"dm{k + 1}", self.backward_direction)
        stores = self._gradient_stores(layer) if layer else ()

        def compute(tile: Tile) -> Tensors:
            dm = self._before(tile.inputs[pull.output], tile)
            v = self._value_of(k, tile, training=True)
            activation = self.network.activation(k)
            with torch.enable_grad():
                leaf = v.detach().requires_grad_()
                h = activation(leaf, start=tile.start, seed=self.seed, epoch=self.epoch)
            dh = self._through_consumers(above, dm, h.detach(), tile, need_input=layer is not None)
            if layer is None or dh is None:
                return {}
            parameters = activation.parameters
            dz, *gradients = torch.autograd.grad(h, [leaf, *parameters], dh)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                tile.gradients.append((parameter, gradient))
            q = tile.inputs.get("ax" if layer.order is Order.AGGREGATED_ONCE else f"q{k}")
            return self._into_layer(layer, dz, q, tile)

        rows = self._rows(self.network.depth - k, training=True)
        spec = self._stage(f"backward {k}", rows, loads=loads, pull=pull, stores=stores, reverse=True)
        return Step(spec, compute)

    def _through_consumers(self, above: Layer, dm: Tensor, h: Tensor, tile: Tile, *, need_input: bool) -> Tensor | None:
        """dh from the gradients of the messages and of the row's own term; their weight gradients on the way."""
        dh: Tensor | None = dm
        if above.order is Order.TRANSFORM_FIRST:
            tile.gradients.append((above.weight, dm.T @ h))
            dh = dm @ above.weight.detach() if need_input else None
        if above.root is not None:
            dz = self._own_gradient(above, tile)
            n = len(dz)  # rows beyond have no gradient of their own: nothing above needs their z
            tile.gradients.append((above.root, dz.T @ h[:n]))
            if dh is not None and need_input and n:
                own = torch.addmm(dh[:n], dz, above.root.detach())
                dh = torch.cat([own, dh[n:]]) if n < len(dh) else own
        return dh

    def _into_layer(self, layer: Layer, dz: Tensor, q: Tensor | None, tile: Tile) -> Tensors:
        """From dz of ``layer`` to the gradient of what it pulled, with bias and (after the sum) weight gradients."""
        if layer.bias is not None:
            tile.gradients.append((layer.bias, dz.sum(dim=0)))
        if layer.order is Order.TRANSFORM_FIRST:
            return {f"dp{layer.index}": self._after(dz, tile)}
        assert q is not None
        tile.gradients.append((layer.weight, dz.T @ q))
        if layer.order is Order.AGGREGATED_ONCE:
            if layer.root is not None:
                tile.gradients.append((layer.root, dz.T @ self._value(tile, "x")))
            return {}
        out = {f"dp{layer.index}": self._after(dz @ layer.weight.detach(), tile)}
        if layer.root is not None:
            out[f"dz{layer.index}"] = dz
        return out

    def _own_gradient(self, layer: Layer, tile: Tile) -> Tensor:
        """dz of ``layer``: kept as such, or had back from dp = t · dz."""
        gradient = tile.inputs[self._gradient_name(layer)]
        if layer.order is Order.AGGREGATE_FIRST:
            return gradient
        scale = self.rows.scale(tile.start, tile.start + len(gradient))
        return gradient if scale is None else gradient / scale

    # ---- names and sizes ---------------------------------------------------------------------------------

    def _gradient_name(self, layer: Layer) -> str:
        return f"dz{layer.index}" if layer.order is Order.AGGREGATE_FIRST else f"dp{layer.index}"

    def _gradient_stores(self, layer: Layer) -> tuple[str, ...]:
        if layer.order is Order.AGGREGATED_ONCE:
            return ()
        keep = layer.order is Order.AGGREGATE_FIRST and layer.root is not None
        return (f"dp{layer.index}",) + ((f"dz{layer.index}",) if keep else ())

    def _weight_gradient_inputs(self, layer: Layer) -> tuple[str, ...]:
        match layer.order:
            case Order.AGGREGATED_ONCE:
                return ("ax", "x") if layer.root is not None else ("ax",)
            case Order.AGGREGATE_FIRST:
                return (f"q{layer.index}",)
            case Order.TRANSFORM_FIRST:
                return ()

    def _rows(self, hops: int, *, training: bool) -> int:
        """How many leading rows lie within ``hops`` of those that are trained or scored on."""
        return (self.active.training if training else self.active.scoring)[hops]

    def _stage(
        self,
        name: str,
        rows: int,
        *,
        loads: tuple[str, ...] = (),
        pull: Pull | None = None,
        stores: tuple[str, ...] = (),
        reverse: bool = False,
    ) -> Stage:
        """The stage's description, with a bound on its temporaries: twice what goes in and out, and autograd's
        chain of up to eight matrices of the widest."""
        names = [*loads, *stores, *((pull.source,) if pull else ())]
        widths = [self.columns[name] for name in names]
        itemsize = max(4, torch.empty(0, dtype=self.network.dtype).element_size())
        widest = max([*widths, *(layer.out_columns for layer in self.network.layers)])
        return Stage(name, rows, loads, pull, stores, (2 * sum(widths) + 8 * widest) * itemsize, reverse)

    # ---- rows ----------------------------------------------------------------------------------------------

    def _value_inputs(self, k: int) -> tuple[str, ...]:
        """What must be loaded to have the rows that h_k is drawn from."""
        if k == 1 and self.recompute:
            return self._inputs(self.network.layer(1))[0]
        return (f"z{k}" if k else "x",)

    def recomputed_multiplies(self) -> int:
        """Multiply-adds an epoch for drawing z1 again: in its backward, and in the forward of a layer with a root."""
        first, depth = self.network.layer(1), self.network.depth
        rows = self.active.training[depth - 1]
        if self.network.layer(2).root is not None:
            rows += self.active.training[depth - 2]
        return rows * int(first.weight.numel()) * (1 if first.root is None else 2)

    def _value_of(self, k: int, tile: Tile, *, training: bool) -> Tensor:
        """The rows that h_k is drawn from: x, or z_k, kept or computed again."""
        if k == 1 and self.recompute:
            return self._combine(self.network.layer(1), tile, training=training)[0]
        return self._value(tile, f"z{k}" if k else "x")

    def _value(self, tile: Tile, name: str) -> Tensor:
        """Rows of x (in the store's dtype) or z, in the compute dtype."""
        return tile.inputs[name].to(self.network.dtype)

    def _activated(self, k: int, v: Tensor, tile: Tile, *, training: bool) -> Tensor:
        epoch = self.epoch if training else None
        return self.network.activation(k)(v, start=tile.start, seed=self.seed, epoch=epoch)

    def _message(self, layer: Layer, h: Tensor, tile: Tile) -> Tensor:
        m = h @ layer.weight.detach().T if layer.order is Order.TRANSFORM_FIRST else h
        return self._before(m, tile)

    def _before(self, m: Tensor, tile: Tile) -> Tensor:
        """s · m."""
        scale = self.rows.scale(tile.start, tile.stop) if self.rows.before else None
        return m if scale is None else m * scale

    def _after(self, p: Tensor, tile: Tile) -> Tensor:
        """t · p."""
        scale = self.rows.scale(tile.start, tile.stop)
        return p if scale is None else p * scale
