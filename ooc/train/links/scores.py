# SPDX-License-Identifier: Apache-2.0
"""The scores that a model of links gives pairs of nodes, exactly and within the same budgets as its training."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ooc.engine.session import Session
from ooc.errors import ModelError, OptionError
from ooc.model.layers.decoders import LinkPredictor
from ooc.model.lowering.network import dtype_of
from ooc.storage.store import Store
from ooc.train.embedding import LearntRows
from ooc.train.links.ends import Ends, Places
from ooc.train.links.metrics import LinkMetric, LinkScorer, Ranked
from ooc.train.links.objective import LinkObjective
from ooc.train.prediction import Predictions, What
from ooc.train.resources import Resources
from ooc.train.rows_file import AnyArray, Ids
from ooc.train.setup import Saving

_PAIRS_AT_ONCE = 1 << 16


class PairScores(Predictions):
    """Of ``pairs`` [2, E], heads above tails, by the ids that nodes have in the source; in their order. ``edge_type``:
    as ``Links`` has it. Other arguments as of ``Prediction``."""

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
        self._store, self._limits, self._what = store, resources.limits, What.LOGITS
        self._model_dtype = dtype_of(model)
        rows_3E = Places(ends, resources.limits.memory_bytes).rows("to score", pairs)
        given = (LinkMetric("mrr"), {"pairs": Ranked(rows_3E)}, ends, resources.spill_dir)
        self._scorer = LinkScorer(*given, self.dtype.name, reversible=not ends.edge_types)
        self._pairs = rows_3E.shape[1]
        objective = LinkObjective(None, self._scorer, ends)
        savings, options = tuple(Saving), {"ignore_edge_data": ignore_edge_data, "scoring_only": True}
        job = objective.prepared(model, store, resources, savings=savings, learnt=learnt, **options)
        self._prepared = job.ready()
        self._session = Session(self._prepared, [model])

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._pairs,)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(str(self._model_dtype).removeprefix("torch."))

    @property
    def columns(self) -> list[str]:
        return ["score"]

    def _run(self, put: Callable[[Ids, AnyArray, AnyArray], None]) -> None:
        session = self._started()
        self._scorer.attach(self._prepared)
        session.run("evaluate", "scoring")
        for start in range(0, self._pairs, _PAIRS_AT_ONCE):
            places = np.arange(start, min(start + _PAIRS_AT_ONCE, self._pairs))
            put(places, self._scorer.given("pairs", places), places)
