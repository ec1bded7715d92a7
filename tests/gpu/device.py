# SPDX-License-Identifier: Apache-2.0
"""Where the kernels of these tests run, and tensors there: compiled on a GPU, or interpreted on the processor."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ooc.kernels.cuda.choice import Shape
from ooc.kernels.cuda.segments import cut
from ooc.kernels.edges import TileEdges

pytest.importorskip("triton", reason="kernels for the GPU need triton: pip install -r requirements.gpu.txt")
from ooc.kernels.cuda import dropout, edge_function, edge_terms, gat, launch, maximum, sums

__all__ = [
    "DEVICE",
    "EXAMPLES",
    "INTERPRETED",
    "MOST",
    "cut",
    "dropout",
    "edge_function",
    "edge_terms",
    "gat",
    "launch",
    "maximum",
    "same_bits",
    "shapes",
    "sized",
    "sums",
    "there",
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

EXAMPLES = 6 if INTERPRETED else 24
"""The interpreter takes about a hundredth of a second a program; for a GPU, most examples are compiled first."""

MOST = st.sampled_from([2, 5, 64])
"""Edges of a segment."""


@st.composite
def shapes(draw: st.DrawFn, *, columns: int | None = None) -> Shape:
    """Any shape; ``columns`` where a program needs so many."""
    rows, unroll = draw(st.sampled_from([2, 8])), draw(st.sampled_from([1, 2]))
    width = draw(st.sampled_from([4, 16])) if columns is None else columns
    return Shape(rows, width, unroll, draw(st.sampled_from([1, 2, 4])))


def there(tile: TileEdges) -> TileEdges:
    """``tile`` where the kernels run."""
    return replace(tile, indices_E=tile.indices_E.to(DEVICE), offsets_R1=tile.offsets_R1.to(DEVICE))


def sized(
    pull: Callable[..., Any], *args: Any, most: int | None = None, shape: Shape | None = None, **named: Any
) -> Any:
    """What ``pull`` gives where rows are cut after ``most`` edges, and programs are of that shape."""
    with pytest.MonkeyPatch.context() as patched:
        if most is not None:
            patched.setattr(launch, "EDGES_PER_SEGMENT", most)
        if shape is not None:
            for module in (launch, edge_function):
                patched.setattr(module, "shape_for", lambda *asked: shape)
        return pull(*args, **named)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())
