# SPDX-License-Identifier: Apache-2.0
"""Masks of dropout are the processor's, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.kernels.dropout import opaque as draws
from ooc.kernels.dropout.edges import EdgeDropout, keep_edges
from ooc.kernels.dropout.rows import BY_DEVICE, Draw
from tests.gpu.device import DEVICE, EXAMPLES, same_bits

pytestmark = pytest.mark.gpu


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    epoch=st.integers(0, 2**48 - 1),
    layer=st.integers(0, 2**16 - 1),
    start=st.integers(0, 2**40),
    rows=st.integers(0, 20),
    columns=st.integers(0, 20),
    p=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
)
@settings(max_examples=10 * EXAMPLES, deadline=None)
def test_masks(seed: int, epoch: int, layer: int, start: int, rows: int, columns: int, p: float) -> None:
    """Whatever the key, the rows, and columns that are no multiple of what a count gives."""
    found = BY_DEVICE["cuda"](Draw(seed, epoch, layer, start, p), torch.zeros(rows, columns, device=DEVICE))
    assert found.dtype == torch.bool
    assert same_bits(found, Draw(seed, epoch, layer, start, p).mask(rows, columns))


def test_a_matrix_of_several_programs() -> None:
    found = BY_DEVICE["cuda"](Draw(3, 4, 5, 70, 0.4), torch.zeros(300, 17, device=DEVICE))
    assert same_bits(found, Draw(3, 4, 5, 70, 0.4).mask(300, 17))
    assert 0.55 < found.float().mean() < 0.65


@given(
    edges=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 9)), max_size=80),
    columns=st.integers(1, 9),
    dropout=st.builds(EdgeDropout, st.sampled_from([0.3, 0.9, 1.0]), st.integers(-9, 9), st.integers(0, 9), st.just(2)),
)
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_masks_inside_of_layers(edges: list[tuple[int, int, int]], columns: int, dropout: EdgeDropout) -> None:
    """Of several programs or none, in any order."""
    ends = torch.tensor(edges, dtype=torch.int64).view(-1, 3)
    expected = keep_edges(dropout, *ends.t(), columns)
    found = draws.BY_DEVICE["cuda"](dropout, *ends.t().contiguous().to(DEVICE), columns)
    assert found.dtype == torch.bool
    assert same_bits(found, expected)
