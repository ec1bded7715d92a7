# SPDX-License-Identifier: Apache-2.0
"""What the network's outputs are for: the loss of the training rows and the scores of every split.

Shapes: R rows of a tile, r of them wanted, C outputs, L label columns. The stages hand over a tile's outputs and
get the gradient back; nothing here knows how outputs are computed. Tiles are computed on any thread; what they
add is committed in a fixed order, so that sums are the same to the bit whatever the plan.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ooc.storage.store import SPLITS, Task
from ooc.train.evaluation import Scorer
from ooc.train.loss import Loss
from ooc.train.metrics import Tally
from ooc.train.task import targets


@dataclass(slots=True)
class Contribution:
    """What one tile adds to the loss, and to the scores by split."""

    loss: Tensor | float = 0.0
    """float64; where it was computed, so that nobody waits for it."""
    scores: dict[str, Tally] = field(default_factory=dict)


class Members:
    """Which rows of a tile of ``tile_rows`` rows belong to a split.

    On a device their number has to come to the host, which waits for it. So it is kept from the first time on, four
    bytes a tile and split, and after that nobody waits.
    """

    def __init__(self, tile_rows: int) -> None:
        self._tile_rows = tile_rows
        self._counts: dict[str, array[int]] = {}

    def of(self, split: str, start: int, member_R: Tensor) -> tuple[Tensor, bool]:
        """Rows [r] of the tile that begins with row ``start``, and whether they were known."""
        if member_R.device.type == "cpu":
            return member_R.nonzero().squeeze(1), False
        counts, tile = self._counts.setdefault(split, array("i")), start // self._tile_rows
        if tile < len(counts) and counts[tile] >= 0:
            return torch.nonzero_static(member_R, size=counts[tile]).squeeze(1), True
        rows = member_R.nonzero().squeeze(1)
        counts.extend([-1] * (tile + 1 - len(counts)))
        counts[tile] = len(rows)
        return rows, False


class Objective:
    """The loss and the scores of one trainer, and what they have come to so far.

    ``begin`` before a program, ``gradient`` and ``score`` for its tiles, ``commit`` in order; then
    ``mean_loss`` and ``scores``.
    """

    loss_inputs = ("y", "split/train")
    """What ``gradient`` needs of a tile."""
    score_inputs = ("y", *(f"split/{split}" for split in SPLITS))
    """What ``score`` needs of a tile."""

    def __init__(self, task: Task, loss: Loss, scorer: Scorer, *, tile_rows: int) -> None:
        self._task = task
        self._loss = loss
        self._scorer = scorer
        self._loss_sum: Tensor | float = 0.0
        self._members = Members(tile_rows)

    def begin(self) -> None:
        """Forget the last program's loss and scores."""
        self._loss_sum = 0.0
        self._scorer.begin()

    def gradient(
        self, inputs: Mapping[str, Tensor], start: int, outputs_RC: Tensor, contribution: Contribution
    ) -> Tensor:
        """The gradient [R, C] of the mean loss with respect to a tile's outputs, of rows ``start``…"""
        rows, known = self._members.of("train", start, inputs["split/train"][:, 0])
        gradient_RC = torch.zeros_like(outputs_RC)
        if rows.numel():
            labels = targets(self._task, inputs["y"], rows, outputs=outputs_RC, sound=known)
            with torch.enable_grad():
                outputs_rC = outputs_RC[rows].requires_grad_()
                total = self._loss.total(outputs_rC, labels)
                (gradient_rC,) = torch.autograd.grad(total, outputs_rC)
            contribution.loss = total.detach().double()
            gradient_RC[rows] = gradient_rC / self._loss.divisor
        return gradient_RC

    def score(self, inputs: Mapping[str, Tensor], start: int, outputs_RC: Tensor, contribution: Contribution) -> None:
        """Count or collect what a tile's outputs, of rows ``start``…, say about its labels."""
        for split in SPLITS:
            rows, known = self._members.of(split, start, inputs[f"split/{split}"][:, 0])
            if rows.numel():
                labels = targets(self._task, inputs["y"], rows, outputs=outputs_RC, sound=known)
                tally = self._scorer.of_rows(start + rows, outputs_RC[rows], labels)
                if tally is not None:
                    contribution.scores[split] = tally

    def commit(self, contribution: Contribution) -> None:
        """Add what a tile came to."""
        self._loss_sum = self._loss_sum + contribution.loss
        for split, tally in contribution.scores.items():
            self._scorer.add(split, tally)

    def mean_loss(self) -> float:
        """The loss over all training rows, when all tiles are committed."""
        return float(self._loss_sum) / self._loss.divisor

    def scores(self) -> dict[str, float | None]:
        """The metric by split, when all tiles are committed; None where it is not defined (an empty split)."""
        return self._scorer.scores()
