# SPDX-License-Identifier: Apache-2.0
"""Forwards of PyG that a trace cannot follow, written so that it can: they give the same for one graph.

``GroupAddRev`` has a backward of its own, which computes its input again from its output: the gradients are those of
its forward. ``SGFormer`` and ``Polynormer`` sort rows by the graph that they belong to, and ask for their number. What
these give is compared with what PyG's own give, on a small graph (``symbolic.Calls``).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models import GroupAddRev, Polynormer
from torch_geometric.nn.models.rev_gnn import InvertibleModule
from torch_geometric.nn.models.sgformer import SGModule

from ooc.errors import ModelError

GLOBAL_ATTENTIONS: tuple[type[nn.Module], ...] = (PolynormerAttention, SGFormerAttention)


@contextmanager
def plain_forwards() -> Iterator[None]:
    """Within it PyG's modules have these forwards."""
    with ExitStack() as stack:
        for kind, name, plain in _PLAIN:
            stack.enter_context(mock.patch.object(kind, name, plain))
        yield


def _apply(self: Any, args: tuple[Any, ...], fn: Any, fn_inverse: Any) -> Any:
    return fn(*args)


def _add_reversibly(self: Any, x: Any, edge_index: Any, *args: Any) -> Any:
    parts = torch.chunk(x, self.num_groups, dim=self.split_dim)
    rows = parts[1]
    for group in range(2, self.num_groups):
        rows = rows + parts[group]
    found = []
    for group, conv in enumerate(self.convs):
        rows = parts[group] + conv(rows, edge_index, *args)
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


def _attend(attention: Any, x: Any) -> Any:
    """As one batch."""
    return attention(x.unsqueeze(0)).squeeze(0)


_ZEROS = (torch.zeros, "new_zeros")
"""As a trace calls them, in which ``torch.zeros`` is another function."""


def _check_batch(batch: Any, name: str) -> None:
    """What tells rows their graph has to be made of zeros."""
    if getattr(getattr(batch, "node", None), "target", None) not in _ZEROS:
        raise ModelError(f"{name}: batch must be torch.zeros(x.size(0), dtype=torch.long): all rows are of one graph")


_PLAIN: tuple[tuple[type, str, Any], ...] = (
    (InvertibleModule, "_fn_apply", _apply),
    (GroupAddRev, "_forward", _add_reversibly),
    (SGModule, "forward", _sgformer),
    (Polynormer, "forward", _polynormer),
)
