# SPDX-License-Identifier: Apache-2.0
"""``convert``: a source becomes a store, or an error says why not and nothing is left behind."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

from ooc.conversion.budget import check_disk, check_folder, default_budget_bytes, divide
from ooc.conversion.features import write_features
from ooc.conversion.formats import open_source
from ooc.conversion.labels import write_labels
from ooc.conversion.topology import write_topology
from ooc.errors import OptionError, SourceError, StoreError
from ooc.events import Listener, Note, TaskAdvanced, TaskFinished, TaskStarted, ignore
from ooc.sizes import parse_size
from ooc.storage.store import FORMAT_VERSION, PARTIAL_SUFFIX, Store, open_store, write_group

_DTYPES = ("float32", "float64", "float16")
_SCRATCH = "scratch"


def convert(
    source: Any,
    out: str | Path | None = None,
    *,
    format: str | None = None,
    symmetrize: bool | None = None,
    row_normalize: bool = False,
    self_loops: bool = False,
    dtype: str = "float32",
    split: int | str | None = None,
    host_budget: int | str | None = None,
    force: bool = False,
    listener: Listener = ignore,
) -> Store:
    """Convert ``source`` to the store ``out`` and open it.

    ``source``: a path or ``"synthetic:…"`` (see ``docs/formats.md``), a PyG ``Data``, or a dictionary of
    numpy arrays named as in the generic format. ``out`` defaults to NAME.ooc in the current folder.

    ``format``: what the source is, instead of finding out. ``symmetrize``: add each edge's reverse and drop
    duplicates (None: as is usual for the format). ``row_normalize``: PyG's NormalizeFeatures.
    ``self_loops``: add one to each node that has none. ``dtype`` of the features. ``split``: the column of
    two-dimensional masks, or ``"random[:SEED]"``. ``host_budget``: bytes to work in (default: half of
    what is available). ``force``: replace an existing store.

    Raises SourceError, BudgetError, OptionError or StoreError, each with one line. Until the end everything
    is in ``out`` + ``.partial``, which goes away with any error or interruption.
    """
    if dtype not in _DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    budget = default_budget_bytes() if host_budget is None else parse_size(host_budget, name="host budget")
    graph = open_source(source, format=format, split=split, budget_bytes=budget)
    if out is None and not isinstance(source, str | Path):
        raise OptionError("converting an object needs an output path")
    target = Path(f"{graph.name}.ooc") if out is None else Path(out)
    target = target.parent.resolve() / target.name if target.name else target.resolve()
    shares = divide(graph, budget)
    doubled = graph.symmetrize if symmetrize is None else symmetrize
    check_folder(target.parent)
    _check_target(target, force=force)
    for note in graph.notes:
        listener(Note(note))
    with _partial(target, force=force, listener=listener) as folder:
        check_disk(graph, folder, dtype=dtype, symmetrize=doubled, self_loops=self_loops)
        for group in ("split", "in") if doubled else ("split", "in", "out"):
            write_group(folder / group, {})
        labels = write_labels(graph, folder, block_rows=shares.label_rows)
        topology = write_topology(
            graph,
            folder,
            scratch=folder / _SCRATCH,
            symmetrize=doubled,
            self_loops=self_loops,
            shares=shares,
            listener=listener,
        )
        write_features(
            graph,
            folder,
            dtype=dtype,
            row_normalize=row_normalize,
            block_rows=shares.feature_rows,
            listener=listener,
        )
        options = {
            "symmetrize": doubled,
            "row_normalize": row_normalize,
            "self_loops": self_loops,
            "dtype": dtype,
        }
        attributes = {
            "ooc_format": FORMAT_VERSION,
            "name": target.name.removesuffix(".ooc"),
            "num_nodes": graph.num_nodes,
            "num_edges": topology.num_edges,
            "num_features": graph.num_features,
            "num_classes": labels.num_classes,
            "undirected": topology.undirected,
            "num_self_loops": topology.num_self_loops,
            "split_sizes": labels.split_sizes,
            "order": "none",
            "source": {"what": graph.name, "format": graph.format, **graph.description, "options": options},
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": True,
        }
        write_group(folder, attributes)
    return open_store(target)


def _check_target(target: Path, *, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not force:
        raise SourceError(f"{target} exists; give --force to replace it, or another output")
    if not (target / "zarr.json").is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise SourceError(f"{target} exists and is no store; it is not replaced even with --force")


@contextmanager
def _partial(target: Path, *, force: bool, listener: Listener) -> Iterator[Path]:
    """The folder to write to; it becomes ``target`` at the end, and is removed on any error."""
    folder = target.with_name(target.name + PARTIAL_SUFFIX)
    with _locked(folder, target):
        try:
            for left in folder.iterdir():  # By a conversion that was killed: nobody holds the lock.
                _remove(left)
            yield folder
            rmtree(folder / _SCRATCH, ignore_errors=True)
            _sync(folder, listener)
            _replace(folder, target, force=force)
        except OSError as error:
            where = error.filename or folder
            raise StoreError(f"{where} cannot be written: {error.strerror or error}") from error
        finally:
            rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Make ``folder`` and keep any other conversion out of it for as long as this process lives."""
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SourceError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another conversion may have finished, and renamed or removed the folder, since it was opened.
            held = folder.exists() and folder.samefile(f"/proc/self/fd/{descriptor}")
        except BlockingIOError:
            held = False
        if not held:
            raise SourceError(f"another conversion to {target} is under way")
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        rmtree(path)
    else:
        path.unlink()


def _sync(folder: Path, listener: Listener) -> None:
    """Have everything on the disk before the store gets its name."""
    files = [*folder.rglob("*"), folder]
    task = "flushing to disk"
    listener(TaskStarted(task, len(files), "files"))
    for done, file in enumerate(files, start=1):
        _flush(file)
        listener(TaskAdvanced(task, done))
    listener(TaskFinished(task))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(folder: Path, target: Path, *, force: bool) -> None:
    _check_target(target, force=force)
    old = target.with_name(target.name + ".old")
    if target.exists():
        rmtree(old, ignore_errors=True)
        target.rename(old)
    folder.rename(target)
    _flush(target.parent)
    rmtree(old, ignore_errors=True)
