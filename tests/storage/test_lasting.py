# SPDX-License-Identifier: Apache-2.0
"""What must outlast a power cut is flushed before anything counts on it; files are replaced whole."""

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn.models import GCN

import ooc
from ooc.conversion.output import Journal
from ooc.storage.array import TEMPORARY_SUFFIX, open_alone, replace_file
from ooc.storage.writer import ArrayWriter
from ooc.train.runs.run import METRICS, RunFolder
from tests.cli.test_run import record, state


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that are flushed, in order, by their names at that time."""
    found: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda number: found.append(Path(f"/proc/self/fd/{number}").readlink()))
    return found


def test_what_a_killed_process_left_is_replaced_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.with_name(path.name + TEMPORARY_SUFFIX).write_bytes(b"x" * 1000)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_file_replaced_by_many_at_once_is_that_of_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    contents = [bytes([65 + number]) * 20_000 for number in range(8)]

    def replace(content: bytes) -> None:
        for _ in range(10):
            replace_file(path, content)

    with ThreadPoolExecutor(len(contents)) as threads:
        list(threads.map(replace, contents))
    assert path.read_bytes() in contents and list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_renamed_meanwhile_is_made_anew(tmp_path: Path) -> None:
    """Who waited for it does not write into what it has become."""
    path = tmp_path / "a"
    with open_alone(path) as first:
        first.write(b"first")
        first.flush()
        with pytest.raises(BlockingIOError):
            open_alone(path, wait=False)
        opened: list[Path] = []

        def second() -> None:
            with open_alone(path) as file:
                file.write(b"second")
                opened.append(path)

        waiting = threading.Thread(target=second)
        waiting.start()
        path.rename(tmp_path / "b")
    waiting.join()
    assert opened and path.read_bytes() == b"second" and (tmp_path / "b").read_bytes() == b"first"


def test_the_folders_around_a_new_run_are_flushed(tmp_path: Path, flushed: list[Path]) -> None:
    """Or the whole run would be gone with the entry of its folder."""
    with RunFolder.create(tmp_path / "runs" / "first", {}) as run:
        run.save(state(1))
        assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "first"} <= set(flushed)


def test_the_metrics_of_a_run_that_has_ended_are_flushed(tmp_path: Path, flushed: list[Path]) -> None:
    with RunFolder.create(tmp_path / "run", {}) as run:
        run.save(state(1))
        run.append(record(1))
        flushed.clear()
    assert tmp_path / "run" / METRICS in flushed


def test_a_mark_speaks_of_what_is_on_the_disk(tmp_path: Path, flushed: list[Path]) -> None:
    """Files, and the folders that have their names."""
    (folder := tmp_path / "g.ooc.partial").mkdir()
    journal = Journal.begin(folder / "journal.json", {"input": "a"})
    with ArrayWriter(folder / "store", "x", (3000, 2), "float32", chunk_bytes=4096) as writer:
        writer.append(np.zeros((3000, 2), np.float32))
    flushed.clear()
    journal.finish("labels", {}, now=True)
    marked = next(at for at, path in enumerate(flushed) if path.name == f"journal.json{TEMPORARY_SUFFIX}")
    assert {folder, folder / "store", *(folder / "store").rglob("*")} <= set(flushed[:marked])


def test_what_nobody_would_go_on_with_is_flushed_once(tmp_path: Path, flushed: list[Path]) -> None:
    """Data in memory cannot be told from other data by a later process."""
    data = HeteroData()
    for name in "abc":
        data[name].x = torch.ones(9, 2)
        for other in "abc":
            data[name, f"to {other}", other].edge_index = torch.arange(18).view(2, 9) % 9
    data["a"].y = torch.arange(9) % 3
    store = ooc.convert(data, tmp_path / "g.ooc")
    assert len(store.types.edges) == 9
    assert max(Counter(path for path in flushed if "store" in path.parent.parts).values()) == 1


def test_a_kept_aggregation_is_whole_before_it_has_its_name(tmp_path: Path, flushed: list[Path]) -> None:
    """The metadata of its group, too: an empty file would be no group."""
    store = ooc.convert("synthetic:nodes=300,edges=900,features=4,classes=2,seed=3", tmp_path / "g.ooc")
    torch.manual_seed(0)
    flushed.clear()
    with ooc.Trainer(GCN(4, 8, 2, 2), store, memory="8M") as trainer:
        trainer.fit(1, progress=False)
    assert (store.path / "agg").is_dir()
    assert {store.path, store.path / "agg", store.path / "agg" / "zarr.json"} <= set(flushed)
