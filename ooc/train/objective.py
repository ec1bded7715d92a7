# SPDX-License-Identifier: Apache-2.0
"""What the network's outputs are for: the loss of the training rows and the scores of every split.

Shapes: R rows of a tile, r of them wanted, C outputs, L label columns. The stages hand over a tile's outputs and
get the gradient back; nothing here knows how outputs are computed. Tiles are computed on any thread; what they
add is reduced in a fixed order, so that sums are the same to the bit whatever the plan.
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
"""Of a split: rows and their labels picked, these looked at, and rows put back."""
_COUNTING_OPERATORS = 3


class Objective:
    """The loss and the scores of one trainer, and what they have come to so far.

    On a device ``count_split_rows`` once, beforehand; ``begin`` before a program, ``gradient`` and ``score`` for its
    tiles, ``reduce`` in order; then ``mean_loss`` and ``scores``, which have the host wait for what a device computes.
    """

    loss_inputs: tuple[str, ...] = ("y", "split/train")
    """What ``gradient`` needs of a tile."""
    score_inputs: tuple[str, ...] = ("y", *(f"split/{split}" for split in SPLITS))
    """What ``score`` needs of a tile."""
    score_operators = len(SPLITS) * (_PICKING_OPERATORS + _COUNTING_OPERATORS)
    """Operators that ``score`` runs, or that take as long."""

    def __init__(self, store: Store, loss: Loss, scorer: Scorer, *, tile_rows: int) -> None:
        self._targets, self._loss = Targets(store), loss
        self.gradient_operators = loss.operators + (_PICKING_OPERATORS if loss.of_tile is None else 0)
        """The same of ``gradient``."""
        self.scorer, self._space = scorer, "" if store.types is None else store.types.labelled
        self._loss_sum: Tensor | float = 0.0
        self._tile_rows = tile_rows
        self._counts: dict[str, npt.NDArray[np.int32]] = {}

    def memory_bytes(self, store: Store, *, on_device: bool) -> tuple[int, int]:
        """Host bytes and device bytes that it takes from the first tile to the last; ``on_device``: on a machine whose
        device has memory of its own."""
        if not on_device:
            return self.scorer.host_bytes, 0
        counts = len(SPLITS) * -(-store.num_nodes // self._tile_rows) * np.dtype(np.int32).itemsize
        return self.scorer.host_bytes + counts, self.scorer.device_bytes

    def count_split_rows(self, store: Store) -> None:
        """Read how many rows of each split of ``store`` every tile has, a few tiles at a time, for four bytes a tile
        and split: on a device the host would have to wait for every tile to learn that."""
        height = self._tile_rows * -(-_CHUNK_ROWS // self._tile_rows)
        for split in SPLITS:
            counts = []
            for _, member_R in store.array(f"split/{split}").blocks(height):
                tiles = range(0, len(member_R), self._tile_rows)
                counts.append(np.add.reduceat(member_R, tiles, dtype=np.int32))
            self._counts[split] = np.concatenate(counts)

    def rows_of(self, split: str, start: int, member_R: Tensor) -> Tensor:
        """Rows [r] of the tile that begins with row ``start`` which belong to a split."""
        if member_R.device.type == "cpu":
            return member_R.nonzero().squeeze(1)
        count = int(self._counts[split][start // self._tile_rows])
        return torch.nonzero_static(member_R, size=count).squeeze(1)

    def begin(self) -> None:
        """Forget the last program's loss and scores."""
        self._loss_sum = 0.0
        self._targets.begin()
        self.scorer.begin()

    def rehearse(self, dtype: torch.dtype) -> None:
        """Have a loop that computes the loss of outputs of this type compiled, if one does."""
        if self._loss.of_tile is not None:
            self._loss.of_tile(torch.zeros(1, 1, dtype=dtype), torch.zeros(1), torch.ones(1, dtype=torch.bool))

    def gradient(self, tile: Tile, outputs_RC: Tensor) -> Tensor:
        """The gradient [R, C] of the mean loss with respect to a tile's outputs."""
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
        """Count or collect what a tile's outputs say about its labels."""
        for split in SPLITS:
            rows = self.rows_of(split, tile.start, tile.inputs[f"split/{split}"][:, 0])
            if rows.numel():
                labels = self._targets.of(split, tile.inputs["y"], rows, outputs=outputs_RC)
                tally = self.scorer.of_rows(tile.start + rows, outputs_RC[rows], labels)
                if tally is not None:
                    tile.scores[split] = tally

    def reduce(self, tile: Tile) -> None:
        """Add what a tile came to."""
        self._loss_sum = self._loss_sum + tile.loss
        for split, tally in tile.scores.items():
            self.scorer.add(split, tally)

    def mean_loss(self) -> float:
        """The loss over all training rows, when all tiles are reduced; StoreError if one of them has no label."""
        self._targets.refuse_damaged()
        return float(self._loss_sum) / self._loss.divisor

    def scores(self, exchange: Exchange | None = None) -> dict[str, float | None]:
        """The metric by split, when all tiles are reduced; None where it is not defined (an empty split). ``exchange``:
        with the processes that have the other rows.

        StoreError if a row of a split has no label.
        """
        self._targets.refuse_damaged()
        if exchange is not None and self.scorer.outputs is not None:
            exchange.have_all(torch.from_numpy(self.scorer.outputs), self._space)
        return self.scorer.scores()


def no_objective(store: Store, outputs: int) -> Objective:
    """What the stages are given where nothing is scored."""

    def nothing(outputs_rC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("nothing is trained")

    return Objective(store, Loss(nothing, 1.0), Scorer(Metric.ACCURACY, outputs), tile_rows=1)
