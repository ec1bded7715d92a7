# SPDX-License-Identifier: Apache-2.0
"""What tiles ask of torch dozens of times: the same by shorter ways."""

import pytest
import torch

from ooc.kernels.tensors import largest_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 47])
def test_the_largest_columns_are_torch_s(columns: int, dtype: torch.dtype) -> None:
    """The first of several, where there are NaN or infinities, too, and of rows that do not lie together."""
    rows = torch.randint(-3, 4, (200, columns), generator=torch.Generator().manual_seed(columns)).to(dtype)
    rows[3], rows[4, columns // 2], rows[5, -1], rows[6] = torch.nan, torch.nan, torch.inf, -torch.inf
    assert torch.equal(largest_columns(rows), rows.argmax(dim=1))
    assert torch.equal(largest_columns(rows[::2]), rows[::2].argmax(dim=1))
    assert largest_columns(rows[:0]).shape == (0,)
