# SPDX-License-Identifier: Apache-2.0
"""Which pairs are linked, however few rows and edges are looked at together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.train.links import sets
from ooc.train.links.sets import Ends, KnownLinks

_NODES = 60


@pytest.mark.parametrize("directed", [False, True])
def test_pairs_that_are_linked_are_found(tmp_path: Path, directed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of another order than the source's, with a head of many edges and heads of none."""
    monkeypatch.setattr(sets, "_ROWS_AT_ONCE", 7)
    monkeypatch.setattr(sets, "_EDGES_AT_ONCE", 5)
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 40, (2, 200))
    edges[0, :60] = 3
    edges = edges if directed else np.concatenate((edges, edges[::-1]), axis=1)
    data = Data(x=torch.zeros(_NODES, 2), edge_index=torch.from_numpy(edges), y=torch.arange(_NODES) % 2)
    store = ooc.convert(data, tmp_path / "g.ooc", order="hop", split="random")
    assert store.undirected != directed
    row_of = np.argsort(store.array("perm").read())
    linked = np.zeros((_NODES, _NODES), np.bool_)
    linked[row_of[edges[0]], row_of[edges[1]]] = True
    further = np.array([[50, 51], [52, 53], [0, 0]])
    linked[further[0], further[1]] = True
    heads, tails = rng.permutation(np.repeat(np.arange(_NODES), 2)), rng.integers(0, _NODES, (2 * _NODES, 9))
    tails[:, 0] = np.where(heads == 50, 52, tails[:, 0])
    given = np.stack((heads, tails[:, 0], np.zeros_like(heads)))
    assert (KnownLinks(Ends(store), [further]).of(given, tails) == linked[heads[:, None], tails]).all()
