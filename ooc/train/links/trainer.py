# SPDX-License-Identifier: Apache-2.0
"""Training for link prediction: the encoder over the whole graph, exactly, then a decoder on links and on negatives
that are drawn anew for every step.

The links of a step are a separate topology beside the graph's (``ooc.model.layers.links``), in files of the run's
scratch folder: for every head the tails of its links and of their negatives, ascending, with labels. Before a step they
are rewritten, a few heads at a time; the rest is an ordinary full-graph epoch. The loss is that of a step's links;
links that are held out, or any pairs, are scored.

Shapes: E links, K negatives of each.
"""

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ooc.engine.exchange import Exchange
from ooc.engine.recording import EpochRecorder
from ooc.engine.session import Session
from ooc.errors import ModelError, OptionError
from ooc.interruption import interruptible_by_ctrl_c
from ooc.model.layers.decoders import LinkPredictor, takes_link_types
from ooc.model.lowering.network import dtype_of
from ooc.plan.workload import Direction
from ooc.sizes import check_whole
from ooc.stages import Tile
from ooc.storage.store import SPLITS, Store
from ooc.suggestions import checked
from ooc.train.embedding import LearntRows
from ooc.train.job import Job
from ooc.train.links.drawn import TrainingLinks, words
from ooc.train.links.metrics import NO_TAIL, LinkMetric, LinkScorer, Ranked, pairs_at_once
from ooc.train.links.sets import KNOWN_BYTES, KNOWN_BYTES_PER_PAIR, Ends, Ints, KnownLinks, Links, Places
from ooc.train.objective import Objective
from ooc.train.prediction import Predictions, What
from ooc.train.resources import Resources
from ooc.train.rows_file import AnyArray, Ids
from ooc.train.setup import Saving, prepare
from ooc.train.trainer import Trainer

if TYPE_CHECKING:
    from torch_geometric.data import Data


_BYTES_PER_PAIR = 16
"""Bytes of each pair that is written for scoring."""
_EVALUATION_KEY = 3
"""The purpose, in the key of a draw, of tails that scored links are ranked against."""
_MOST_REDRAWS = 16
"""How often a pair that is linked is drawn again."""


class LinkObjective(Objective):
    """The loss of links, which tiles have already added up by head, and the scores of held-out links."""

    loss_inputs = ()
    score_inputs = ()
    score_operators = 0
    gradient_operators = 3
    scorer: LinkScorer  # type: ignore[assignment]

    def __init__(self, training: TrainingLinks | None, scorer: LinkScorer, ends: Ends) -> None:
        """``training`` None: nothing is trained. ``ends``: the nodes that links lead from and to."""
        self.divisor, self.nodes, self.ends = 1.0, ends.heads, ends
        self.training, self.scorer = training, scorer
        self._loss_sum: Tensor | float = 0.0

    @classmethod
    def of(
        cls,
        links: Links,
        store: Store,
        *,
        metric: LinkMetric,
        negatives: int,
        seed: int,
        dtype: torch.dtype,
        resources: Resources,
    ) -> Self:
        """Return the objective of these links of a store, whose files are scratch data; raise OptionError for invalid
        links."""
        folder = resources.spill_dir
        if resources.on_device:
            raise OptionError("links are trained on the CPU; leave out device='cuda'")
        store.check_one_graph("link prediction", takes_types=True)
        ends = Ends.of(store, links.edge_type)
        places = Places(ends, resources.limits)
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
        # Links are kept by their tails, too, by which embeddings that are not in memory are read: those of several
        # processes, and of a graph with types, are in memory.
        reversible = resources.ranks.count == 1 and not ends.edge_types
        training = TrainingLinks(
            folder, ends, train_3E, negatives, seed, reversible=reversible, filtered=links.filtered
        )
        name = str(dtype).removeprefix("torch.")
        scorer = LinkScorer(metric, scored, ends, folder, name, reversible=reversible)
        return cls(training, scorer, ends)

    def prepared(
        self, model: nn.Module, store: Store, resources: Resources, *, savings: Collection[Saving], **given: Any
    ) -> Job:
        """Return the job of training ``model``, a ``LinkPredictor``; other arguments as in ``prepare``.

        Rows that no link reaches are computed, too, since it is not known which these are.
        """
        if isinstance(model, LinkPredictor) and takes_link_types(model.decoder) and not self.ends.relations:
            raise OptionError("the decoder tells types of edges apart, and links are of one; leave out relations=")
        trained = {} if self.training is None else self.training.arrays
        joined = store.with_arrays(trained | self.scorer.arrays, neighbours=self.ends.tails)
        left = [saving for saving in savings if saving is not Saving.ACTIVE_ROWS]
        return prepare(model, joined, resources, savings=left, objective=self, outputs_of=self.ends.types, **given)

    def memory_bytes(self, store: Store, *, on_device: bool) -> tuple[int, int]:
        return self.scorer.nbytes + (0 if self.training is None else self.training.nbytes), 0

    def rehearse(self, dtype: torch.dtype) -> None:
        """Do nothing: there is no loop to compile."""

    def begin(self) -> None:
        self._loss_sum = 0.0

    def gradient(self, tile: Tile, outputs_RC: Tensor) -> Tensor:
        rows, columns = outputs_RC.shape
        shares = [1 / self.divisor, 1 / self.nodes][:columns]
        tile.loss = outputs_RC[:, :1].double().sum()
        if columns > 1:  # the encoder's own term of the loss for every row
            tile.loss += outputs_RC[:, 1].double().sum() * (self.divisor / self.nodes)
        return outputs_RC.new_tensor(shares).repeat(rows, 1)

    def score(self, tile: Tile, outputs_RC: Tensor) -> None:
        """Do nothing: the decoder has stored the scores already."""

    def mean_loss(self) -> float:
        return float(self._loss_sum) / self.divisor

    def scores(self, exchange: Exchange | None = None) -> dict[str, float | None]:
        if exchange is not None:
            self.scorer.gather(exchange)
        return dict.fromkeys(SPLITS) | self.scorer.scores()


# ---- links that are scored ------------------------------------------------------------------------------------------


def scored_links(ends: Ends, places: Places, links: Links, split: str, seed: int, known: KnownLinks | None) -> Ranked:
    """Return the links of a split and what they are ranked against; ``known`` pairs are not drawn."""
    links_3E = places.rows(split, getattr(links, split))
    count, name = links_3E.shape[1], f"{split}_negatives"
    given = getattr(links, name)
    if given is None and links.negatives:
        key = seed, SPLITS.index(split), _EVALUATION_KEY
        drawn = partial(_drawn_tails, ends, links_3E, links.negatives, key, known)
        return Ranked(links_3E, own=drawn, each=links.negatives)
    if given is None:
        return Ranked(links_3E, own=partial(_all_tails, ends, links_3E, known), each=ends.tails)
    pairs = np.asarray(given)
    height = 3 if ends.relations else 2
    is_either = count == height and not isinstance(given, (tuple, list))
    if is_either and pairs.ndim == 2 and pairs.shape[0] == height:
        raise OptionError(
            f"{name} {list(pairs.shape)} of {count} links may be pairs or tails of each; make it a tuple, of pairs, or "
            "a list, of tails"
        )
    if pairs.ndim == 2 and pairs.shape[0] == height and (count != height or isinstance(given, tuple)):
        return Ranked(links_3E, shared_3M=places.rows(name, pairs))
    if pairs.ndim == 2 and pairs.shape[0] == count and pairs.shape[1]:
        return Ranked(links_3E, own=lambda numbers: places.tails(name, pairs[numbers]), each=pairs.shape[1])
    raise OptionError(f"{name} must be [{height}, M] or [{count}, K], not {list(pairs.shape)}")


def _drawn_tails(
    ends: Ends, links_3E: Ints, each: int, key: tuple[int, ...], known: KnownLinks | None, numbers_n: Ints
) -> Ints:
    """Return uniformly drawn tails [n, K] for links by their numbers; linked ones are drawn again, and finally -1."""
    numbers_nK = (numbers_n[:, None] * each + np.arange(each)).astype(np.uint64)
    found = (words(numbers_nK, *key) % np.uint64(ends.tails)).astype(np.int64)
    for again in range(_MOST_REDRAWS if known is not None else 0):
        assert known is not None
        linked = known.of(links_3E[:, numbers_n], np.maximum(found, 0))
        if not linked.any():
            break
        drawn = words(numbers_nK[linked], *key, again) % np.uint64(ends.tails)
        found[linked] = drawn.astype(np.int64) if again < _MOST_REDRAWS - 1 else NO_TAIL
    return found


def _all_tails(ends: Ends, links_3E: Ints, known: KnownLinks | None, numbers_n: Ints) -> Ints:
    """Return all tails for each of these links, with -1 in place of its own tail and of linked ones."""
    found = np.tile(np.arange(ends.tails), (len(numbers_n), 1))
    if known is not None:
        found[known.of(links_3E[:, numbers_n], found)] = NO_TAIL
    np.put_along_axis(found, links_3E[1, numbers_n, None], NO_TAIL, axis=1)
    return found


# ---- pairs that are scored ------------------------------------------------------------------------------------------


_PAIRS_AT_ONCE = 1 << 16


class PairScores(Predictions):
    """The scores of ``pairs`` [2, E], heads above tails, by the ids that nodes have in the source, in their order.

    ``edge_type``: as in ``Links``. Other arguments as in ``Prediction``.
    """

    called = "pair"

    def __init__(
        self,
        model: Any,
        store: Store,
        resources: Resources,
        pairs: Any,
        *,
        ignore_edge_data: str = "none",
        learnt: LearntRows | None = None,
        edge_type: tuple[str, str, str] | None = None,
    ) -> None:
        if not isinstance(model, LinkPredictor):
            raise ModelError(f"pairs are scored by an ooc.LinkPredictor, not by {type(model).__name__}")
        if resources.on_device:
            raise OptionError("pairs are scored on the CPU; leave out device='cuda'")
        store.check_one_graph("scoring of pairs", takes_types=True)
        ends = Ends.of(store, edge_type)
        super().__init__(store, resources.limits, What.LOGITS, dtype_of(model))
        rows_3E = Places(ends, resources.limits).rows("to score", pairs)
        given = (LinkMetric("mrr"), {"pairs": Ranked(rows_3E)}, ends, resources.spill_dir)
        self._scorer = LinkScorer(*given, self.dtype.name, reversible=not ends.edge_types)
        self.shape = rows_3E.shape[1:]
        objective = LinkObjective(None, self._scorer, ends)
        savings, options = tuple(Saving), {"ignore_edge_data": ignore_edge_data, "scoring_only": True}
        job = objective.prepared(model, store, resources, savings=savings, learnt=learnt, **options)
        self._prepared = job.ready()
        self._session = Session(self._prepared, [model])

    @property
    def columns(self) -> list[str]:
        return ["score"]

    def _run(self, put: Callable[[Ids, AnyArray, AnyArray], None]) -> None:
        session = self._started()
        self._scorer.attach(self._prepared)
        session.run("evaluate", "scoring")
        for start in range(0, self.shape[0], _PAIRS_AT_ONCE):
            places = np.arange(start, min(start + _PAIRS_AT_ONCE, self.shape[0]))
            put(places, self._scorer.given("pairs", places), places)


class LinkTrainer(Trainer):
    """Trains a ``LinkPredictor`` in place on the whole graph and the ``links``, within the memory it is given.

    Every epoch makes ``steps`` steps, each with the exact embeddings of all nodes for a random part of the training
    links. Parts differ in size by at most one link, and none may be empty. Each link gets ``negatives`` negatives: its
    head with tails drawn uniformly from all nodes, as in OGB's baselines, whether or not they are linked. They depend
    only on ``seed`` and the order of the store's rows, not on memory. The loss is the mean over links and negatives; an
    epoch's loss is the mean of its steps. Where an epoch of several steps is interrupted, the steps made remain, except
    in a run that is resumed.

    ``metric``: ``"mrr"``, ``"hits@K"``, ``"roc-auc"`` or ``"average-precision"``, the first three as OGB's evaluators
    define them; by default the mean reciprocal rank. Other arguments as in ``Trainer``.
    """

    metric: LinkMetric  # type: ignore[assignment]

    @checked
    def __init__(
        self,
        model: LinkPredictor,
        graph: "Store | str | Path | Data",
        links: Links,
        *,
        negatives: int = 1,
        steps: int = 1,
        metric: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, LinkPredictor):
            raise ModelError(f"links are trained with an ooc.LinkPredictor(encoder), not with {type(model).__name__}")
        if not isinstance(links, Links):
            raise OptionError(f"links must be ooc.Links(train, valid, test), not {type(links).__name__}")
        if options.get("loss") is not None:
            raise OptionError("loss= is of nodes; the loss of links is the LinkPredictor's own")
        check_whole(negatives, name="negatives")
        check_whole(steps, name="steps")
        self._links, self._steps, self._drawn, self._step_number = links, steps, negatives, 0
        LinkMetric.of(metric or "mrr")  # refuses an unknown metric before anything is read
        super().__init__(model, graph, metric=metric, **options)

    def _extra_arguments(self) -> dict[str, Any]:
        of_links = {f"links.{one.name}": getattr(self._links, one.name) for one in fields(self._links)}
        return of_links | {"steps": self._steps, "negatives": self._drawn}

    def _resolve_metric(self, name: str | None, graph: Store) -> Any:
        return LinkMetric.of(name or "mrr")

    def _job(self, resources: Resources) -> Job:
        resources = resources.shared_with(self.ranks)
        how: dict[str, Any] = {"negatives": self._drawn, "seed": self._asked["seed"], "resources": resources}
        how |= {"metric": self.metric, "dtype": dtype_of(self.model)}
        objective = self.ranks.in_all(partial(LinkObjective.of, self._links, self.store, **how))
        assert objective.training is not None
        self._training = objective.training
        if self._steps > (count := self._training.count):
            raise OptionError(f"{self._steps} steps an epoch are more than the {count} training links; each needs one")
        return objective.prepared(self.model, self.store, resources, **self._asked)

    def _why_unscored(self) -> str:
        return "" if self._links.valid is not None else "there are no validation links"

    # ---- the algorithm -----------------------------------------------------------------------------------------

    def _loss_and_gradients(self, *, scored: bool, recorder: EpochRecorder | None = None) -> float:
        """Make the steps over all parts of the links; the last part's gradients are left for the epoch's own step."""
        total, counted = 0.0, 0
        for step in range(self._steps):
            both_ways = Direction.LINKS_REVERSED in self._prepared.plan.topologies
            count = self._training.draw(self.epoch, step, self._steps, both_ways=both_ways)
            for side in (Direction.LINKS, Direction.LINKS_REVERSED):
                self._session.runtime.forget(side)
            self._objective.divisor = float(count)  # type: ignore[attr-defined]
            self._step_number = step
            total += super()._loss_and_gradients(scored=scored, recorder=recorder) * count
            counted += count
            if step < self._steps - 1:
                self._update()
                self._commit_rows()
        return total / counted

    def _start(self) -> None:
        super()._start()
        self._scorer.attach(self._prepared)

    @property
    def _steps_made(self) -> int:
        return self.epoch * self._steps + self._step_number

    @property
    def _steps_unsaved(self) -> bool:
        return self._steps > 1

    def negatives(self, epoch: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return the links of a step of an epoch (from 0): the numbers of training links [e], and their drawn tails [e,
        K].

        A tail that is left out is -1. Both are int64, in the order and by the numbers of the given links.
        """
        return self._training.drawn(epoch, step, self._steps)

    def predict(self, what: str = "embeddings", **given: Any) -> Tensor | None:
        """Return embeddings of nodes, the encoder's outputs; other arguments as in ``Trainer.predict``.

        In a heterogeneous graph these are all nodes of ``node_type``, by default the links' heads.
        """
        if what == "embeddings" and self._links.edge_type is not None and given.get("layer") is None:
            given.setdefault("node_type", self._links.edge_type[0])
        return super().predict(what, **given)

    @interruptible_by_ctrl_c()
    def score(self, pairs: Any) -> Tensor:
        """Return the scores [E] of ``pairs`` [2, E], heads above tails, by the ids of the source.

        They are computed with the current model, or with averaged weights where there are any.
        """
        options: dict[str, Any] = {"learnt": self._learnt, "edge_type": self._links.edge_type}
        options["ignore_edge_data"] = self._asked["ignore_edge_data"]
        found = self._predicted(partial(PairScores, self.model, self.store, self._resources, pairs, **options))
        assert found is not None, "it is for no file"
        return found
