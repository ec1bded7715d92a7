# SPDX-License-Identifier: Apache-2.0
"""Every format gives the graph that PyG makes of it."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.io.planetoid import read_planetoid_data
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import remove_self_loops, to_undirected

import ooc
from ooc.errors import OptionError, SourceError
from ooc.events import Event, Note
from ooc.storage.store import Store
from ooc.storage.verification import verify
from tests.conversion.arrays import edges_of, in_order, random_arrays
from tests.examples import thorough

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def _assert_equal(store: Store, data: Data) -> None:
    np.testing.assert_array_equal(edges_of(store), in_order(data.edge_index.numpy()))
    np.testing.assert_array_equal(store.array("x").read(), data.x.numpy())
    np.testing.assert_array_equal(store.array("y").read(), data.y.numpy())
    for split, mask in _MASKS.items():
        np.testing.assert_array_equal(store.array(f"split/{split}").read(), data[mask].numpy())
    assert verify(store) == []


@pytest.mark.parametrize(("name", "classes"), thorough([("cora", 7), ("citeseer", 6)], ("cora", 7)))
def test_planetoid_is_pygs(real_graphs: Path, tmp_path: Path, name: str, classes: int) -> None:
    """Edge by edge and feature by feature; CiteSeer's isolated test nodes included."""
    data = read_planetoid_data(str(real_graphs / name / "raw"), name)
    store = ooc.convert(real_graphs / name / "raw", tmp_path / "plain.ooc")
    assert store.undirected and store.num_classes == classes and store.source["what"] == name
    _assert_equal(store, data)
    normal = ooc.convert(real_graphs / name, tmp_path / "normal.ooc", row_normalize=True)
    np.testing.assert_allclose(normal.array("x").read(), NormalizeFeatures()(data).x.numpy(), rtol=1e-6)


def test_heterophilous_is_pygs_with_any_of_its_splits(real_graphs: Path, tmp_path: Path) -> None:
    raw = np.load(real_graphs / "minesweeper.npz")
    for split in (None, 3):
        store = ooc.convert(real_graphs / "minesweeper.npz", tmp_path / "m.ooc", split=split, force=True)
        masks = {
            f"{name}_mask": torch.from_numpy(raw[f"{name}_masks"][split or 0]) for name in ("train", "val", "test")
        }
        edge_index = to_undirected(torch.from_numpy(raw["edges"]).t().contiguous())
        x, y = torch.from_numpy(raw["node_features"]), torch.from_numpy(raw["node_labels"])
        _assert_equal(store, Data(x=x, y=y, edge_index=edge_index, **masks))
    with pytest.raises(SourceError, match="no split 10"):
        ooc.convert(real_graphs / "minesweeper.npz", tmp_path / "n.ooc", split=10)


def test_gnn_benchmark_is_pygs(real_graphs: Path, tmp_path: Path) -> None:
    raw = np.load(real_graphs / "amazon_computers.npz")
    events: list[Event] = []
    store = ooc.convert(real_graphs / "amazon_computers.npz", tmp_path / "a.ooc", listener=events.append)
    edge_index, _ = remove_self_loops(torch.from_numpy(raw["edge_index"].astype(np.int64)))
    wanted = to_undirected(edge_index, num_nodes=int(raw["num_nodes"])).numpy()
    np.testing.assert_array_equal(edges_of(store), in_order(wanted))
    assert store.num_edges == 2 * 245861 and store.num_classes == 10
    x = scipy.sparse.csr_matrix((raw["feat_data"], raw["feat_indices"], raw["feat_indptr"]), raw["feat_shape"])
    np.testing.assert_array_equal(store.array("x").read(), (x.toarray() > 0).astype(np.float32))
    assert store.split_sizes == {"train": 8251, "valid": 2751, "test": 2750}
    assert [event.text for event in events if isinstance(event, Note)] == [
        "amazon_computers: split is random 60/20/20, seed 0"
    ]


def test_gnn_benchmarks_own_names_are_read(tmp_path: Path) -> None:
    adjacency = scipy.sparse.random(30, 30, 0.2, format="csr", random_state=1)
    x = scipy.sparse.random(30, 8, 0.4, format="csr", random_state=2)
    parts = {
        f"{name}_{part}": getattr(matrix, part)
        for name, matrix in (("adj", adjacency), ("attr", x))
        for part in ("data", "indices", "indptr", "shape")
    }
    parts |= {"labels": np.arange(30) % 3, "num_nodes": np.array(30)}
    for wrong, said in (
        ({"attr_data": parts["attr_data"] * np.nan}, "b: attr_data holds NaN or infinity"),
        ({"adj_indptr": parts["adj_indptr"][:-1]}, "b: adj_indptr and adj_indices are no CSR matrix"),
        ({"num_nodes": np.array(31)}, "b: x has 30 rows for 31 nodes"),
    ):
        np.savez(tmp_path / "b.npz", **parts | wrong)
        with pytest.raises(SourceError, match=said):
            ooc.convert(tmp_path / "b.npz", tmp_path / "b.ooc")
    np.savez(tmp_path / "a.npz", **parts)
    store = ooc.convert(tmp_path / "a.npz", tmp_path / "a.ooc", split="random:5")
    row, column = adjacency.nonzero()
    edges = np.stack([row, column])[:, row != column]
    np.testing.assert_array_equal(edges_of(store), in_order(np.unique(np.hstack([edges, edges[::-1]]), axis=1)))
    np.testing.assert_array_equal(store.array("x").read(), x.toarray() > 0)
    assert store.source["split"] == "random 60/20/20, seed 5"


@pytest.mark.parametrize("kind", ["npz", "compressed", "npy", "fortran", "dictionary"])
def test_the_generic_form_in_all_its_containers(tmp_path: Path, kind: str) -> None:
    arrays = random_arrays(nodes=4000, edges=30000, features=9)
    source: object = tmp_path / "g.npz"
    match kind:
        case "npz":
            np.savez(tmp_path / "g.npz", **arrays)
        case "compressed":
            np.savez_compressed(tmp_path / "g.npz", **arrays)
        case "dictionary":
            source = arrays
        case _:
            source = tmp_path / "g"
            (tmp_path / "g").mkdir()
            for name, array in arrays.items():
                np.save(tmp_path / "g" / f"{name}.npy", np.asfortranarray(array) if kind == "fortran" else array)
    store = ooc.convert(source, tmp_path / "g.ooc")
    np.testing.assert_array_equal(edges_of(store), in_order(arrays["edge_index"]))
    np.testing.assert_array_equal(store.array("x").read(), arrays["x"])
    np.testing.assert_array_equal(store.array("split/valid").read(), arrays["val_mask"])
    assert verify(store) == []


def test_variants_of_the_generic_form(tmp_path: Path) -> None:
    """Edges as [E, 2], CSR features, index splits, float labels with NaN for none, integer types."""
    arrays = random_arrays()
    x = scipy.sparse.random(60, 12, 0.3, format="csr", random_state=0)
    y = arrays["y"].astype(np.float32)[:, None]
    y[~arrays["train_mask"]] = np.nan
    variant = {
        "edges": arrays["edge_index"].T.astype(np.uint16),
        "y": y,
        "train_idx": np.flatnonzero(arrays["train_mask"])[::-1].astype(np.int32),
        "train_mask": arrays["train_mask"],
        "x_data": x.data,
        "x_indices": x.indices,
        "x_indptr": x.indptr,
        "x_shape": np.array(x.shape),
    }
    store = ooc.convert(variant, tmp_path / "g.ooc", dtype="float64")
    np.testing.assert_array_equal(edges_of(store), in_order(arrays["edge_index"]))
    np.testing.assert_array_equal(store.array("x").read(), x.toarray())
    np.testing.assert_array_equal(store.array("y").read(), np.where(arrays["train_mask"], arrays["y"], -1))
    np.testing.assert_array_equal(store.array("split/train").read(), arrays["train_mask"])
    assert store.split_sizes["valid"] == store.split_sizes["test"] == 0


def test_two_edges_are_read_by_their_name(tmp_path: Path) -> None:
    pairs = np.array([[0, 1], [2, 3]])
    arrays = random_arrays(nodes=6, edges=0)
    del arrays["edge_index"]
    rows = ooc.convert(arrays | {"edge_index": pairs}, tmp_path / "rows.ooc")
    columns = ooc.convert(arrays | {"edges": pairs}, tmp_path / "columns.ooc")
    np.testing.assert_array_equal(edges_of(rows), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(edges_of(columns), [[0, 2], [1, 3]])


def test_a_pyg_data_object_with_masks_of_several_splits(tmp_path: Path) -> None:
    arrays = random_arrays()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "num_classes"}
    wide = {mask: torch.stack([~tensors[mask], tensors[mask]], dim=1) for mask in _MASKS.values()}
    data = Data(**tensors | wide)
    store = ooc.convert(data, tmp_path / "g.ooc", split=1)
    _assert_equal(store, Data(**tensors | {"edge_index": torch.from_numpy(in_order(arrays["edge_index"]))}))
    data.x = data.x.bfloat16().requires_grad_()
    again = ooc.convert(data, tmp_path / "h.ooc", split=1)
    np.testing.assert_array_equal(again.array("x").read(), data.x.detach().float().numpy())
    with pytest.raises(SourceError, match="HeteroData"):
        ooc.convert(HeteroData(), tmp_path / "i.ooc")
    with pytest.raises(OptionError, match="output"):
        ooc.convert(data, split=1)
    data.batch = torch.arange(len(data.x)) // 9
    with pytest.raises(SourceError, match="batch of several graphs, which would count as one"):
        ooc.convert(data, tmp_path / "i.ooc", split=1)
    data.batch = torch.zeros(len(data.x))
    data.y = data.y.to_sparse()
    with pytest.raises(SourceError, match="y is no dense tensor"):
        ooc.convert(data, tmp_path / "i.ooc", split=1)


def test_random_splits_need_no_masks_and_leave_out_the_unlabelled(tmp_path: Path) -> None:
    arrays = {name: array for name, array in random_arrays(nodes=1000).items() if "mask" not in name}
    arrays["y"][:500] = -1
    events: list[Event] = []
    stores = [ooc.convert(arrays, tmp_path / "0.ooc", listener=events.append)]
    said = "arrays says nothing of splits:\n  random 60/20/20, seed 0 (another one: --split random:SEED)"
    assert Note(said) in events
    stores += [ooc.convert(arrays, tmp_path / f"{seed + 1}.ooc", split=f"random:{seed}") for seed in (0, 1)]
    unsaid, same, other = (store.array("split/train").read() for store in stores)
    assert (unsaid == same).all() and (same != other).any() and not same[:500].any()
    said = "arrays: without a label (-1, NaN or nothing), and so in no split: 500 of 1,000 nodes"
    assert Note(said) in events
    with pytest.warns(RuntimeWarning, match=re.escape(said)):
        ooc.convert(arrays, tmp_path / "heard-of.ooc")
    for store in stores:
        assert sum(store.split_sizes.values()) == 500 and 250 < store.split_sizes["train"] < 350


def test_features_are_normalised_by_the_least_of_all(tmp_path: Path) -> None:
    """PyG's rule, with negative entries, rows that sum to less than one, and any number of blocks."""
    arrays = random_arrays(nodes=3000, edges=10, features=4)
    arrays["x"][7] = arrays["x"].min()
    data = NormalizeFeatures()(Data(x=torch.from_numpy(arrays["x"])))
    store = ooc.convert(arrays, tmp_path / "g.ooc", row_normalize=True)
    np.testing.assert_allclose(store.array("x").read(), data.x.numpy(), rtol=1e-6)
    half = ooc.convert(arrays, tmp_path / "h.ooc", row_normalize=True, dtype="float16")
    np.testing.assert_allclose(half.array("x").read(), data.x.numpy(), rtol=1e-3, atol=1e-6)


class _Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path, ("/tmp",)


@pytest.mark.parametrize("part", ["graph", "allx", "ally", "test.index"])
def test_planetoid_files_run_nothing(real_graphs: Path, tmp_path: Path, part: str) -> None:
    """A pickle that names anything but what those files consist of is refused before it is made."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for file in (real_graphs / "cora" / "raw").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / f"ind.cora.{part}").write_bytes(pickle.dumps(_Attack(), protocol=2))
    with pytest.raises(SourceError, match=r"Path, which is not allowed|something else") as caught:
        ooc.convert(folder, tmp_path / "g.ooc")
    assert "\n" not in str(caught.value)
    good = (real_graphs / "cora" / "raw" / f"ind.cora.{part}").read_bytes()
    (folder / f"ind.cora.{part}").write_bytes(good[: len(good) // 2])
    with pytest.raises(SourceError):
        ooc.convert(folder, tmp_path / "g.ooc")
    (folder / f"ind.cora.{part}").unlink()
    with pytest.raises(SourceError):
        ooc.convert(folder, tmp_path / "g.ooc")
    assert not (tmp_path / "g.ooc").exists() and not (tmp_path / "g.ooc.partial").exists()
