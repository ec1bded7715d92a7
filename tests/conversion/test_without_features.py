# SPDX-License-Identifier: Apache-2.0
"""Stores of nodes of which nothing is known but their edges and labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.errors import OptionError, SourceError
from ooc.storage.store import Store
from ooc.storage.verification import verify


def _edges(folder: Path) -> Path:
    ends = np.random.default_rng(0).integers(0, 50, (300, 2))
    (folder / "edges.csv").write_text("src,dst\n" + "".join(f"{a},{b}\n" for a, b in ends))
    return folder / "edges.csv"


def _data() -> Data:
    edges = torch.randint(0, 50, (2, 300), generator=torch.Generator().manual_seed(0))
    return Data(edge_index=edges, y=torch.arange(50) % 3, train_mask=torch.arange(50) < 20, num_nodes=50)


def _check(store: Store) -> None:
    assert store.num_features == 0 and not store.has("x")
    assert verify(store) == []


@pytest.mark.parametrize("order", ["none", "hop"])
def test_made_up_graphs(order: str, tmp_path: Path) -> None:
    source = "synthetic:nodes=2000,edges=9000,features=0,classes=4,labelled=0.1"
    store = ooc.convert(source, tmp_path / "g.ooc", order=order)
    _check(store)
    with_features = ooc.convert(source.replace("features=0", "features=3"), tmp_path / "f.ooc", order=order)
    for name in ("y", "in/indptr", "in/indices", "split/train", "perm"):
        assert np.array_equal(store.array(name).read(), with_features.array(name).read())


def test_edges_alone(tmp_path: Path) -> None:
    store = ooc.convert(_edges(tmp_path), tmp_path / "g.ooc", features="none", labels="random:3")
    _check(store)
    assert store.source["features"] == "none"


def test_data_of_pyg(tmp_path: Path) -> None:
    """With its number of nodes; which labels tell where nobody else does, of nodes without edges, too."""
    for number in (50, None):
        (data := _data()).num_nodes = number
        data.edge_index %= 50 if number else 45
        store = ooc.convert(data, tmp_path / f"{number}.ooc")
        _check(store)
        assert store.num_nodes == 50


def test_put_in_order_later(tmp_path: Path) -> None:
    from ooc.conversion.reorder import reorder

    ooc.convert(_data(), tmp_path / "g.ooc")
    _check(reorder(tmp_path / "g.ooc", tmp_path / "h.ooc"))


@pytest.mark.parametrize("options", [{"row_normalize": True}, {"feature_form": "sparse"}])
def test_options_of_features_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no features to be normalised or kept without their zeros"):
        ooc.convert(_data(), tmp_path / "g.ooc", **options)


def test_nobody_forgets_features(tmp_path: Path) -> None:
    """Edges alone, and arrays, are refused unless it is said that there are none."""
    with pytest.raises(SourceError, match=r"give features=FILE .* or none, to train an embedding"):
        ooc.convert(_edges(tmp_path), tmp_path / "g.ooc", labels="random:3")
    arrays = {"edge_index": np.zeros((2, 5), dtype=np.int64), "y": np.zeros(9, dtype=np.int64)}
    with pytest.raises(SourceError, match="has no features: x is missing"):
        ooc.convert(arrays, tmp_path / "g.ooc")
