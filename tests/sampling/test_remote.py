# SPDX-License-Identifier: Apache-2.0
"""PyG's loaders read a store: every tensor and edge by original ids, whatever the order of the rows."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import ooc
from ooc.errors import StoreError
from ooc.sampling.remote import StoreFeatures, StoreGraph
from ooc.storage.store import Store
from tests.conversion.arrays import in_order, open_descriptors, random_arrays
from tests.examples import thorough

_ARRAYS = random_arrays(nodes=3000, edges=20_000, features=33)
Backend = tuple[StoreFeatures, StoreGraph]


@pytest.fixture(scope="module", params=thorough(["none", "hop"], "none"))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    out = tmp_path_factory.mktemp("remote") / "g.ooc"
    return ooc.convert(_ARRAYS, out, order=request.param)


@pytest.fixture
def backend(store: Store) -> Backend:
    return ooc.remote_backend(store)


def test_tensors_are_those_of_the_source(backend: Backend) -> None:
    features, _ = backend
    assert [attr.attr_name for attr in features.get_all_tensor_attrs()] == [
        *("x", "y", "train_mask", "val_mask", "test_mask")
    ]
    for attr in features.get_all_tensor_attrs():
        whole = features.get_tensor(group_name=None, attr_name=attr.attr_name, index=None)
        np.testing.assert_array_equal(whole.numpy(), _ARRAYS[attr.attr_name])
        assert features.get_tensor_size(attr) == tuple(whole.shape)


@pytest.mark.parametrize("kind", ["tensor", "slice", "mask", "empty"])
def test_rows_are_asked_for_in_every_way(backend: Backend, kind: str) -> None:
    features, _ = backend
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3000, 500)
    index: Any = {
        "tensor": torch.from_numpy(ids),
        "slice": slice(17, 2900, 13),
        "mask": torch.from_numpy(rng.random(3000) < 0.2),
        "empty": torch.empty(0, dtype=torch.long),
    }[kind]
    wanted = _ARRAYS["x"][index if kind == "slice" else index.numpy()]
    np.testing.assert_array_equal(features.get_tensor(None, "x", index).numpy(), wanted)


def test_edges_are_those_of_the_source(backend: Backend) -> None:
    _, graph = backend
    row, col, perm = graph.coo()
    assert perm is None
    np.testing.assert_array_equal(in_order(torch.stack([row, col]).numpy()), in_order(_ARRAYS["edge_index"]))
    sources, starts = graph.get_edge_index(graph.get_all_edge_attrs()[0])
    assert sources.dtype == starts.dtype == torch.int64 and len(starts) == 3001
    in_degrees = np.bincount(_ARRAYS["edge_index"][1], minlength=3000)
    np.testing.assert_array_equal(starts.diff().numpy(), in_degrees)


class _AllNeighbours(BaseSampler):
    """One step along all in-edges, from what a graph store hands over: PyG's own sampler needs pyg-lib."""

    def __init__(self, graph: StoreGraph) -> None:
        self.sources, self.starts, _ = graph.csc()

    def sample_from_nodes(self, inputs: NodeSamplerInput, **options: Any) -> SamplerOutput:
        seeds = inputs.node
        sources = [self.sources[self.starts[seed] : self.starts[seed + 1]] for seed in seeds.tolist()]
        counts = torch.tensor([len(found) for found in sources])
        node = torch.cat([seeds, torch.cat(sources).unique()])
        node = torch.from_numpy(np.array(list(dict.fromkeys(node.tolist()))))
        place = {value: at for at, value in enumerate(node.tolist())}
        row = torch.tensor([place[value] for value in torch.cat(sources).tolist()], dtype=torch.long)
        col = torch.arange(len(seeds)).repeat_interleave(counts)
        return SamplerOutput(node=node, row=row, col=col, edge=None, batch=None, metadata=(inputs.input_id, None))

    def sample_from_edges(self, *inputs: Any, **options: Any) -> SamplerOutput:
        raise NotImplementedError("only nodes are asked for")


def test_a_loader_of_pygs_makes_the_batches_of_the_graph_in_memory(backend: Backend) -> None:
    seeds = torch.arange(0, 3000, 7)
    loader = NodeLoader(backend, node_sampler=_AllNeighbours(backend[1]), input_nodes=seeds, batch_size=50)
    seen = []
    for batch in loader:
        assert isinstance(batch, Data)
        node = batch.n_id.numpy()
        np.testing.assert_array_equal(batch.x.numpy(), _ARRAYS["x"][node])
        np.testing.assert_array_equal(batch.y.numpy(), _ARRAYS["y"][node])
        np.testing.assert_array_equal(batch.train_mask.numpy(), _ARRAYS["train_mask"][node])
        edges = node[batch.edge_index.numpy()]
        chosen = np.isin(_ARRAYS["edge_index"][1], node[: batch.batch_size])
        np.testing.assert_array_equal(in_order(edges), in_order(_ARRAYS["edge_index"][:, chosen]))
        seen += node[: batch.batch_size].tolist()
    assert seen == seeds.tolist()


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
def test_the_neighbour_loader_takes_the_backend(backend: Backend) -> None:
    """It samples where the packages that PyG samples with are there, and says that they are missing otherwise."""
    loader = NeighborLoader(backend, num_neighbors=[-1], input_nodes=torch.arange(20), batch_size=20)
    assert loader.node_sampler.num_nodes == {None: 3000} or loader.node_sampler.num_nodes == 3000
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        batch = next(iter(loader))
        np.testing.assert_array_equal(batch.x.numpy(), _ARRAYS["x"][batch.n_id.numpy()])
    else:
        with pytest.raises(ImportError, match="requires either 'pyg-lib' or 'torch-sparse'"):
            next(iter(loader))


def test_what_is_not_there_is_said(backend: Backend, store: Store) -> None:
    features, graph = backend
    assert len(features) == 5 and features.get_tensor_size(group_name=None, attr_name="z") is None
    assert features.get_tensor(group_name=None, attr_name="z", index=None) is None  # as PyG's data gives it
    with pytest.raises(KeyError):
        graph.get_edge_index(edge_type=("a", "to", "b"), layout="csc")
    with pytest.raises(KeyError):
        graph.get_edge_index(edge_type=None, layout="coo")
    assert features.get_tensor_size(group_name="paper", attr_name="x") is None
    with pytest.raises(IndexError, match="x of the node 3000 of 3000"):
        features.get_tensor(None, "x", torch.tensor([1, 3000]))
    for change in (
        lambda: features.put_tensor(torch.zeros(1), None, "x", None),
        lambda: features.remove_tensor(None, "x", None),
        lambda: graph.put_edge_index((torch.zeros(1), torch.zeros(1)), edge_type=None, layout="coo"),
        lambda: graph.remove_edge_index(edge_type=None, layout="coo"),
    ):
        with pytest.raises(StoreError, match="cannot be changed, only read"):
            change()


def test_features_without_their_zeros_are_read_with_them(tmp_path: Path) -> None:
    arrays = random_arrays(nodes=60, edges=200) | {"x": np.eye(60, dtype=np.float32)}
    store = ooc.convert(arrays, tmp_path / "g.ooc", order="hop")
    assert store.sparse_features is not None
    ids = torch.tensor([7, 3, 59, 7])
    assert ooc.remote_backend(store)[0].get_tensor(None, "x", ids).numpy().argmax(axis=1).tolist() == ids.tolist()
    del arrays["x"]
    data = Data(**{name: torch.from_numpy(arrays[name]) for name in ("edge_index", "y", "train_mask")}, num_nodes=60)
    features, _ = ooc.remote_backend(ooc.convert(data, tmp_path / "bare.ooc"))
    names = [attr.attr_name for attr in features.get_all_tensor_attrs()]
    assert names == ["y", "train_mask", "val_mask", "test_mask"]


def test_threads_read_at_once_and_leave_nothing_open(backend: Backend) -> None:
    features, _ = backend
    before, right = open_descriptors(), []

    def read(seed: int) -> None:
        ids = np.random.default_rng(seed).integers(0, 3000, 400)
        right.append(np.array_equal(features.get_tensor(None, "x", torch.from_numpy(ids)), _ARRAYS["x"][ids]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8 and open_descriptors() <= before


def test_importing_ooc_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import ooc, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(ooc.__file__).parent.parent)


@pytest.mark.parametrize("order", ["none", "hop"])
def test_what_edges_carry_is_found_by_their_places(tmp_path: Path, order: str) -> None:
    """``e_id`` of a batch is a place among the edges as the graph hands them over: each carries its own there."""
    arrays = random_arrays(nodes=200, edges=900)
    number = np.arange(900)
    store = ooc.convert(
        arrays | {"edge_weight": number + 0.5, "edge_attr": np.stack([number, -number], axis=1)},
        tmp_path / "g.ooc",
        order=order,
    )
    features, graph = ooc.remote_backend(store)
    row, starts = graph.get_edge_index(None, "csc")
    column = np.repeat(np.arange(200), np.diff(starts.numpy()))
    places = torch.from_numpy(np.random.default_rng(0).integers(0, 900, 300))
    weight = features.get_tensor(None, "edge_weight", places).numpy()
    of_source = (weight - 0.5).astype(np.int64)
    found = np.stack([row.numpy(), column])[:, places.numpy()]
    np.testing.assert_array_equal(found, arrays["edge_index"][:, of_source])
    attr = features.get_tensor(None, "edge_attr", places).numpy()
    np.testing.assert_array_equal(attr, np.stack([of_source, -of_source], axis=1))
    assert len(np.unique(features.get_tensor(None, "edge_weight", None).numpy())) == 900
    with pytest.raises(IndexError, match="edge_attr of the edge 900 of 900"):
        features.get_tensor(None, "edge_attr", torch.tensor([900]))
    assert "edge_attr" not in [attr.attr_name for attr in features.get_all_tensor_attrs()]
