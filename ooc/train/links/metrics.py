# SPDX-License-Identifier: Apache-2.0
"""Metrics of link prediction: mean reciprocal rank, hits at K, area under the ROC curve, average precision.

As OGB's evaluators define them (Hu et al., "Open Graph Benchmark", NeurIPS 2020). The rank of a link among its own
negatives counts a negative with the same score as half a place. Hits among negatives shared by all links are links that
score higher than the K-th best negative.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ooc.engine.exchange import Exchange
from ooc.engine.session import Prepared
from ooc.errors import OptionError
from ooc.model.layers.links import LinkScores
from ooc.plan.workload import Direction
from ooc.train.links.drawn import LinkArray, ReversedLinks
from ooc.train.links.sets import Ends, Ints
from ooc.train.metrics import RANKING_BYTES, Metric, average_precision, roc_auc

Scores = npt.NDArray[np.floating]

_SIDE = Direction.SCORED_LINKS
_OF_ALL = {Metric.ROC_AUC.value: roc_auc, Metric.AVERAGE_PRECISION.value: average_precision}
NO_TAIL = -1
"""The number in place of a missing tail, against which no link is ranked."""


@dataclass(frozen=True, slots=True)
class LinkMetric:
    """A metric: ``value`` is its name; ``hits`` the K of hits@K."""

    value: str
    hits: int = 0
    higher_is_better = True

    @property
    def of_all(self) -> Callable[[Scores, npt.NDArray[np.bool_]], float | None] | None:
        """Whether the metric depends on links and negatives together, whichever belongs to whom."""
        return _OF_ALL.get(self.value)

    @classmethod
    def of(cls, name: str) -> "LinkMetric":
        """Return the metric of this name; raise OptionError for an unknown one."""
        kind, _, number = name.partition("@")
        if name == "mrr" or name in _OF_ALL:
            return cls(name)
        if kind == "hits" and number.isdecimal() and int(number):
            return cls(name, int(number))
        raise OptionError(f"metric {name!r} of links is not one of mrr, hits@K, {', '.join(_OF_ALL)}")

    def of_shared(self, positive_E: Scores, negative_M: Scores) -> float | None:
        """Return the metric of links against negatives shared by all; None where there are none, NaN where a score is
        NaN."""
        if not len(negative_M):
            return None
        if np.isnan(positive_E).any() or np.isnan(negative_M).any():
            return math.nan
        if self.of_all:
            is_link = np.arange(len(positive_E) + len(negative_M)) < len(positive_E)
            return self.of_all(np.concatenate((positive_E, negative_M)), is_link)
        if self.hits > len(negative_M):
            return 1.0
        if self.hits:
            return float((positive_E > np.partition(negative_M, -self.hits)[-self.hits]).mean())
        ascending = np.sort(negative_M)
        places_E = np.searchsorted(ascending, positive_E) + np.searchsorted(ascending, positive_E, side="right")
        return float((1 / (len(ascending) - 0.5 * places_E + 1)).mean())

    def total_of_own(self, scores_EK: Scores) -> float:
        """Return the sum over links of what is averaged, with each link in the first column and its own negatives
        beside it.

        NaN stands for a missing negative. The sum is NaN where a link's own score is.
        """
        positive_E1, negative_EK = scores_EK[:, :1], scores_EK[:, 1:]
        if np.isnan(positive_E1).any():
            return math.nan
        better = (negative_EK > positive_E1).sum(axis=1) + (negative_EK >= positive_E1).sum(axis=1)
        rank_E = 0.5 * better + 1
        return float((rank_E <= self.hits).sum() if self.hits else (1 / rank_E).sum())


@dataclass(frozen=True, slots=True)
class Ranked:
    """The links [3, E] of a split and what they are ranked against, as rows of the store.

    That is pairs [3, M], or tails [n, K] for each link, by the links' numbers, possibly ``NO_TAIL``.
    """

    links_3E: Ints
    shared_3M: Ints | None = None
    own: "Callable[[Ints], Ints] | None" = None
    each: int = 0
    """The number of tails per link, K."""


_UNITS_AT_ONCE, _SCORES_AT_ONCE = 1 << 12, 1 << 17
"""Links that are written or ranked at a time, and their scores, each with its own negatives."""


def pairs_at_once(one: Ranked) -> int:
    """Return the most pairs of a split that are written or ranked at a time."""
    return min(len(one.links_3E[0]) * (1 + one.each), max(_SCORES_AT_ONCE, 1 + one.each))


class LinkScorer:
    """The scorer of links. ``splits``: the scored links, as a topology of ``store`` in files of ``folder``.

    Links are sorted by heads, each followed by its own negatives; ``reversible``: also by tails, if needed. Only their
    scores are kept, NaN for what is no pair. ``ends``: the nodes that links lead from and to.
    """

    def __init__(
        self,
        metric: LinkMetric,
        splits: Mapping[str, Ranked],
        ends: Ends,
        folder: Path,
        dtype: str,
        *,
        reversible: bool,
    ) -> None:
        self._metric, self._space = metric, next(iter(ends.types), "")
        parts = {(split, False): one for split, one in splits.items()}
        parts |= {(split, True): Ranked(one.shared_3M) for split, one in splits.items() if one.shared_3M is not None}
        none = np.zeros((3, 0), np.int64)
        head_U, tail_U, kind_U = np.concatenate([none, *(one.links_3E for one in parts.values())], axis=1)
        order = np.argsort(head_U, kind="stable")
        counts = [one.links_3E.shape[1] for one in parts.values()]
        sizes = np.repeat(np.array([1 + one.each for one in parts.values()], np.int64), counts)
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        units_of = dict(zip(parts, pairwise(accumulate(counts, initial=0)), strict=True))
        self._starts = {part: starts[first:last] for part, (first, last) in units_of.items()}
        self._each = {split: one.each for split, one in splits.items()}
        self._scores: Scores = np.zeros(int(sizes.sum()), dtype=dtype)
        by_head = np.concatenate(([0], np.cumsum(sizes[order])))
        offsets = by_head[np.searchsorted(head_U[order], np.arange(ends.heads + 1))]
        index = np.int32 if ends.tails <= 2**31 else np.int64
        made = {"indptr": LinkArray(folder, _SIDE, "indptr", ends.heads + 1, np.int64)}
        made["indices"] = LinkArray(folder, _SIDE, "indices", len(self._scores), index)
        made["edge_weight"] = LinkArray(folder, _SIDE, "edge_weight", len(self._scores), np.float32)
        if ends.relations:
            made["edge_features"] = LinkArray(folder, _SIDE, "edge_features", len(self._scores), np.float32)
        made["indptr"].put(0, offsets)
        self._at_once = max(1, min(_UNITS_AT_ONCE, _SCORES_AT_ONCE // (1 + max(self._each.values(), default=0))))
        for first in range(0, len(order), self._at_once):
            units = order[first : first + self._at_once]
            written = np.empty(int(sizes[units].sum()), dtype=np.int64)
            at = starts[units] - by_head[first]
            written[at] = tail_U[units]
            for part, one in parts.items():
                start, stop = units_of[part]
                mine = (units >= start) & (units < stop)
                if one.own is not None and mine.any():
                    places = at[mine][:, None] + np.arange(1, 1 + one.each)
                    written[places] = one.own(units[mine] - start)
            if ends.relations:
                made["edge_features"].put(int(by_head[first]), np.repeat(kind_U[units], sizes[units]))
            is_nobody = written == NO_TAIL
            made["indices"].put(int(by_head[first]), np.where(is_nobody, 0, written))
            made["edge_weight"].put(int(by_head[first]), np.where(is_nobody, np.float32(np.nan), np.float32(0)))
        self.arrays: dict[str, LinkArray] = {array.name: array for array in made.values()}
        self._reversed: ReversedLinks | None = None
        if reversible:
            self._reversed = ReversedLinks(folder, Direction.SCORED_LINKS_REVERSED, made["indices"], ends.tails)
            self.arrays |= self._reversed.arrays
        ranking = RANKING_BYTES if self._metric.of_all else 3 * self._scores.itemsize
        shared = sum(len(starts) for (split, _), starts in self._starts.items() if not self._each[split])
        ranked = len(self._scores) if self._metric.of_all else shared
        at_once = (
            min(self._at_once, len(self._starts[split, False])) * (1 + each) for split, each in self._each.items()
        )
        held = sum(starts.nbytes for starts in self._starts.values()) + self._scores.nbytes
        reversing = 0 if self._reversed is None else self._reversed.nbytes
        self.nbytes = held + max(ranked * ranking + 16 * max(at_once, default=0), reversing)
        """Bytes of host memory that it takes from the first epoch to the last."""

    def attach(self, prepared: Prepared) -> None:
        """Make the evaluation's decoder store its scores here, and provide the links by their tails if it needs
        them."""
        scored, offsets = prepared.network.evaluation, prepared.builder.rows.offsets[_SIDE]
        assert isinstance(scored, LinkScores)
        scored.scores, scored.offsets, self._offsets = self._scores, offsets, offsets
        if Direction.SCORED_LINKS_REVERSED in prepared.plan.topologies:
            assert self._reversed is not None
            self._reversed.fill(offsets)

    def gather(self, exchange: Exchange) -> None:
        """Receive the scores of links whose heads are other processes' rows."""
        exchange.have_all(torch.from_numpy(self._scores), self._space, self._offsets)

    def given(self, split: str, numbers: Ints) -> Scores:
        """Return the scores of a split's links, without negatives, by their numbers."""
        found: Scores = self._scores[self._starts[split, False][numbers]]
        return found

    def scores(self) -> dict[str, float | None]:
        """Return the metric by split."""
        return {split: self._score(split, each) for split, each in self._each.items()}

    def _score(self, split: str, each: int) -> float | None:
        starts = self._starts[split, False]
        if not each:
            return self._metric.of_shared(self._scores[starts], self._scores[self._starts[split, True]])
        columns = np.arange(1, 1 + each)
        if self._metric.of_all:
            negative = self._scores[starts[:, None] + columns].reshape(-1)
            return self._metric.of_shared(self._scores[starts], negative[~np.isnan(negative)])
        total = 0.0
        for first in range(0, len(starts), self._at_once):
            total += self._metric.total_of_own(
                self._scores[starts[first : first + self._at_once, None] + np.arange(1 + each)]
            )
        return total / len(starts)
