# SPDX-License-Identifier: Apache-2.0
"""What keys the masks of dropout, on rows and on edges, and their drawing by the CPU; a GPU draws the same numbers
(``ooc.kernels.cuda.dropout``).

The generators are Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), pure functions of a
key and a counter. Rows take NumPy's: the key is (seed, epoch, layer), and every row has its own range of counters.
Edges take that of ``edge_dropout``.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.kernels.dropout.edges import EdgeDropout

_DRAWS_PER_COUNT = 8
"""32-bit numbers that Philox4x64 gives for one value of its counter."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Dropout of probability ``p`` from row ``row_start`` on. ``layer`` 0 is dropout on the input features, ``k`` the
    k-th dropout of the model, in the order of its forward."""

    seed: int
    epoch: int
    layer: int
    row_start: int
    p: float

    @property
    def key(self) -> int:
        """The generator's, of 128 bits."""
        return (self.seed & (2**64 - 1)) | (self.epoch & (2**48 - 1)) << 64 | (self.layer & (2**16 - 1)) << 112

    @property
    def threshold(self) -> int:
        """Below which of the 32-bit numbers an entry is dropped."""
        return min(round(self.p * 2**32), 2**32 - 1)

    def mask(self, rows: int, columns: int) -> Tensor:
        """Bool [rows, columns], on the CPU: which entries are kept."""
        return torch.from_numpy(self._numbers(rows, columns) >= np.uint32(self.threshold))

    def _numbers(self, rows: int, columns: int) -> npt.NDArray[np.uint32]:
        """Uniform 32-bit numbers [rows, columns], the same for a row whatever rows are drawn with it."""
        counts = -(-columns // _DRAWS_PER_COUNT)
        # The full range of 64 bits is the raw stream; unlike random_raw, this way of asking for it frees the
        # interpreter.
        generator = np.random.Generator(np.random.Philox(key=self.key, counter=self.row_start * counts))
        raw = generator.integers(0, 2**64 - 1, rows * counts * 4, dtype=np.uint64, endpoint=True)
        return raw.astype("<u8", copy=False).view("<u4").reshape(rows, counts * _DRAWS_PER_COUNT)[:, :columns]


@dataclass(frozen=True, slots=True)
class EdgeDraw:
    """Dropout of ``columns`` columns for edges between these rows of the store, E of them in no order, each of which
    ``repeats_E`` before it have the same two ends; all int64. A node is the edge from it to itself."""

    dropout: EdgeDropout
    targets_E: Tensor
    sources_E: Tensor
    repeats_E: Tensor
    columns: int

    def mask(self) -> Tensor:
        """Bool [E, columns], by the CPU: which entries are kept."""
        rows = self.targets_E.numpy(), self.sources_E.numpy(), self.repeats_E.numpy().astype(np.uint32)
        return self.dropout.keep(*rows, range(self.columns))
