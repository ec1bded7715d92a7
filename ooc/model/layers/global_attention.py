# SPDX-License-Identifier: Apache-2.0
"""Attention of every row to every other without pairs: all keys and values come to one matrix a head, a sum over all
rows as the moments of a norm are.

    SGFormerAttention      (q Σ kᵀv + N v) / (q Σ k + N), q and k of length 1; the mean over heads
    PolynormerAttention    (q Σ kᵀv) / (q Σ k + ε), q and k sigmoids; then a norm, a product with a map of x, and a map

Shapes: R rows at hand, H heads, C channels of a head, M the same of a key.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.attention import PolynormerAttention

from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value

_EPSILON = 1e-6


def lower_global_attention(attention: nn.Module, where: str, x: Value, assembly: Assembly) -> Value:
    """What it gives for all rows as one graph."""
    lower = _polynormer if isinstance(attention, PolynormerAttention) else _sgformer
    return lower(attention, where, x, assembly)


def _sgformer(attention: Any, where: str, x: Value, assembly: Assembly) -> Value:
    heads, channels, nodes = attention.heads, attention.head_channels, assembly.num_rows(x)
    maps = (attention.q, attention.k, attention.v)

    def mapped(rows: Tensor) -> Tensor:
        return torch.cat([one(rows) for one in maps], dim=1)

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.view(len(rows), 3, heads, channels).unbind(dim=1)

    def total(rows: Tensor) -> Tensor:
        _, k_RHM, v_RHC = split(rows)
        k_RHM = _direction(k_RHM)
        return torch.cat([torch.einsum("rhm,rhc->hmc", k_RHM, v_RHC).flatten(), k_RHM.sum(dim=0).flatten()])

    def attended(rows: Tensor, sums: Tensor) -> Tensor:
        q_RHM, _, v_RHC = split(rows)
        q_RHM = _direction(q_RHM)
        kv_HMC, k_HM = sums[: -heads * channels].view(heads, channels, -1), sums[-heads * channels :].view(heads, -1)
        above = torch.einsum("rhm,hmc->rhc", q_RHM, kv_HMC) + nodes * v_RHC
        below = torch.einsum("rhm,hm->rh", q_RHM, k_HM) + nodes
        found: Tensor = (above / below[..., None]).mean(dim=1)
        return found

    parameters = [parameter for one in maps for parameter in one.parameters()]
    source = assembly.rowwise(where, mapped, [x], parameters, heavy=True)
    return assembly.of_totals(where, source, total, attended)


def _direction(rows_RHM: Tensor) -> Tensor:
    rows = torch.where(rows_RHM == 0, rows_RHM.new_tensor(_EPSILON), rows_RHM)
    found: Tensor = rows / torch.linalg.norm(rows, ord=2, dim=-1, keepdim=True)
    return found


def _polynormer(attention: Any, where: str, x: Value, assembly: Assembly) -> Value:
    """Channels before heads, as PyG has them."""
    heads, channels, parts = attention.heads, attention.head_channels, 2 if attention.qk_shared else 3
    of_query = () if attention.qk_shared else (attention.q,)

    def mapped(rows: Tensor) -> Tensor:
        found = [attention.k(rows).sigmoid(), attention.v(rows), *(one(rows).sigmoid() for one in of_query)]
        return torch.cat(found, dim=1)

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.view(len(rows), parts, channels, heads).unbind(dim=1)

    def total(rows: Tensor) -> Tensor:
        k_RMH, v_RCH, *_ = split(rows)
        return torch.cat([torch.einsum("rmh,rch->mch", k_RMH, v_RCH).flatten(), k_RMH.sum(dim=0).flatten()])

    def attended(rows: Tensor, sums: Tensor) -> Tensor:
        q_RMH = split(rows)[-1 if of_query else 0]
        kv_MCH, k_MH = sums[: -heads * channels].view(channels, channels, -1), sums[-heads * channels :].view(-1, heads)
        above = torch.einsum("rmh,mch->rch", q_RMH, kv_MCH)
        below = torch.einsum("rmh,mh->rh", q_RMH, k_MH)[:, None]
        return (above / (below + _EPSILON)).reshape(len(rows), -1)

    def mixed(found: Tensor, rows: Tensor) -> Tensor:
        gated = attention.lns(found) * (attention.h_lins(rows) + attention.beta)
        return F.relu(attention.lin_out(gated))

    def of(*modules: nn.Module) -> list[nn.Parameter]:
        return [parameter for module in modules for parameter in module.parameters()]

    source = assembly.rowwise(where, mapped, [x], of(attention.k, attention.v, *of_query), heavy=True)
    found = assembly.of_totals(where, source, total, attended)
    after = of(attention.lns, attention.h_lins, attention.lin_out)
    out = assembly.rowwise(where, mixed, [found, x], after, heavy=True)
    return assembly.dropout(out, float(attention.dropout.p)) if attention.dropout.training else out
