# SPDX-License-Identifier: Apache-2.0
"""The use of the network's outputs: the loss of the training rows and the scores of every split.

Shapes: R rows of a tile, r of them in a split, C outputs, L label columns. Stages pass a tile's outputs and get the
gradient back; nothing here depends on how outputs are computed. Tiles are computed on any thread. Their contributions
are reduced in a fixed order, so that sums have the same bits whatever the plan.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ooc.engine.exchange import Exchange
from ooc.model.task import Targets
from ooc.stages import Tile
from ooc.storage.store import SPLITS, Store
from ooc.train.loss import Loss
from ooc.train.metrics import Metric, Scorer

_CHUNK_ROWS = 1 << 16
"""Rows of a split that are read at a time."""
_PICKING_OPERATORS = 11
"""Operators per split: selecting rows and their labels, checking these, and putting rows back."""
_COUNTING_OPERATORS = 3


class Objective:
    """The loss and the scores of one trainer, with their sums so far.

    On a device, call ``count_split_rows`` once beforehand. Call ``begin`` before a program, ``gradient`` and ``score``
    for its tiles, ``reduce`` in order; then ``mean_loss`` and ``scores``, which wait for what a device computes.
    """

    loss_inputs: tuple[str, ...] = ("y", "split/train")
    """The matrices that ``gradient`` needs of a tile."""
    score_inputs: tuple[str, ...] = ("y", *(f"split/{split}" for split in SPLITS))
    """The matrices that ``score`` needs of a tile."""
    score_operators = len(SPLITS) * (_PICKING_OPERATORS + _COUNTING_OPERATORS)
    """Operators that ``score`` runs, or that take as long."""

    def __init__(self, store: Store, loss: Loss, scorer: Scorer, *, tile_rows: int) -> None:
        self._targets, self._loss = Targets(store), loss
        self.gradient_operators = loss.operators + (_PICKING_OPERATORS if loss.of_tile is None else 0)
        """Operators that ``gradient`` runs, or that take as long."""
        self.scorer, self._space = scorer, "" if store.types is None else store.types.labelled
        self._loss_sum: Tensor | float = 0.0
        self._tile_rows = tile_rows
        self._counts: dict[str, npt.NDArray[np.int32]] = {}

    def memory_bytes(self, store: Store, *, on_device: bool) -> tuple[int, int]:
        """Return the host bytes and device bytes it takes throughout; ``on_device``: on a device with its own
        memory."""
        if not on_device:
            return self.scorer.host_bytes, 0
        counts = len(SPLITS) * -(-store.num_nodes // self._tile_rows) * np.dtype(np.int32).itemsize
        return self.scorer.host_bytes + counts, self.scorer.device_bytes

    def count_split_rows(self, store: Store) -> None:
        """Read how many rows of each split of ``store`` every tile has, a few tiles at a time, 4 bytes per tile and
        split.

        A device would otherwise make the host wait for every tile.
        """
        height = self._tile_rows * -(-_CHUNK_ROWS // self._tile_rows)
        for split in SPLITS:
            counts = []
            for _, member_R in store.array(f"split/{split}").blocks(height):
                tiles = range(0, len(member_R), self._tile_rows)
                counts.append(np.add.reduceat(member_R, tiles, dtype=np.int32))
            self._counts[split] = np.concatenate(counts)

    def rows_of(self, split: str, start: int, member_R: Tensor) -> Tensor:
        """Return the rows [r] of the tile that begins with row ``start`` which belong to a split."""
        if member_R.device.type == "cpu":
            return member_R.nonzero().squeeze(1)
        count = int(self._counts[split][start // self._tile_rows])
        return torch.nonzero_static(member_R, size=count).squeeze(1)

    def begin(self) -> None:
        """Reset the loss and the scores."""
        self._loss_sum = 0.0
        self._targets.begin()
        self.scorer.begin()

    def rehearse(self, dtype: torch.dtype) -> None:
        """Compile the loop that computes the loss of outputs of this dtype, if there is one."""
        if self._loss.of_tile is not None:
            self._loss.of_tile(torch.zeros(1, 1, dtype=dtype), torch.zeros(1), torch.ones(1, dtype=torch.bool))

    def gradient(self, tile: Tile, outputs_RC: Tensor) -> Tensor:
        """Return the gradient [R, C] of the mean loss with respect to a tile's outputs."""
        if self._loss.of_tile is not None and outputs_RC.device.type == "cpu":
            found = self._loss.of_tile(outputs_RC, tile.inputs["y"][:, 0], tile.inputs["split/train"][:, 0])
            if found is not None:
                tile.loss, gradient_RC = found
                return gradient_RC
        rows = self.rows_of("train", tile.start, tile.inputs["split/train"][:, 0])
        gradient_RC = torch.zeros_like(outputs_RC)
        if rows.numel():
            labels = self._targets.of("train", tile.inputs["y"], rows, outputs=outputs_RC)
            total, gradient_rC = self._loss.gradient(outputs_RC[rows], labels)
            tile.loss = total.double()
            gradient_RC[rows] = gradient_rC / self._loss.divisor
        return gradient_RC

    def score(self, tile: Tile, outputs_RC: Tensor) -> None:
        """Count or collect what a tile's outputs contribute to the scores."""
        for split in SPLITS:
            rows = self.rows_of(split, tile.start, tile.inputs[f"split/{split}"][:, 0])
            if rows.numel():
                labels = self._targets.of(split, tile.inputs["y"], rows, outputs=outputs_RC)
                tally = self.scorer.of_rows(tile.start + rows, outputs_RC[rows], labels)
                if tally is not None:
                    tile.scores[split] = tally

    def reduce(self, tile: Tile) -> None:
        """Add a tile's contributions."""
        self._loss_sum = self._loss_sum + tile.loss
        for split, tally in tile.scores.items():
            self.scorer.add(split, tally)

    def mean_loss(self) -> float:
        """Return the loss over all training rows, after all tiles are reduced; raise StoreError if one has no label."""
        self._targets.refuse_damaged()
        return float(self._loss_sum) / self._loss.divisor

    def scores(self, exchange: Exchange | None = None) -> dict[str, float | None]:
        """Return the metric by split, after all tiles are reduced; None where it is undefined (an empty split).

        ``exchange``: with the processes that have the other rows. StoreError if a row of a split has no label.
        """
        self._targets.refuse_damaged()
        if exchange is not None and self.scorer.outputs is not None:
            exchange.have_all(torch.from_numpy(self.scorer.outputs), self._space)
        return self.scorer.scores()


def no_objective(store: Store, outputs: int) -> Objective:
    """Return the objective of stages where nothing is scored."""

    def nothing(outputs_rC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("nothing is trained")

    return Objective(store, Loss(nothing, 1.0), Scorer(Metric.ACCURACY, outputs), tile_rows=1)
