# SPDX-License-Identifier: Apache-2.0
"""GCN's normalisation by the degrees of the whole graph, for batches that contain only some of a node's edges.

``GCNConv`` takes degrees from the edges it is given. In a batch these are the sampled ones, and the outermost nodes
have none. Even with all neighbours sampled, its results would differ from the full graph's, and the trained function
from the scored one. Here an edge from j to i has its weight in the full graph, times the in-degree of i over the number
of its in-edges that were sampled. That is exact with all neighbours, and otherwise correct in expectation.

n nodes and e edges of a batch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, MessagePassing

from ooc.errors import ModelError
from ooc.model.graph import AnyScaling, RowScaling
from ooc.model.layers.sums import normalization_of

_ARGUMENTS = ("x", "edge_index", "edge_weight")


class GcnNormalization:
    """The normalisation for each ``GCNConv`` in ``model``; ``scalings`` [N] are None where only sizes are asked for.

    Raises ModelError for another layer that takes degrees from its edges.
    """

    def __init__(self, model: nn.Module, scalings: Mapping[AnyScaling, RowScaling | None]) -> None:
        self.scalings = scalings
        self._convs = [m for m in model.modules() if isinstance(m, GCNConv) and m.normalize]
        for module in model.modules():
            if isinstance(module, MessagePassing) and not isinstance(module, GCNConv) and _normalizes(module):
                raise ModelError(
                    f"{type(module).__name__} takes degrees of the edges it is given, which in a batch are some of "
                    "them; train it on the full graph"
                )

    @contextmanager
    def applied(
        self, rows_n: Tensor, degrees_n: Tensor, edge_index: Tensor, edge_weight: Tensor | None
    ) -> Iterator[None]:
        """Within this context the model may be given a batch of rows ``rows_n``, whose in-degrees are ``degrees_n``.

        On the meta device only sizes are right. There, ModelError is raised for a layer that is given other edges or
        weights than these, or whose normalisation is not among those of the outputs.
        """
        if not self._convs:
            yield
            return
        share_n = torch.empty_like(degrees_n)
        if not edge_index.is_meta:
            share_n = degrees_n / torch.bincount(edge_index[1], minlength=len(rows_n)).clamp_(min=1)
        own = {one.untyped_storage()._cdata for one in (edge_index, edge_weight) if one is not None}
        handles = [
            conv.register_forward_pre_hook(self._hook(rows_n, share_n, own), with_kwargs=True) for conv in self._convs
        ]
        try:
            for conv in self._convs:
                conv.normalize = False
            yield
        finally:
            for conv, handle in zip(self._convs, handles, strict=True):
                conv.normalize = True
                handle.remove()

    def _hook(self, rows_n: Tensor, share_n: Tensor, own: set[int]) -> Callable[..., Any]:
        def normalize(conv: GCNConv, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            arguments: dict[str, Any] = dict(zip(_ARGUMENTS, given, strict=False)) | named
            x, edge_index, weight_e = arguments["x"], arguments["edge_index"], arguments.get("edge_weight")
            kind = normalization_of(conv, weighted=weight_e is not None)
            if x.is_meta:
                are_own = own.issuperset(
                    one.untyped_storage()._cdata for one in (edge_index, weight_e) if one is not None
                )
                if not are_own or kind not in self.scalings:
                    what = "adds nothing to the outputs" if are_own else "normalizes edges or weights that are computed"
                    raise ModelError(f"GCNConv {what}, which in a batch is not supported; train it on the full graph")
                edges = edge_index.shape[1] + len(x)
                return (x, edge_index.new_empty(2, edges), x.new_empty(edges)), {}
            scaling = self.scalings[kind]
            assert scaling is not None, "of what is computed"
            return (x, *_normalized(scaling, rows_n[: len(x)], share_n, edge_index, weight_e)), {}

        return normalize


def _normalized(
    scaling: RowScaling, rows_n: Tensor, share_n: Tensor, edge_index: Tensor, weight_e: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the edges with self-loops, and the weight of each."""
    assert scaling.scale_N1 is not None
    scale_n = scaling.scale_N1[rows_n, 0]
    source_e, target_e = edge_index
    found_e = scale_n[source_e] * (scale_n * share_n[: len(rows_n)].to(scale_n.dtype))[target_e]
    if weight_e is not None:
        found_e = found_e * weight_e.to(found_e.dtype)
    if not scaling.self_term:
        return edge_index, found_e
    loops_n = scale_n.square()
    if scaling.self_N1 is not None:
        loops_n = loops_n * scaling.self_N1[rows_n, 0]
    own = torch.arange(len(rows_n)).expand(2, -1)
    return torch.cat([edge_index, own], dim=1), torch.cat([found_e, loops_n])


def _normalizes(layer: MessagePassing) -> bool:
    """Return whether the layer calls PyG's ``gcn_norm`` or ``get_laplacian``."""
    code = getattr(type(layer).forward, "__code__", None)
    names = () if code is None else code.co_names
    return ("gcn_norm" in names and bool(getattr(layer, "normalize", True))) or "get_laplacian" in names
