# SPDX-License-Identifier: Apache-2.0
"""What a model of links is trained for: the loss of a step's links, and the scores of those that are held out."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ooc.engine.exchange import Exchange
from ooc.errors import OptionError
from ooc.model.layers.decoders import LinkPredictor, takes_kinds
from ooc.model.stages import Contribution, Tile
from ooc.storage.store import SPLITS, Store
from ooc.train.links.drawn import TrainingLinks
from ooc.train.links.ends import KNOWN_BYTES, KNOWN_BYTES_PER_PAIR, Ends, KnownLinks, Places
from ooc.train.links.metrics import LinkMetric, LinkScorer, pairs_at_once
from ooc.train.links.sets import Links, scored_links
from ooc.train.objective import Objective
from ooc.train.resources import Resources
from ooc.train.setup import Job, Saving, prepare

_BYTES_PER_PAIR = 16
"""Of those that are written together, to be scored."""


class LinkObjective(Objective):
    """The loss of links, which tiles have added up by their heads already, and the scores of others."""

    loss_inputs = ()
    score_inputs = ()
    score_operators = 0
    gradient_operators = 3

    def __init__(self, training: TrainingLinks | None, scorer: LinkScorer, ends: Ends) -> None:
        """``training`` None: nothing is trained. Links lead between such ``ends``."""
        self.divisor, self.nodes, self.ends = 1.0, ends.heads, ends
        self.training, self.scorer = training, scorer
        self._sum: Tensor | float = 0.0

    @classmethod
    def of(
        cls,
        links: Links,
        store: Store,
        folder: Path,
        *,
        metric: LinkMetric,
        negatives: int,
        seed: int,
        dtype: torch.dtype,
        resources: Resources,
    ) -> Self:
        """That of these links of a store, whose files are made in ``folder``; OptionError for links that are none."""
        if resources.on_device:
            raise OptionError("links are trained on the CPU; leave out device='cuda'")
        store.check_one_graph("link prediction", takes_types=True)
        ends = Ends.of(store, links.edge_type)
        places = Places(ends, resources.limits.memory_bytes)
        train_3E = places.edges() if links.train is None else places.rows("train", links.train)
        splits = [split for split in ("valid", "test") if getattr(links, split) is not None]
        known = None
        if links.filtered:
            held_out = [places.rows(split, getattr(links, split)) for split in splits]
            places.check(sum(pairs.shape[1] for pairs in (train_3E, *held_out)))
            known = KnownLinks(ends, [train_3E, *held_out])
        scored = {split: scored_links(ends, places, links, split, seed, known) for split in splits}
        pairs = max(map(pairs_at_once, scored.values()), default=0)
        of_known = 0 if known is None else KNOWN_BYTES + KNOWN_BYTES_PER_PAIR * pairs
        places.admit(_BYTES_PER_PAIR * pairs + of_known, f"writing {pairs:,} pairs to be scored")
        reversible = _are_known_both_ways(ends, resources)
        training = TrainingLinks(
            folder, ends, train_3E, negatives, seed, reversible=reversible, filtered=links.filtered
        )
        name = str(dtype).removeprefix("torch.")
        scorer = LinkScorer(metric, scored, ends, folder, name, reversible=reversible)
        return cls(training, scorer, ends)

    def prepared(
        self, model: nn.Module, store: Store, resources: Resources, *, savings: Collection[Saving], **given: Any
    ) -> Job:
        """Training ``model``, a ``LinkPredictor``, by it; other arguments as of ``prepare``. Rows that no link reaches
        are computed, too: it is not known which."""
        if isinstance(model, LinkPredictor) and takes_kinds(model.decoder) and not self.ends.relations:
            raise OptionError("the decoder tells types of edges apart, and links are of one; leave out relations=")
        trained = {} if self.training is None else self.training.arrays
        joined = store.joined_by(trained | self.scorer.arrays, neighbours=self.ends.tails)
        left = [saving for saving in savings if saving is not Saving.ACTIVE_ROWS]
        return prepare(model, joined, resources, savings=left, objective=self, outputs_of=self.ends.types, **given)

    def memory_bytes(self, store: Store, *, on_device: bool) -> tuple[int, int]:
        return self.scorer.nbytes + (0 if self.training is None else self.training.nbytes), 0

    def begin(self) -> None:
        self._sum = 0.0

    def gradient(self, tile: Tile, outputs_RC: Tensor) -> Tensor:
        rows, columns = outputs_RC.shape
        shares = [1 / self.divisor, 1 / self.nodes][:columns]
        tile.contribution.loss = outputs_RC[:, :1].double().sum()
        if columns > 1:  # what the encoder adds to the loss for every row
            tile.contribution.loss += outputs_RC[:, 1].double().sum() * (self.divisor / self.nodes)
        return outputs_RC.new_tensor(shares).repeat(rows, 1)

    def score(self, tile: Tile, outputs_RC: Tensor) -> None:
        """They are in place already."""

    def reduce(self, contribution: Contribution) -> None:
        self._sum = self._sum + contribution.loss

    def mean_loss(self) -> float:
        return float(self._sum) / self.divisor

    def scores(self, exchange: Exchange | None = None) -> dict[str, float | None]:
        if exchange is not None:
            self.scorer.gather(exchange)
        return dict.fromkeys(SPLITS) | self.scorer.scores()


def _are_known_both_ways(ends: Ends, resources: Resources) -> bool:
    """Whether links are kept by their tails, too, by which embeddings that are not in memory are read: those of several
    processes, and of a graph with types, are in memory."""
    return resources.ranks.count == 1 and not ends.edge_types
