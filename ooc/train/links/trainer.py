# SPDX-License-Identifier: Apache-2.0
"""Training a model to tell links from pairs that are none: the encoder over the whole graph, exactly, then a decoder
on links and on negatives that are drawn anew for every step.

The links of a step are a topology of their own beside the graph's (``ooc.model.layers.links``), in files of the run's
scratch folder: every head's tails, those of its links and for each of these so many negatives, ascending, with their
labels. Before a step they are written anew, a few heads at a time; everything else is a full-graph epoch as ever.

Shapes: E links, K negatives of each.
"""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ooc.engine.recording import EpochRecorder
from ooc.errors import ModelError, OptionError
from ooc.interruption import interruptible_by_ctrl_c
from ooc.model.layers.decoders import LinkPredictor
from ooc.model.lowering.network import dtype_of
from ooc.plan.workload import Direction
from ooc.storage.store import Store
from ooc.train.links.metrics import LinkMetric
from ooc.train.links.objective import LinkObjective, PairScores
from ooc.train.links.sets import Links
from ooc.train.resources import Resources
from ooc.train.setup import Job
from ooc.train.trainer import Trainer

if TYPE_CHECKING:
    from torch_geometric.data import Data


class LinkTrainer(Trainer):
    """Trains a ``LinkPredictor`` in place on the whole graph and the ``links``, within the memory it is given.

    Every epoch makes ``steps`` steps, each with the exact embeddings of all nodes for a part of the training links that
    is drawn for it. To each link come ``negatives`` pairs that are none: its head with tails drawn evenly from all
    nodes, as OGB's baselines do, whether or not they are linked. They are the same for the same ``seed`` and order of
    the store's rows, whatever the memory. The loss is the mean over both kinds; an epoch's that of its steps.
    Where an epoch of several steps is interrupted, those that are made stay made, but for a run that is gone on with.

    ``metric``: ``"mrr"``, ``"hits@K"`` or ``"roc-auc"``, as OGB's evaluators define them; by default the mean
    reciprocal rank. Other arguments as of ``Trainer``.
    """

    metric: LinkMetric  # type: ignore[assignment]

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
            raise ModelError(f"links are trained with an ooc.LinkPredictor, not with {type(model).__name__}")
        if options.get("loss") is not None:
            raise OptionError("loss= is of nodes; the loss of links is the LinkPredictor's own")
        if negatives < 1 or steps < 1:
            raise OptionError(f"negatives={negatives} and steps={steps} must be at least 1")
        self._links, self._steps, self._drawn, self._step_number = links, steps, negatives, 0
        LinkMetric.of(metric or "mrr")  # which refuses another one before anything is read
        super().__init__(model, graph, metric=metric, **options)

    def _resolve_metric(self, name: str | None, graph: Store) -> Any:
        return LinkMetric.of(name or "mrr")

    def _job(self, resources: Resources) -> Job:
        objective = LinkObjective.of(
            self._links,
            self.store,
            resources.spill_dir,
            metric=self.metric,
            negatives=self._drawn,
            seed=self._asked["seed"],
            dtype=dtype_of(self.model),
            resources=resources,
        )
        assert objective.training is not None
        self._training, self._scorer = objective.training, objective.scorer
        asked = {name: value for name, value in self._asked.items() if name not in ("metric", "loss")}
        return objective.prepared(self.model, self.store, resources.shared_with(self.ranks), **asked)

    # ---- the algorithm -----------------------------------------------------------------------------------------

    def _loss_and_gradients(self, *, scored: bool, recorder: EpochRecorder | None = None) -> float:
        """Steps over all parts of the links; the last one's gradients are left for the epoch's own step."""
        total, counted = 0.0, 0
        for step in range(self._steps):
            both_ways = Direction.LINKS_REVERSED in self._prepared.plan.topologies
            count = self._training.draw(self.epoch, step, self._steps, both_ways=both_ways)
            for side in (Direction.LINKS, Direction.LINKS_REVERSED):
                self._session.reread(side)
            self._objective.divisor = float(max(1, count))  # type: ignore[attr-defined]
            self._step_number = step
            total += super()._loss_and_gradients(scored=scored, recorder=recorder) * count
            counted += count
            if step < self._steps - 1:
                self._update()
                self._commit_rows()
        return total / max(1, counted)

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
        """What a step of an epoch (from 0) is made of: which of the training links [e], and the tails [e, K] that were
        drawn for each, -1 where that is left out; both int64, in the order and by the numbers of the links given."""
        return self._training.drawn(epoch, step, self._steps)

    def predict(self, what: str = "embeddings", **given: Any) -> Tensor | None:
        """Embeddings of nodes, what the encoder gives; other arguments as of ``Trainer.predict``. Of a graph with types
        those of all nodes of ``node_type``, by default the links' heads."""
        if what == "embeddings" and self._links.edge_type is not None and given.get("layer") is None:
            given.setdefault("node_type", self._links.edge_type[0])
        return super().predict(what, **given)

    @interruptible_by_ctrl_c()
    def score(self, pairs: Any) -> Tensor:
        """The scores [E] of ``pairs`` [2, E], heads above tails, by the ids of the source, with the model as it is, or
        averaged weights, where there are such."""
        self._session.close()  # its memory is needed
        options: dict[str, Any] = {"learnt": self._learnt, "edge_type": self._links.edge_type}
        asked = PairScores(self.model, self.store, self._resources, pairs, **options)
        with self._averaging.in_place(), closing(asked) as found:
            return found.read()
