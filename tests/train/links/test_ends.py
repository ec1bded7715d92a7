# SPDX-License-Identifier: Apache-2.0
"""Which pairs are linked, however few rows and edges are looked at together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.plan import Limits
from ooc.storage.store import Store
from ooc.storage.types import EdgeType
from ooc.train.links import sets
from ooc.train.links.sets import Ends, KnownLinks, Places

_NODES, LIMITS = 60, Limits(1 << 30, 1 << 30)


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
    few = given[:, [3, 77]]  # in some of the rows that are looked at together there are none of these
    assert (KnownLinks(Ends(store), [further]).of(few, tails[[3, 77]]) == linked[few[0][:, None], tails[[3, 77]]]).all()


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A graph of three types of edges, in the second of which there are none but loops."""
    edges, kinds = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 2, 4, 0]]), torch.tensor([0, 0, 1, 2, 2])
    data = Data(x=torch.zeros(5, 2), edge_index=edges, edge_type=kinds, y=torch.arange(5) % 2)
    return ooc.convert(data, tmp_path_factory.mktemp("ends") / "g.ooc", split="random")


@pytest.mark.parametrize("kind", [str, object, np.bytes_])
def test_numbers_may_be_texts_or_objects_beside_ids_that_are(of_kinds: Store, kind: type) -> None:
    links = np.array([[0, 1, 4], [0, 2, 1], [1, 3, 0]])
    places = Places(Ends.of(of_kinds, None), LIMITS)
    assert np.array_equal(places.rows("given", links.astype(kind)), places.rows("given", links))
    for wrong in ("3", "-1", "01", "rates"):
        with pytest.raises(ooc.OptionError, match="links given: edge types are numbered from 0 to 2"):
            places.rows("given", np.array([["0"], [wrong], ["1"]], dtype=kind))


def test_types_without_edges_have_no_links(of_kinds: Store) -> None:
    types = of_kinds.types
    assert types is not None
    second, (name,) = [*types.edges][1], types.nodes
    other = EdgeType(name, "likes", name)
    for one, message in ((second, "has no edges to train as links"), (other, "has no edges .* give links")):
        with pytest.raises(ooc.OptionError, match=message):
            Places(Ends(of_kinds, (one,)), LIMITS).edges()
    known, pairs = KnownLinks(Ends(of_kinds, (second, other))), np.array([[2, 2], [2, 2], [0, 1]])
    assert known.of(pairs, pairs[1][:, None]).tolist() == [[True], [False]]


def test_a_type_of_edges_is_of_a_graph_with_types(tmp_path: Path) -> None:
    store = ooc.convert("synthetic:nodes=20,edges=40,features=2,classes=2", tmp_path / "g.ooc")
    with pytest.raises(ooc.OptionError, match=r"has one type of edges; leave out edge_type=\('a', 'b', 'c'\)"):
        Ends.of(store, ("a", "b", "c"))
