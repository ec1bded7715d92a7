# SPDX-License-Identifier: Apache-2.0
"""A damaged source gives the right store or one line; no format lets a change pass that its checksums tell."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.examples import examples, thorough
from tests.sources.damage import Damage, Outcome, Trial, Verdict, damages, judge
from tests.sources.fixtures import FIXTURES, random_graph


@pytest.mark.parametrize(
    "name",
    thorough(
        sorted(FIXTURES),
        *(
            "ogb-papers100m-stored",
            "ogb-papers100m-zip-stored",
            "ogb-papers100m-zip-features-first",
            "ogb-products-zip",
        ),
        *(
            "igb-tiny",
            "igb-full",
            "mag240m-zip",
            "npz-compressed",
            "npy-multilabel",
            "npy-values",
            "snap-gz",
            "snap-ids",
        ),
        *("csv-gz", "jsonl-zst", "mtx-gz", "mtx-integer", "webgraph-codes", "webgraph-gaps", "dgl-reddit-zip"),
        *("dgl-reddit-deflated", "graphbolt-numpy", "parquet-columns"),
    ),
)
def test_damage_is_noticed_or_does_not_matter(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(list(name.encode()))
    (folder := tmp_path / "source").mkdir()
    (work := tmp_path / "work").mkdir()
    made = FIXTURES[name](random_graph(rng, nodes=40, edges=120, features=4), folder, rng)
    trial = Trial(made, work)
    seen: Counter[Outcome] = Counter()
    for damage in islice(damages(folder, rng), examples(4)):
        outcome, message = trial.outcome(damage)
        seen[outcome] += 1
        assert judge(damage, outcome) is not Verdict.WRONG, f"{damage}: {outcome.value} {message}"


def test_a_trial_tells_the_right_store_from_another(tmp_path: Path) -> None:
    """Damage that changes a feature, one that changes nothing, and one that leaves no file."""
    rng = np.random.default_rng(1)
    (folder := tmp_path / "source").mkdir()
    (work := tmp_path / "work").mkdir()
    made = FIXTURES["snap"](random_graph(rng, nodes=40, edges=120, features=4), folder, rng)
    trial = Trial(made, work)
    features = folder / "features.npy"
    size = features.stat().st_size
    last, text = features.read_bytes()[-1], folder / "graph.txt"
    assert trial.outcome(Damage(path=features, at=size - 1, value=last ^ 1))[0] is Outcome.OTHER
    assert trial.outcome(Damage(path=text, at=3, value=ord("X")))[0] is Outcome.RIGHT
    assert trial.outcome(Damage(path=features, at=0, value=None))[0] is Outcome.REFUSED
