# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one plain sum over in-neighbours, as values. D: how many these are, or what their edges weigh.

ClusterGCNConv    D⁻¹ (A + I) X Wᵀ + X Vᵀ + b         LEConv            A X W₁ᵀ - D X W₂ᵀ + X W₃ᵀ + b
GeneralConv       A (X W₁ᵀ + c) + X W₂ᵀ + b           WLConvContinuous  (X + D⁻¹ A X) / 2
MFConv            A X W_dᵀ + X V_dᵀ + b_d, d the number of in-neighbours, or the largest that there are weights for
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.model.graph import Scaling
from ooc.model.layers.layer import Call
from ooc.model.layers.sums import (
    SUMS,
    linear_of_rows,
    linear_of_sum,
    sum_and_degree,
    sum_of_maps,
)
from ooc.model.lowering.symbolic import is_linear
from ooc.model.lowering.values import Value
from ooc.plan.workload import EdgeData


def lower_wl(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS)
    x = call.matrix("x")
    if call.takes("edge_weight", EdgeData.WEIGHT):
        total = sum_and_degree(call, x, weighted=True)
        mean = call.assembly.rowwise(call.where, _mean, [total])
    else:
        mean = call.aggregate(x, Scaling.MEAN)
    return call.assembly.sum([(0.5, x), (0.5, mean)])


def _mean(total_RC: Tensor) -> Tensor:
    degree_R1 = total_RC[:, -1:]
    return total_RC[:, :-1] * (1.0 / degree_R1).masked_fill(degree_R1 == 0, 0.0)


def lower_cluster_gcn(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS and conv.add_self_loops and not conv.diag_lambda)
    x = call.matrix("x")
    product, biases = linear_of_sum(call, conv.lin_out, x, Scaling.MEAN_OF_ALL)
    own, more = linear_of_rows(call, conv.lin_root, x)
    return call.assembly.sum([(1.0, product), (1.0, own)], [*biases, *more])


def lower_le(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS)
    x, weighted = call.matrix("x"), call.takes("edge_weight", EdgeData.WEIGHT)
    of_neighbours, of_own = sum_of_maps(call, [conv.lin1], [x]), sum_of_maps(call, [conv.lin2], [x])
    total = sum_and_degree(call, of_neighbours, weighted=weighted)

    def difference(total_RC: Tensor, own_RO: Tensor) -> Tensor:
        return total_RC[:, :-1] - total_RC[:, -1:] * own_RO

    found = call.assembly.rowwise(call.where, difference, [total, of_own])
    root, biases = linear_of_rows(call, conv.lin3, x)
    return call.assembly.sum([(1.0, found), (1.0, root)], biases)


def lower_general(conv: Any, call: Call) -> Value:
    call.needs(conv.aggr in SUMS and conv.directed_msg and not conv.attention and conv.in_edge_channels is None)
    source, x = call.ends("x")
    found = call.aggregate(sum_of_maps(call, [conv.lin_msg], [source]), Scaling.SUM)
    if conv.heads > 1:
        found = call.assembly.rowwise(call.where, lambda s: s.view(len(s), conv.heads, -1).mean(dim=1), [found])
    total = call.assembly.sum([(1.0, found), (1.0, call.apply(conv.lin_self, x))])
    if conv.normalize_l2:
        total = call.assembly.rowwise(call.where, lambda rows: F.normalize(rows, p=2.0, dim=-1), [total])
    return total


def lower_mf(conv: Any, call: Call) -> Value:
    """Rows by how many in-neighbours they have."""
    linear = all(map(is_linear, (*conv.lins_l, *conv.lins_r))) and not any(one.bias is not None for one in conv.lins_r)
    call.needs(conv.aggr in SUMS and linear)
    x, pairs = call.matrix("x"), list(zip(conv.lins_l, conv.lins_r, strict=True))

    def mapped(total_RC: Tensor, own_RC: Tensor) -> Tensor:
        degree_R = total_RC[:, -1].detach().clamp(min=0, max=conv.max_degree).round().long()
        order_R, counts = degree_R.argsort(stable=True), degree_R.bincount(minlength=len(pairs)).tolist()
        sorted_RC = (torch.split(rows.index_select(0, order_R), counts) for rows in (total_RC[:, :-1], own_RC))
        parts = zip(pairs, *sorted_RC, strict=True)
        of_sums = ((F.linear(total, of_sum.weight, of_sum.bias), of_own, own) for (of_sum, of_own), total, own in parts)
        found = torch.cat([torch.addmm(of_sum, own, of_own.weight.t()) for of_sum, of_own, own in of_sums])
        return torch.empty_like(found).index_copy(0, order_R, found)

    parameters = [*conv.lins_l.parameters(), *conv.lins_r.parameters()]
    return call.assembly.rowwise(call.where, mapped, [sum_and_degree(call, x), x], parameters, heavy=True)
