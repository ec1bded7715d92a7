# SPDX-License-Identifier: Apache-2.0
"""Forwards of PyG's modules that a trace cannot follow, rewritten so that it can; for one graph they give the same.

``GroupAddRev`` has a backward of its own, which recomputes its input from its output; its gradients are those of its
forward. ``SGFormer``, ``Polynormer`` and ``GPSConv`` sort rows by the graph they belong to, and ask for the number of
graphs. The results are compared with those of PyG's own forwards on a small graph (``symbolic.Calls``).

Also, their global attention as values, without pairs of rows: all keys and values are reduced to one matrix a head, a
sum over all rows like the moments of a norm.

    SGFormerAttention      (q Σ kᵀv + N v) / (q Σ k + N), q and k of length 1; the mean over heads
    PolynormerAttention    (q Σ kᵀv) / (q Σ k + ε), q and k sigmoids; then a norm, a product with a map of x, and a map
    PerformerAttention     (φ(q) Σ φ(k)ᵀv) / (φ(q) Σ φ(k)), φ a kernel of random projections; then a map

Shapes: R rows at hand, H heads, C channels of a head, M channels of a key.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.attention import PerformerAttention
from torch_geometric.nn.attention.performer import generalized_kernel
from torch_geometric.nn.conv import GPSConv
from torch_geometric.nn.models import GroupAddRev
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from ooc.errors import ModelError
from ooc.model.lowering.assembly import Assembly
from ooc.model.lowering.values import Value

try:
    from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
    from torch_geometric.nn.models import Polynormer
    from torch_geometric.nn.models.sgformer import SGModule
except ImportError:  # PyG before 2.7
    GLOBAL_ATTENTIONS: tuple[type[nn.Module], ...] = (PerformerAttention,)
else:
    GLOBAL_ATTENTIONS = (PerformerAttention, PolynormerAttention, SGFormerAttention)


@contextmanager
def plain_forwards() -> Iterator[None]:
    """A context in which PyG's modules have these forwards."""
    with ExitStack() as stack:
        for kind, name, plain in _PLAIN:
            stack.enter_context(mock.patch.object(kind, name, plain))
        yield


def _apply(self: Any, args: tuple[Any, ...], fn: Any, fn_inverse: Any) -> Any:
    return fn(*args)


def _add_reversibly(self: Any, x: Any, edge_index: Any, *args: Any) -> Any:
    def chunk(one: Any) -> Any:
        as_wide = hasattr(one, "dim") and one.dim() > 1 and one.size(self.split_dim) == x.size(self.split_dim)
        return torch.chunk(one, self.num_groups, dim=self.split_dim) if as_wide else [one] * self.num_groups

    parts, others = chunk(x), [chunk(one) for one in args]
    rows = parts[1]
    for group in range(2, self.num_groups):
        rows = rows + parts[group]
    found = []
    for group, conv in enumerate(self.convs):
        rows = parts[group] + conv(rows, edge_index, *(one[group] for one in others))
        found.append(rows)
    return torch.cat(found, dim=self.split_dim)


def _sgformer(self: Any, x: Any, batch: Any) -> Any:
    _check_batch(batch, "SGFormer")
    x = self.bns[0](self.fcs[0](x))
    found = [F.dropout(self.activation(x), p=self.dropout, training=self.training)]
    for attention, norm, before in zip(self.attns, self.bns[1:], found, strict=False):
        x = norm((_attend(attention, found[-1]) + before) / 2.0)
        found.append(F.dropout(self.activation(x), p=self.dropout, training=self.training))
    return found[-1]


def _polynormer(self: Any, x: Any, edge_index: Any, batch: Any = None) -> Any:
    x = F.dropout(x, p=self.in_drop, training=self.training)
    x_local = 0
    for i, conv in enumerate(self.local_convs):
        if self.pre_ln:
            x = self.pre_lns[i](x)
        h = F.relu(self.h_lins[i](x))
        x = conv(x, edge_index) + self.lins[i](x)
        if self.post_bn:
            x = self.post_bns[i](x)
        x = F.dropout(F.relu(x), p=self.dropout, training=self.training)
        x = (1 - self.beta) * self.lns[i](h * x) + self.beta * x
        x_local = x if i == 0 else x_local + x
    if not self._global:
        return F.log_softmax(self.pred_local(x_local), dim=-1)
    _check_batch(batch, "Polynormer")
    x = self.ln(x_local)
    for attention in self.global_attn:
        x = _attend(attention, x)
    return F.log_softmax(self.pred_global(x), dim=-1)


def _gps(self: Any, x: Any, edge_index: Any, batch: Any = None, **kwargs: Any) -> Any:
    if batch is not None:
        _check_batch(batch, "GPSConv")
    if not isinstance(self.attn, PerformerAttention):
        raise ModelError(
            "GPSConv: every node attends to every other, by N² pairs; with attn_type='performer' by sums over all nodes"
        )

    def norm(one: Any, rows: Any) -> Any:
        if one is None:
            return rows
        return one(rows, batch=batch) if self.norm_with_batch else one(rows)

    attended = F.dropout(_attend(self.attn, x), p=self.dropout, training=self.training)
    found = norm(self.norm2, attended + x)
    if self.conv is not None:
        local = F.dropout(self.conv(x, edge_index, **kwargs), p=self.dropout, training=self.training)
        found = norm(self.norm1, local + x) + found
    return norm(self.norm3, found + self.mlp(found))


def _attend(attention: Any, x: Any) -> Any:
    """Call an attention with all rows as one batch."""
    return attention(x.unsqueeze(0)).squeeze(0)


_ZEROS = (torch.zeros, "new_zeros")
"""Names of functions that make zeros, as they appear in a trace, in which ``torch.zeros`` is another function."""


def _check_batch(batch: Any, name: str) -> None:
    """Check that the tensor telling rows their graph is made of zeros."""
    if getattr(getattr(batch, "node", None), "target", None) not in _ZEROS:
        raise ModelError(f"{name}: batch must be torch.zeros(x.size(0), dtype=torch.long): all rows are of one graph")


_PLAIN: tuple[tuple[type, str, Any], ...] = (
    (InvertibleModule, "_fn_apply", _apply),
    (GroupAddRev, "_forward", _add_reversibly),
    (GPSConv, "forward", _gps),
    *(((SGModule, "forward", _sgformer), (Polynormer, "forward", _polynormer)) if len(GLOBAL_ATTENTIONS) > 1 else ()),
)


# ---- global attention -----------------------------------------------------------------------------------------------


_EPSILON = 1e-6


def lower_global_attention(attention: nn.Module, where: str, x: Value, assembly: Assembly) -> Value:
    """Return what a global attention gives for all rows as one graph."""
    if isinstance(attention, PerformerAttention):
        return _performer_attention(attention, where, x, assembly)
    lower = _polynormer_attention if isinstance(attention, PolynormerAttention) else _sgformer_attention
    return lower(attention, where, x, assembly)


def _performer_attention(attention: Any, where: str, x: Value, assembly: Assembly) -> Value:
    """Lower PerformerAttention. Its keys are several times as wide as values, so they are recomputed from narrow ones
    wherever they are needed."""
    heads, channels, projection = attention.heads, attention.head_channels, attention.fast_attn
    if [*getattr(projection.kernel, "parameters", list)()]:
        raise ModelError(f"{where}: a kernel with parameters is not supported")
    maps = (attention.q, attention.k, attention.v)

    def mapped(rows: Tensor) -> Tensor:
        return torch.cat([one(rows) for one in maps], dim=1)

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.view(len(rows), 3, heads, channels).permute(1, 2, 0, 3).unbind()

    def keys(rows_HRC: Tensor) -> Tensor:
        found: Tensor = generalized_kernel(rows_HRC[None], projection.projection_matrix, projection.kernel)[0]
        return found

    def total(rows: Tensor) -> Tensor:
        _, k_HRC, v_HRC = split(rows)
        k_HRM = keys(k_HRC)
        return torch.cat([(k_HRM.transpose(1, 2) @ v_HRC).flatten(), k_HRM.sum(dim=1).flatten()])

    def attended(rows: Tensor, sums: Tensor) -> Tensor:
        q_HRM, of_keys = keys(split(rows)[0]), heads * projection.num_rows
        kv_HMC, k_HM1 = sums[:-of_keys].view(heads, -1, channels), sums[-of_keys:].view(heads, -1, 1)
        found_HRC = q_HRM @ kv_HMC / (q_HRM @ k_HM1)
        return found_HRC.transpose(0, 1).reshape(len(rows), -1)

    inner = _KEYS_AT_ONCE * heads * projection.num_rows
    source = assembly.rowwise(where, mapped, [x], _parameters(*maps), heavy=True)
    sums = assembly.total(where, [source], total, inner_columns=inner)
    found = assembly.rowwise(where, attended, [source], moments=[sums], inner_columns=inner)
    out = assembly.rowwise(where, attention.attn_out, [found], _parameters(attention.attn_out), heavy=True)
    return assembly.dropout(out, float(attention.dropout.p)) if attention.dropout.training else out


_KEYS_AT_ONCE = 3
"""Copies of the keys at a time: as projected, as the kernel gives them, and as used."""


def _parameters(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def _sgformer_attention(attention: Any, where: str, x: Value, assembly: Assembly) -> Value:
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

    source = assembly.rowwise(where, mapped, [x], _parameters(*maps), heavy=True)
    return assembly.rowwise(where, attended, [source], moments=[assembly.total(where, [source], total)])


def _direction(rows_RHM: Tensor) -> Tensor:
    rows = torch.where(rows_RHM == 0, rows_RHM.new_tensor(_EPSILON), rows_RHM)
    found: Tensor = rows / torch.linalg.norm(rows, ord=2, dim=-1, keepdim=True)
    return found


def _polynormer_attention(attention: Any, where: str, x: Value, assembly: Assembly) -> Value:
    """Lower PolynormerAttention, which orders channels before heads, as in PyG."""
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

    source = assembly.rowwise(where, mapped, [x], _parameters(attention.k, attention.v, *of_query), heavy=True)
    found = assembly.rowwise(where, attended, [source], moments=[assembly.total(where, [source], total)])
    after = _parameters(attention.lns, attention.h_lins, attention.lin_out)
    out = assembly.rowwise(where, mixed, [found, x], after, heavy=True)
    return assembly.dropout(out, float(attention.dropout.p)) if attention.dropout.training else out
