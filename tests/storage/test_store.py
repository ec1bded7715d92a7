# SPDX-License-Identifier: Apache-2.0
"""Opening stores: what is there, and one clear line for what cannot be used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import ooc
from ooc.errors import StoreError
from ooc.storage.store import FORMAT_VERSION, Store
from tests.conversion.arrays import random_arrays


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ooc.convert(random_arrays(), tmp_path / "g.ooc")


def _edit(store: Store, **attributes: Any) -> None:
    path = store.path / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"].update(attributes)
    path.write_text(json.dumps(metadata))


def test_a_store_says_what_it_holds(store: Store) -> None:
    again = ooc.open(str(store.path))
    assert (again.num_nodes, again.num_edges, again.num_features, again.num_classes) == (60, 300, 5, 3)
    assert again.name == "g" and not again.undirected and again.has("in/self_loops")
    assert sum(again.split_sizes.values()) == 60
    assert again.source["format"] == "arrays"
    assert again.nbytes == sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file())
    with pytest.raises(StoreError, match="no array 'z'"):
        again.array("z")
    with pytest.raises(ValueError):
        again.topology("sideways")


def test_zarr_reads_the_same_values(store: Store) -> None:
    group = zarr.open(store.path, mode="r")
    assert group.attrs["ooc_format"] == FORMAT_VERSION
    for name in store.arrays():
        np.testing.assert_array_equal(group[name][...], store.array(name).read())
        assert group[name].chunks == store.array(name).chunks
    assert sorted(group["split"].array_keys()) == ["test", "train", "valid"]


def test_unusable_stores_are_named(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="no store at"):
        ooc.open(tmp_path / "none.ooc")
    with pytest.raises(StoreError, match=r"a dict is no path of a store; ooc.convert\(data, 'my.ooc'\) makes one"):
        ooc.open({})  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for nameless in (tmp_path / "empty", ".", "/"):
        with pytest.raises(StoreError, match="not a store"):
            ooc.open(nameless)
    with pytest.raises(StoreError, match="not a store"):
        ooc.open(store.path / "zarr.json")
    zarr.open_group(tmp_path / "other", mode="w")
    with pytest.raises(StoreError, match="no store made by"):
        ooc.open(tmp_path / "other")
    with pytest.raises(StoreError, match="damaged"):
        ooc.open(store.path / "x")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"ooc_format": FORMAT_VERSION + 1}, "newer"),
        ({"ooc_format": "x"}, "damaged"),
        ({"complete": False}, "interrupted"),
        ({"num_nodes": 61}, "shape"),
        ({"num_nodes": "many"}, "damaged"),
        ({"split_sizes": {}}, "damaged"),
        ({"split_sizes": {"train": 10**30, "valid": 0, "test": 0}}, "damaged"),
        ({"order": "hop", "hops": "abc", "train_hops": [1]}, "damaged"),
        ({"source": None}, "damaged"),
        ({"node_types": "../../x"}, "damaged"),
    ],
)
def test_wrong_metadata_is_refused(store: Store, attributes: dict[str, Any], message: str) -> None:
    _edit(store, **attributes)
    with pytest.raises(StoreError, match=message) as caught:
        ooc.open(store.path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION))
def test_stores_of_earlier_versions_are_read(store: Store, version: int) -> None:
    _edit(store, ooc_format=version)
    assert ooc.open(store.path).num_nodes == store.num_nodes


def test_a_missing_array_and_broken_json_are_refused(store: Store) -> None:
    (store.path / "in" / "indptr" / "zarr.json").unlink()
    with pytest.raises(StoreError, match="no array 'in/indptr'"):
        ooc.open(store.path)
    for text in ("{", "[]", '{"zarr_format": 2}'):
        (store.path / "zarr.json").write_text(text)
        with pytest.raises(StoreError, match="damaged"):
            ooc.open(store.path)
    with pytest.raises(StoreError, match="cannot be read: File name too long"):
        ooc.open("a" * 300)


def test_an_interrupted_conversion_is_named(store: Store) -> None:
    partial = store.path.with_name("g.ooc.partial")
    store.path.rename(partial)
    for path in (store.path, partial):
        with pytest.raises(StoreError, match="interrupted"):
            ooc.open(path)


def test_importing_is_light() -> None:
    """What converts and opens imports neither torch nor zarr before it is called, in whatever order."""
    code = (
        "import sys, ooc, ooc.conversion.conversion; ooc.open; assert callable(ooc.convert);"
        "print([m for m in ('torch', 'torch_geometric', 'zarr', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = "import sys, ooc; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
