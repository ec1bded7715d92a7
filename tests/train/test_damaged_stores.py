# SPDX-License-Identifier: Apache-2.0
"""A store whose contents are damaged stops training with one line that names the array."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import EdgeConv

import ooc
from ooc.errors import StoreError
from tests.damage import seal
from tests.exactness.comparison import make_trainer, store_of
from tests.exactness.reference import CustomCase, ModelCase
from tests.graphs import GraphCase, random_data


def overwrite(dtype: str, place: int, value: int) -> Callable[[Path], None]:
    """Put ``value`` at element ``place`` of a chunk file."""

    def damage(chunk: Path) -> None:
        data = np.fromfile(chunk, dtype=dtype)
        data[place] = value
        data.tofile(chunk)

    return damage


def end_early(chunk: Path) -> None:
    """Let the last of 60 rows with edges end one edge before."""
    data = np.fromfile(chunk, dtype="<i8")
    data[:61][data[:61] == data[60]] -= 1
    data.tofile(chunk)


@pytest.mark.parametrize(
    ("array", "damage"),
    [
        ("in/indices", overwrite("<i4", 5, 2**31 - 1)),
        ("in/indices", overwrite("<i4", 5, -1)),
        ("in/indptr", overwrite("<i8", 7, 2**40)),
        ("in/indptr", overwrite("<i8", 7, 0)),
        ("in/indptr", end_early),
        ("y", lambda chunk: chunk.write_bytes(b"\xff" * 200 + chunk.read_bytes()[200:])),
    ],
    ids=["index too large", "index negative", "indptr too large", "indptr falling", "indptr ending early", "labels"],
)
@pytest.mark.parametrize("sealed", [False, True], ids=["its checksum tells", "its checksum agrees"])
def test_damage_is_named(array: str, damage: Callable[[Path], None], sealed: bool, tmp_path: Path) -> None:
    store = store_of(random_data(GraphCase(nodes=60, edges=200), dtype=torch.float32), tmp_path)
    damage(store.path / array / "c" / "0")
    if sealed:
        seal(store.array(array))
    case = ModelCase(kind="gcn", layers=2, hidden=8)
    told = rf"{array} of the store .*damaged.*ooc verify" if sealed else rf"{array}/c/0 .*checksum.*ooc verify"
    with (
        pytest.raises(StoreError, match=told),
        make_trainer(case, ooc.open(store.path), tmp_path, dtype=torch.float32) as trainer,
    ):
        trainer.fit(epochs=1, eval_every=0)


def test_what_is_read_while_a_model_is_taken_apart_is_no_fault_of_the_models(tmp_path: Path) -> None:
    """As the most edges of a row are, for a layer that runs as it is."""
    store = store_of(random_data(GraphCase(nodes=60, edges=200)), tmp_path)
    (store.path / "in/indptr/c/0").unlink()
    with pytest.raises(StoreError, match=r"^in/indptr: chunk .* cannot be read"):
        make_trainer(CustomCase(make=lambda f, c: EdgeConv(nn.Linear(2 * f, c))), store, tmp_path)
