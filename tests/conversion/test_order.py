# SPDX-License-Identifier: Apache-2.0
"""A store in hop order is the same graph, its active rows are prefixes, and budgets do not change its bytes."""

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.conversion import order as order_module
from ooc.conversion import output
from ooc.conversion import reorder as reorder_module
from ooc.conversion.budget import Shares
from ooc.conversion.order import hop_order
from ooc.conversion.reorder import reorder
from ooc.errors import BudgetError, OptionError, SourceError, StoreError
from ooc.events import Event, TaskAdvanced, TaskFinished, TaskStarted, ignore
from ooc.storage import traversal
from ooc.storage.store import SPLITS, Store
from ooc.storage.verification import verify
from ooc.storage.writer import RowScatter
from tests.conversion.arrays import Arrays, edges_of, files_of, in_order, open_descriptors, random_arrays
from tests.damage import seal
from tests.examples import examples, thorough


def _labelled(arrays: Arrays, *, train: int, others: int, seed: int = 0) -> Arrays:
    """The same graph with so many nodes in the splits."""
    place = np.random.default_rng(seed).permutation(len(arrays["x"]))
    valid = (place >= train) & (place < train + others // 2)
    test = (place >= train + others // 2) & (place < train + others)
    return arrays | {"train_mask": place < train, "val_mask": valid, "test_mask": test}


def _check_same_graph(ordered: Store, plain: Store) -> np.ndarray:
    """Equal through ``perm``; returns it. ``plain`` has its rows as in the source."""
    perm: np.ndarray = ordered.array("perm").read()
    np.testing.assert_array_equal(np.sort(perm), np.arange(plain.num_nodes))
    for side in ("in", "out"):
        np.testing.assert_array_equal(in_order(perm[edges_of(ordered, side)]), in_order(edges_of(plain, side)))
    for name in ("x", "y", *(f"split/{split}" for split in SPLITS)):
        assert ordered.array(name).dtype == plain.array(name).dtype
        np.testing.assert_array_equal(ordered.array(name).read(), plain.array(name).read()[perm])
    assert ordered.arrays() == plain.arrays()
    same = ("num_nodes", "num_edges", "num_classes", "undirected", "num_self_loops", "split_sizes")
    assert [ordered.attributes[name] for name in same] == [plain.attributes[name] for name in same]
    assert verify(ordered) == []
    return perm


def _seeds(store: Store, splits: tuple[str, ...]) -> np.ndarray:
    members: np.ndarray = np.any([store.array(f"split/{split}").read() for split in splits], axis=0)
    return members


def _check_prefixes(store: Store, hops: list[int], train_hops: list[int]) -> None:
    """Scored rows' sets are prefixes, training rows' lie in prefixes; each prefix has its in-neighbours in the next."""
    depth = max(len(hops), len(train_hops)) + 1
    scoring, training = ([counts[min(d, len(counts) - 1)] for d in range(depth + 1)] for counts in (hops, train_hops))
    assert training[0] == store.split_sizes["train"] and scoring[0] == sum(store.split_sizes.values())
    from_scored, from_trained = (
        traversal.nearest(store, [_seeds(store, splits)], depth) for splits in (SPLITS, SPLITS[:1])
    )
    sources, targets = edges_of(store)
    for d in range(depth + 1):
        scored, trained = from_scored <= d, from_trained <= d
        assert scored[: scoring[d]].all() and not scored[scoring[d] :].any()
        assert not trained[training[d] :].any() and training[d] <= scoring[d]
        for prefixes in (scoring, training):
            assert d == depth or (sources[targets < prefixes[d]] < prefixes[d + 1]).all()


@settings(max_examples=examples(8), deadline=None)
@given(
    nodes=st.integers(1, 60),
    edges=st.integers(0, 120),
    seed=st.integers(0, 2**32),
    train=st.integers(1, 60),
    others=st.integers(0, 30),
    symmetrize=st.booleans(),
    block=st.sampled_from([3, 16, 1 << 17]),
)
def test_the_graph_is_the_same_and_active_rows_are_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    nodes: int,
    edges: int,
    seed: int,
    train: int,
    others: int,
    symmetrize: bool,
    block: int,
) -> None:
    """With duplicates, self-loops and isolated nodes; whether or not splits cover all nodes."""
    folder = tmp_path_factory.mktemp("order")
    arrays = _labelled(random_arrays(nodes=nodes, edges=edges, seed=seed), train=train, others=others, seed=seed)
    plain = ooc.convert(arrays, folder / "plain.ooc", symmetrize=symmetrize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_ROWS", block)
        patch.setattr(reorder_module, "_WINDOW_ROWS", block)
        ordered = reorder(plain, folder / "hop.ooc")
    perm = _check_same_graph(ordered, plain)

    near, nearest = (_seeds(plain, splits) for splits in (SPLITS[:1], SPLITS))
    from_train, from_any = (traversal.nearest(plain, [seeds], 250) for seeds in (near, nearest))
    np.testing.assert_array_equal(perm, np.lexsort((from_train > from_any, from_any)))
    _check_prefixes(ordered, ordered.attributes["hops"], ordered.attributes["train_hops"])
    assert sorted(path.name for path in folder.iterdir()) == ["hop.ooc", "plain.ooc"]


@pytest.mark.parametrize("symmetrize", thorough([False, True], False))
def test_tiny_budgets_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetrize: bool) -> None:
    """Even a memory of five edges, and rows whose edges come in many pieces."""
    arrays = _labelled(random_arrays(nodes=3000, edges=4000), train=30, others=100)
    arrays["edge_index"][0, :1500] = 77
    plain = ooc.convert(arrays, tmp_path / "plain.ooc", symmetrize=symmetrize)
    ample = reorder(plain, tmp_path / "ample.ooc")
    assert len(ample.attributes["hops"]) > 2
    tiny = Shares(sort_keys=50, edges=7, feature_rows=11, label_rows=130)
    monkeypatch.setattr(reorder_module, "divide", lambda *args, **kwargs: tiny)
    scarce = reorder(plain, tmp_path / "scarce.ooc")
    assert files_of(scarce.path) == files_of(ample.path)
    _check_same_graph(scarce, plain)


def test_converting_in_order_is_converting_and_reordering(tmp_path: Path) -> None:
    source = "synthetic:nodes=5000,edges=9000,features=7,classes=3,labelled=0.02"
    plain = ooc.convert(source, tmp_path / "plain.ooc")
    ordered = ooc.convert(source, tmp_path / "hop.ooc", order="hop")
    _check_same_graph(ordered, plain)
    assert (plain.attributes["order"], ordered.attributes["order"]) == ("none", "hop")
    assert ordered.source == {**plain.source, "order": "hop"} and ordered.name == "hop"
    before = files_of(ordered.path), ordered.attributes
    again = reorder(tmp_path / "plain.ooc")
    assert again.path == plain.path and again.name == "plain"
    assert files_of(again.path) == before[0]
    for name in ("hops", "train_hops"):
        assert again.attributes[name] == before[1][name]
    # Ordering what is in order changes nothing, original ids included.
    assert files_of(reorder(again, tmp_path / "twice.ooc").path) == before[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hop.ooc", "plain.ooc", "twice.ooc"]


def test_an_order_composes_with_the_one_before(tmp_path: Path) -> None:
    """``perm`` goes on naming original ids when the store was not in their order."""
    arrays = _labelled(random_arrays(nodes=200, edges=300), train=5, others=20)
    plain = ooc.convert(arrays, tmp_path / "plain.ooc")
    shuffled = np.random.default_rng(1).permutation(200)
    store = ooc.convert(arrays, tmp_path / "odd.ooc")
    scatter = RowScatter(tmp_path, "perm", (200,), np.int64)
    scatter.put(np.arange(200), shuffled)
    scatter.close()
    shutil.rmtree(store.path / "perm")
    (tmp_path / "perm").rename(store.path / "perm")
    rows = reorder(plain, tmp_path / "a.ooc").array("perm").read()
    np.testing.assert_array_equal(reorder(store, tmp_path / "b.ooc").array("perm").read(), shuffled[rows])


def test_rows_further_than_126_steps_are_last_and_active_in_deeper_models(tmp_path: Path) -> None:
    line = np.stack([np.arange(399), np.arange(1, 400)])
    train = np.arange(400) == 350
    arrays = random_arrays(nodes=400, edges=0) | {"edge_index": line, "train_mask": train}
    arrays |= {"val_mask": np.arange(400) == 360, "test_mask": np.zeros(400, dtype=np.bool_)}
    ordered = reorder(ooc.convert(arrays, tmp_path / "g.ooc"))
    perm = ordered.array("perm").read()
    pairs = [row for d in range(10) for row in (350 - d, 360 - d)]
    np.testing.assert_array_equal(perm, [*pairs, *range(340, 223, -1), *range(224), *range(361, 400)])
    hops, train_hops = ordered.attributes["hops"], ordered.attributes["train_hops"]
    assert hops == [*range(2, 21, 2), *range(21, 138), 400]
    assert train_hops == [*range(1, 20, 2), *range(21, 138), 400]
    assert (len(hops), len(train_hops)) == (128, 128)


@pytest.mark.parametrize(
    "task", ["following in-edges", "reading in-edges", "writing ordered out-edges", "moving y", "moving x"]
)
def test_an_interruption_leaves_nothing_or_what_is_gone_on_with(tmp_path: Path, task: str) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and event.task == task:
            raise KeyboardInterrupt

    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    files, before = files_of(store.path), open_descriptors()
    for out in (None, tmp_path / "h.ooc"):
        with pytest.raises(KeyboardInterrupt):
            reorder(store, out, on_cancel="remove", listener=interrupt)
        assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"] and open_descriptors() <= before
    assert files_of(store.path) == files
    if not task.startswith("reading"):  # which a conversion has too, before
        with pytest.raises(KeyboardInterrupt):
            ooc.convert(random_arrays(), tmp_path / "i.ooc", order="hop", listener=interrupt)
        assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"] and open_descriptors() <= before
    whole = files_of(reorder(store, tmp_path / "whole.ooc").path)
    for out in (tmp_path / "h.ooc", None):
        with pytest.raises(KeyboardInterrupt):
            reorder(store, out, listener=interrupt)
        assert files_of(reorder(store, out).path) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.ooc", "h.ooc", "whole.ooc"]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="cannot be written: No space left"):
        reorder(store)
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**4, 10**4))
    with pytest.raises(BudgetError, match=r"ordering the rows of g needs .* of disk in .*, 10\.0 KB are free"):
        reorder(store)
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"]


def test_budgets_too_small_say_the_least_that_does(tmp_path: Path) -> None:
    store = ooc.convert(random_arrays(nodes=5000, edges=60000), tmp_path / "g.ooc")
    with pytest.raises(
        BudgetError, match=r"ordering the rows of g needs .* to hold the order.* host_budget='\d+M"
    ) as error:
        reorder(store, tmp_path / "h.ooc", host_budget="10M")
    assert reorder(store, tmp_path / "h.ooc", host_budget=str(error.value).split("'")[-2]).num_nodes == 5000
    source = "synthetic:nodes=2000000,edges=10,features=1,classes=2"
    with pytest.raises(BudgetError, match="ordering the rows of synthetic needs"):
        ooc.convert(source, tmp_path / "i.ooc", host_budget="40M", order="hop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.ooc", "h.ooc"]


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    for order in ("none", "degree"):
        with pytest.raises(OptionError, match=order):
            reorder(store, order=order)
    with pytest.raises(OptionError, match="'degree' is not one of none, hop"):
        ooc.convert(random_arrays(), tmp_path / "h.ooc", order="degree")
    with pytest.raises(SourceError, match="exists; give force=True"):
        reorder(store, store.path)
    with pytest.raises(StoreError, match="no store"):
        reorder(tmp_path / "none.ooc")
    with pytest.raises(SourceError, match="does not exist"):
        reorder(store, tmp_path / "none" / "h.ooc")
    assert reorder(store, store.path, force=True).attributes["order"] == "hop"
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"]


def test_a_linked_store_is_replaced_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    ooc.convert(random_arrays(), tmp_path / "disk" / "g.ooc")
    (tmp_path / "g.ooc").symlink_to(tmp_path / "disk" / "g.ooc")
    reorder(tmp_path / "g.ooc")
    assert (tmp_path / "g.ooc").is_symlink() and ooc.open(tmp_path / "g.ooc").attributes["order"] == "hop"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["g.ooc"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_store_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """Where two folders can change names at once; where they cannot, the store is replaced all the same."""
    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    rename, there = Path.rename, ["none"]

    def watching(path: Path, target: Path) -> Path:
        found = rename(path, target)
        order = ooc.open(store.path).attributes["order"] if store.path.exists() else ""
        if order != there[-1]:
            there.append(order)
        return found

    monkeypatch.setattr(Path, "rename", watching)
    if not exchange:
        monkeypatch.setattr(output, "exchanged", lambda first, second: False)
    assert reorder(store).attributes["order"] == "hop"
    assert there == (["none"] if exchange else ["none", "", "hop"])
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"]


def test_a_damaged_topology_is_an_error_of_one_line(tmp_path: Path) -> None:
    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    path = store.array("out/indices").chunk_path(0)
    for name in ("in", "out"):
        path = store.array(f"{name}/indices").chunk_path(0)
        values = np.fromfile(path, dtype=np.int32)
        good, values[3] = values[3], 60
        values.tofile(path)
        seal(store.array(f"{name}/indices"))
        with pytest.raises(StoreError, match=f"{name}/indices: there are indices outside 0 to 59"):
            reorder(store)
        values[3] = good
        values.tofile(path)
        seal(store.array(f"{name}/indices"))
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"]


def test_progress_is_told_in_full(tmp_path: Path) -> None:
    events: list[Event] = []
    store = ooc.convert(random_arrays(), tmp_path / "g.ooc")
    reorder(store, listener=events.append)
    started = [(event.task, event.total) for event in events if isinstance(event, TaskStarted)]
    assert [task for task, _ in started] == [event.task for event in events if isinstance(event, TaskFinished)]
    last = {event.task: event.done for event in events if isinstance(event, TaskAdvanced)}
    assert last == dict(started)


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Peak resident memory beyond what imports take, on a store several times the budget."""
    budget = 40_000_000
    source = "synthetic:nodes=300000,edges=3000000,features=120,classes=5,labelled=0.01"
    store = ooc.convert(source, tmp_path / "g.ooc")
    code = (
        "import sys, ooc, ooc.conversion.reorder, numpy.random, zarr\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))\n"
        "before = peak()\n"
        "ooc.conversion.reorder.reorder(sys.argv[1], host_budget=int(sys.argv[2]))\n"
        "print(peak() - before)\n"
    )
    arguments = [sys.executable, "-c", code, str(store.path), str(budget)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert store.nbytes > 4 * budget
    assert int(done.stdout) < budget


def test_an_order_without_edges_is_by_split(tmp_path: Path) -> None:
    arrays = _labelled(random_arrays(nodes=50, edges=0), train=4, others=6)
    order = hop_order(ooc.convert(arrays, tmp_path / "g.ooc"), ignore)[""]
    assert (order.hops, order.train_hops) == ((10,), (4, 10))
    assert sorted(order.places[arrays["train_mask"]].tolist()) == [0, 1, 2, 3]
    assert sorted(order.places[arrays["val_mask"] | arrays["test_mask"]].tolist()) == [*range(4, 10)]
