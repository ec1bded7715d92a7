# SPDX-License-Identifier: Apache-2.0
"""Masks are a function of seed, epoch, layer, row and column alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ooc.kernels.dropout.rows import Draw, keep_scale


@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 40), st.integers(0, 30))
def test_a_row_is_the_same_whatever_rows_are_drawn_with_it(start: int, rows: int, columns: int, skip: int) -> None:
    whole = Draw(3, 7, 2, start, 0.4).mask(rows + skip, columns)
    assert torch.equal(Draw(3, 7, 2, start + skip, 0.4).mask(rows, columns), whole[skip:])


def test_draws_are_philox_s_own_stream() -> None:
    """Pins the masks: NumPy keeps its bit generators' streams from version to version."""
    raw = np.random.Philox(key=5 | 9 << 64 | 1 << 112, counter=0).random_raw(8 * 4).view(np.uint32).reshape(8, 8)
    assert np.array_equal(Draw(5, 9, 1, 0, 0.5).mask(8, 6).numpy(), raw[:, :6] >= 2**31)


def test_seed_epoch_and_layer_each_change_the_mask() -> None:
    masks = [Draw(*key, 0, 0.5).mask(64, 64) for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]]
    for i, mask in enumerate(masks):
        assert all((mask != other).float().mean() > 0.4 for other in masks[:i])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    scale = keep_scale(0, 0, 1, 0, torch.empty(2000, 50, dtype=dtype), p)
    assert scale.dtype is dtype
    assert scale.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)] if p else [1.0])
    assert scale.mean().item() == pytest.approx(1.0, abs=0.04)
