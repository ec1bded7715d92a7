# SPDX-License-Identifier: Apache-2.0
"""Budgets, interruption and existing outputs."""

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import ooc
from ooc.conversion import budget
from ooc.conversion.output import Journal
from ooc.conversion.reorder import reorder
from ooc.errors import BudgetError, OptionError, SourceError, StoreError
from ooc.events import Event, Note, TaskAdvanced, TaskFinished, TaskStarted
from ooc.sources import node_ids
from tests.conversion.arrays import files_of, open_descriptors, random_arrays
from tests.examples import thorough

_SYNTHETIC = "synthetic:nodes=5000,edges=20000,features=40,classes=4"


def test_a_budget_too_small_says_the_least_that_does(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", **random_arrays(nodes=5000, edges=60000, features=300))
    with pytest.raises(BudgetError, match=r"needs .* to hold the source.* give host_budget='\d+M") as caught:
        ooc.convert(tmp_path / "g.npz", tmp_path / "g.ooc", host_budget="10M")
    least = str(caught.value).split("'")[-2]
    assert [path.name for path in tmp_path.iterdir()] == ["g.npz"]
    scarce = ooc.convert(tmp_path / "g.npz", tmp_path / "g.ooc", host_budget=least)
    ample = ooc.convert(tmp_path / "g.npz", tmp_path / "h.ooc", host_budget="2G")
    assert files_of(scarce.path) == files_of(ample.path)
    with pytest.raises(BudgetError, match="unzip it to a folder"):
        ooc.convert(tmp_path / "g.npz", tmp_path / "i.ooc", host_budget="1M")


@pytest.mark.parametrize("kind", thorough(["synthetic", "npy"], "synthetic"))
def test_memory_stays_within_the_budget(tmp_path: Path, kind: str) -> None:
    """Peak resident memory beyond what imports take, on data several times the budget."""
    budget = 40_000_000
    source = "synthetic:nodes=300000,edges=3000000,features=120,classes=5"
    if kind == "npy":
        (tmp_path / "g").mkdir()
        arrays = random_arrays(nodes=300_000, edges=3_000_000, features=1)
        for name, array in (arrays | {"x": arrays["x"].repeat(120, axis=1)}).items():
            np.save(tmp_path / "g" / f"{name}.npy", array)
        source = str(tmp_path / "g")
    code = (
        "import sys, ooc, ooc.conversion.conversion, numpy.random\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))\n"
        "before = peak()\n"
        "store = ooc.convert(sys.argv[1], sys.argv[2], host_budget=int(sys.argv[3]))\n"
        "print(peak() - before, store.nbytes)\n"
    )
    arguments = [sys.executable, "-c", code, source, str(tmp_path / "g.ooc"), str(budget)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    used, size = (int(word) for word in done.stdout.split())
    assert size > 4 * budget
    assert used < budget


def test_a_control_group_bounds_what_is_taken_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python as on the command line: half of what the group leaves free."""
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 30_000_000)
    with pytest.raises(BudgetError, match=r"the host budget is 15\.0 MB"):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 300_000_000)
    store = ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 30_000_000)
    with pytest.raises(BudgetError, match=r"the host budget is 15\.0 MB"):
        reorder(store)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(BudgetError, match=r"of disk in .*, 1\.00 MB are free"):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")
    assert not list(tmp_path.iterdir())


def test_the_disk_estimate_covers_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What free space the check accepts is at least the store's final size."""
    usage = namedtuple("usage", "total used free")
    for number, symmetrize in enumerate((False, True)):
        source = "synthetic:nodes=200000,edges=900000,features=20,classes=4"
        store = ooc.convert(source, tmp_path / f"{number}.ooc", symmetrize=symmetrize, self_loops=True)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, free=store.nbytes: usage(free, 0, int(free * 0.98)))
            with pytest.raises(BudgetError):
                ooc.convert(source, tmp_path / "again.ooc", symmetrize=symmetrize, self_loops=True)


@pytest.mark.parametrize("room", [0, 60_000, 200_000, 400_000, 1_000_000])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """In any stage: labels, edges being sorted, each direction, features."""
    write, written = os.pwrite, 0

    def filling(descriptor: int, data: memoryview, at: int) -> int:
        nonlocal written
        written += len(data)
        if written > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(StoreError, match="cannot be written: No space left"):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")
    assert not list(tmp_path.iterdir())


def test_a_disk_too_full_for_ids_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node_ids, "flush", full)
    (path := tmp_path / "e.csv").write_text("src,dst\na,b\nb,c\n")
    with pytest.raises(StoreError, match="cannot be written: No space left"):
        ooc.convert(path, tmp_path / "g.ooc", features="random:2", labels="random:2")
    assert [path.name for path in tmp_path.iterdir()] == ["e.csv"]


def test_a_disk_too_full_for_the_first_journal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Journal) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "save", full)
    with pytest.raises(StoreError, match="cannot be written: No space left"):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["reading edges", "writing in-edges", "writing out-edges", "writing features"])
def test_cancelled_work_is_removed_or_kept_as_asked(tmp_path: Path, task: str) -> None:
    """Kept, the same call goes on, to the bytes of a conversion that was never interrupted."""

    def interrupt(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and event.task == task:
            raise KeyboardInterrupt

    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc", on_cancel="remove", listener=interrupt)
    assert not list(tmp_path.iterdir()) and open_descriptors() <= before
    with pytest.raises(KeyboardInterrupt):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc", listener=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc.partial"] and open_descriptors() <= before
    events: list[Event] = []
    store = ooc.convert(_SYNTHETIC, tmp_path / "g.ooc", listener=events.append)
    assert any(isinstance(event, Note) and event.text.startswith("going on") for event in events)
    assert ("reading edges" in [getattr(event, "task", "") for event in events]) == (task == "reading edges")
    assert files_of(store.path) == files_of(ooc.convert(_SYNTHETIC, tmp_path / "h.ooc").path)
    with pytest.raises(OptionError, match="on_cancel 'maybe' is not one of keep, remove"):
        ooc.convert(_SYNTHETIC, tmp_path / "i.ooc", on_cancel="maybe")


def test_cancelled_work_on_arrays_in_memory_is_removed(tmp_path: Path) -> None:
    """Another process could not know whether it has the same arrays."""

    def interrupt(event: Event) -> None:
        if isinstance(event, TaskFinished) and event.task == "writing in-edges":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ooc.convert(random_arrays(), tmp_path / "g.ooc", listener=interrupt)
    assert not list(tmp_path.iterdir())


def test_two_conversions_to_one_place_do_not_meet(tmp_path: Path) -> None:
    def second(event: Event) -> None:
        if isinstance(event, TaskFinished) and event.task == "reading edges":
            with pytest.raises(SourceError, match=rf"another process \({os.getpid()}\) is converting to "):
                ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")

    assert ooc.convert(_SYNTHETIC, tmp_path / "g.ooc", listener=second).num_edges == 20000


def test_an_existing_store_is_replaced_only_by_force(tmp_path: Path) -> None:
    ooc.convert(random_arrays(), tmp_path / "g.ooc")
    with pytest.raises(SourceError, match="exists; give force=True"):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")
    with pytest.raises(SourceError, match="no file or folder"):
        ooc.convert(tmp_path / "none", tmp_path / "g.ooc", force=True)
    assert ooc.open(tmp_path / "g.ooc").num_nodes == 60
    assert ooc.convert(_SYNTHETIC, tmp_path / "g.ooc", force=True).num_nodes == 5000
    assert [path.name for path in tmp_path.iterdir()] == ["g.ooc"]


def test_force_never_removes_what_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("years")
    for name in ("work", "file"):
        with pytest.raises(SourceError, match="no store"):
            ooc.convert(_SYNTHETIC, tmp_path / name, force=True)
    monkeypatch.chdir(tmp_path / "work")
    for name in (".", "..", "/"):
        with pytest.raises(SourceError, match="no store"):
            ooc.convert(_SYNTHETIC, name, force=True)
    assert (tmp_path / "work" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "years"


def test_folders_that_cannot_take_the_output_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        ooc.convert(_SYNTHETIC, tmp_path / "none" / "g.ooc")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="does not exist"):
        ooc.convert(_SYNTHETIC, tmp_path / "loop" / "g.ooc")
    with pytest.raises(SourceError, match=r"cannot be made|not writable"):
        ooc.convert(_SYNTHETIC, "/proc/g.ooc")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SourceError, match="not writable"):
        ooc.convert(_SYNTHETIC, tmp_path / "g.ooc")


def test_the_output_is_named_after_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ooc.convert(_SYNTHETIC).path == tmp_path / "synthetic.ooc"
    np.savez("mine.npz", **random_arrays())
    assert ooc.convert("mine.npz").path == tmp_path / "mine.ooc"


def test_progress_is_told_in_full(tmp_path: Path) -> None:
    events: list[Event] = []
    ooc.convert(_SYNTHETIC, tmp_path / "g.ooc", row_normalize=True, listener=events.append)
    started = {event.task: event.total for event in events if isinstance(event, TaskStarted)}
    assert list(started) == [event.task for event in events if isinstance(event, TaskFinished)]
    for task, total in started.items():
        done = [event.done for event in events if isinstance(event, TaskAdvanced) and event.task == task]
        assert done == sorted(done) and done[-1] == total
