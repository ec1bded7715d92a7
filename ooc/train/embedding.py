# SPDX-License-Identifier: Apache-2.0
"""Learnt embeddings: a row for every node, trained beside the model, with its optimizer state, on disk. In a graph with
types, each node type that has an embedding has rows of its own.

Every epoch reads the current version of each array and writes another one, so the version that the last checkpoint
names still exists whenever the process ends. With several processes, each reads and writes the rows of its share in the
same files. N nodes, D columns.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from zlib import crc32

import google_crc32c
import numpy as np
import torch

from ooc.engine.exchange import joined_checksum
from ooc.errors import OptionError, RunError, SpillError, as_error
from ooc.kernels.row_optimizers import RowOptimizer
from ooc.prefetch.spill import open_nameless
from ooc.ranks import ALONE, Ranks
from ooc.sizes import check_number, check_whole, format_size
from ooc.stages import RowStep, embedding_name
from ooc.storage.array import flush, make_folders, write_at
from ooc.storage.checksums import of_zeros
from ooc.storage.store import Store
from ooc.storage.types import Types
from ooc.storage.versioned_array import VersionedArray
from ooc.train.runs import run as run_folder

PANEL_ROWS = 4096
"""Rows that are drawn together, whatever is read or written together."""
_PANELS_BETWEEN_FLUSHES = 16
_COMPARED_BYTES = 1 << 20


class Embedding:
    """A learnt embedding: ``columns`` numbers for every node, trained like ``torch.nn.Embedding(N, columns).weight``.
    It is the input of the model, after the store's features, if there are any. In a graph with types, every node type
    without features gets this many columns; a mapping names types and their columns.

    ``optimizer`` is adam, adamw, sparseadam, adagrad or sgd, with ``options`` as in torch.optim. ``lr`` None: the
    learning rate of the model's first parameter group, epoch by epoch. Rows are drawn from a normal distribution with
    deviation ``std``, by the trainer's seed. Raises OptionError for invalid values.
    """

    def __init__(
        self,
        columns: int | Mapping[str, int],
        *,
        optimizer: str = "adam",
        lr: float | None = None,
        std: float = 1.0,
        **options: Any,
    ) -> None:
        for count in (columns.values() or [0]) if isinstance(columns, Mapping) else [columns]:
            check_whole(count, name="an embedding's columns")
        check_number(lr if lr is not None else 1, name="an embedding's learning rate")
        if lr is not None and not lr > 0:
            raise OptionError(f"an embedding's learning rate must be positive, not {lr}")
        check_number(std, name="the deviation of an embedding's first rows")
        if not std >= 0:
            raise OptionError(f"the deviation of an embedding's first rows must not be negative, not {std}")
        self.columns: int | Mapping[str, int] = columns if isinstance(columns, Mapping) else int(columns)
        self.lr, self.std = lr, std
        self.optimizer = RowOptimizer.of(optimizer, options)

    def __repr__(self) -> str:
        return f"Embedding({self.columns}, optimizer={self.optimizer.name!r}, lr={self.lr}, std={self.std})"

    def widths(self, types: Types | None) -> dict[str, int]:
        """Return the columns by node type, "" if there is only one. Raises OptionError if they do not fit the graph."""
        if types is None:
            if not isinstance(self.columns, int):
                raise OptionError("the graph has one type of nodes; give the columns of its embedding as one number")
            return {"": self.columns}
        if isinstance(self.columns, int):
            found = {name: self.columns for name, features in types.features.items() if not features}
            if not found:
                each = f"{{{next(iter(types.nodes))!r}: {self.columns}}}"
                raise OptionError(f"every type of nodes has features; name those that get an embedding, too, as {each}")
            return found
        for name in self.columns:
            if name not in types.nodes:
                raise OptionError(f"an embedding of {name!r}: the types of nodes are {', '.join(types.nodes)}")
        return {name: self.columns[name] for name in types.nodes if name in self.columns}


class LearntRows:
    """The rows of an ``embedding`` of a store's nodes, with their optimizer state: ``arrays``, by name, with the
    columns ``widths`` by node type. Raises OptionError if the embedding does not fit the store.

    ``folder``: of the run they belong to (None: of none; they end with the process). Call ``begin`` before every
    program that trains, and ``commit`` when what it has written should be read from then on. ``saved`` and
    ``kept_as_best`` keep the current versions until the next checkpoint, and until the next best epoch. For a graph
    that is only planned for, nothing is opened. ``clip_norm``: of all gradients together, including the model's.
    ``ranks``: the processes that train them; all must call ``open``, ``begin``, ``commit`` and ``load``.
    """

    def __init__(
        self,
        embedding: Embedding,
        store: Store,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        folder: Path | None = None,
        clip_norm: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.embedding, self.widths, self._ranks = embedding, embedding.widths(store.types), ranks
        self.stepping = RowStep(optimizer=embedding.optimizer, clip_norm=clip_norm)
        self._seed, self._folder = seed, folder
        self._descriptors: list[int] = []
        self._open = self._closed = False
        self.pending = False
        """Whether a program has begun to write another version that has not been committed."""
        self._saved: dict[str, int] = {}
        self._best: dict[str, int] = {}
        kind, where = str(dtype).removeprefix("torch."), Path() if folder is None else folder
        self._spaces = {embedding_name(space): space for space in self.widths}
        self.spaces = tuple(self.widths)
        """The node types that have rows."""
        self.arrays: dict[str, VersionedArray] = {}
        for rows, space in self._spaces.items():
            for name in (rows, *(f"{rows}.{state}" for state in embedding.optimizer.states)):
                shape = store.node_counts[space], self.widths[space]
                self.arrays[name] = VersionedArray(name, [where / f"{name}.0.npy"], shape, kind)

    @classmethod
    def of_run(
        cls, embedding: Embedding, store: Store, dtype: torch.dtype, run: Path, state: Mapping[str, Any] | None
    ) -> "LearntRows":
        """Return the rows of a run for reading, whose ``state()`` was saved with its weights. Raises RunError if they
        do not exist."""
        rows = cls(embedding, store, dtype, folder=(folder := run / run_folder.EMBEDDING))
        versions = _versions_of(state)
        if state is None or rows._spaces.keys().isdisjoint(versions):
            raise RunError(f"{run} names no version of the embedding that goes with its weights")
        rows.keep({space for name, space in rows._spaces.items() if name in versions})
        for name in rows._spaces:
            array = rows.arrays[name]
            array.paths = [folder / f"{name}.{versions[name]}.npy"]
            crc = _crcs_of(state, name).get(versions[name])
            array.crcs = {} if crc is None else {0: crc}
            _check_file(array, array.paths[0])
        return rows

    def keep(self, spaces: Collection[str]) -> None:
        """Keep only the rows of these node types: others take no part in the output, and would never be stepped."""
        kept = {name: space for name, space in self._spaces.items() if space in spaces}
        of_kept = [*kept, *(f"{name}.{state}" for name in kept for state in self.embedding.optimizer.states)]
        self.arrays = {name: array for name, array in self.arrays.items() if name in of_kept}
        self._spaces, self.spaces = kept, tuple(kept.values())

    # ---- files -------------------------------------------------------------------------------------------------

    def open(self, scratch: Path, *, steps_unsaved: bool) -> None:
        """Open the files, in ``scratch`` if they belong to no run, with initial rows unless a checkpoint has been
        loaded. ``steps_unsaved``: steps are made after others that are not saved. Raises SpillError if there is no
        room."""
        if self._open:
            return
        if self._closed and self._folder is None:
            raise RunError("the embedding went when the trainer was closed; train with out=, which keeps it")
        if self._folder is None and self._ranks.local_count < self._ranks.count:
            raise OptionError("processes of several machines have an embedding in the folder of a run; give out=")
        paths = self._ranks.from_first(lambda: self._make_files(scratch, steps_unsaved))
        if self._folder is not None and self._ranks.local_count < self._ranks.count:
            self._check_shared(self._folder)
        for name, array in self.arrays.items():
            array.paths = paths[name]
            if self._folder is None and self._ranks.rank:  # the files must last as long as this process uses them
                opened = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths[name]]
                self._descriptors += opened
                array.paths = [Path(f"/proc/self/fd/{descriptor}") for descriptor in opened]
        if not self._saved:
            self._fill()
        self._open = True

    def _check_shared(self, folder: Path) -> None:
        """Raise OptionError on a machine where this is another folder than on the first, as far as a new file tells."""

        def check() -> None:
            if not (folder / name).exists():
                remedy = "give an out= that all machines share"
                raise OptionError(f"{folder} is not that of {self._ranks.name(0)}, and all write to it; {remedy}")

        with NamedTemporaryFile(dir=folder) if self._ranks.rank == 0 else nullcontext() as file:
            name = self._ranks.from_first(lambda: "" if file is None else Path(file.name).name)
            self._ranks.in_all(check)

    def _versions_kept(self, name: str, steps_unsaved: bool) -> int:
        """Return how many files an array has; in a run begun with other options, at least up to the last one that it
        names."""
        in_run, last = self._folder is not None, max(self._saved.get(name, 0), self._best.get(name, 0))
        return max(1 + last, 2 + (in_run and steps_unsaved) + (in_run and name in self._spaces))

    def room_beside(self, scratch: Path, steps_unsaved: bool) -> int:
        """Return the bytes that files which do not exist yet take on the disk of ``scratch``."""
        if self._open:
            return 0
        folder = self._folder or scratch
        above = [next(one for one in (path, *path.absolute().parents) if one.exists()) for path in (folder, scratch)]
        if len({place.stat().st_dev for place in above}) > 1:
            return 0
        there = [file.stat().st_size for file in folder.rglob("*.npy")] if self._folder is not None else []
        return max(0, self._files_bytes(steps_unsaved) - sum(there))

    def _files_bytes(self, steps_unsaved: bool) -> int:
        return sum(array.file_nbytes * self._versions_kept(name, steps_unsaved) for name, array in self.arrays.items())

    def _make_files(self, scratch: Path, steps_unsaved: bool) -> dict[str, list[Path]]:
        """Create the files of all versions, and return them by array. Without a run, they are this process's, which
        others on the machine open."""
        folder, in_run = self._folder or scratch, self._folder is not None
        paths: dict[str, list[Path]] = {}
        try:
            list(make_folders(folder))
            for name, array in self.arrays.items():
                count = self._versions_kept(name, steps_unsaved)
                if in_run:
                    paths[name] = [folder / f"{name}.{version}.npy" for version in range(count)]
                    list(make_folders(paths[name][0].parent))
                else:
                    self._descriptors += (opened := [open_nameless(folder) for _ in range(count)])
                    paths[name] = [Path(f"/proc/{os.getpid()}/fd/{descriptor}") for descriptor in opened]
                for version, path in enumerate(paths[name]):
                    _make_file(path, array, anew=version not in (self._saved.get(name), self._best.get(name)))
            for made in {one[0].parent for one in paths.values()} if in_run else ():
                flush(made)
        except OSError as error:
            room = format_size(self._files_bytes(steps_unsaved))
            raise SpillError(f"{folder}: no room for the embedding, {room}: {error.strerror}") from None
        return paths

    def _fill(self) -> None:
        """Write the initial rows and optimizer state, unless zeros. With several processes, each writes a part."""
        for name, array in self.arrays.items():
            array.current = 0
            space = self._spaces.get(name)
            first = self.embedding.optimizer.states.get(name.rpartition(".")[2], 0.0)
            if space is None and not first:
                array.crcs[0] = of_zeros(array.shape[0] * array.row_bytes)
                continue
            checksum = nbytes = 0
            with array.paths[0].open("r+b", buffering=0) as file:
                for panel in (part := self._part_of(-(-array.shape[0] // PANEL_ROWS))):
                    start = panel * PANEL_ROWS
                    shape = (min(PANEL_ROWS, array.shape[0] - start), array.columns)
                    block = (
                        np.full(shape, first, array.dtype) if space is None else self.first_rows(space, panel, shape)
                    )
                    place = array.extent(array.paths[0], start, shape[0])
                    data = block.reshape(-1).view(np.uint8)
                    write_at(file.fileno(), data, place.offset)
                    checksum = google_crc32c.extend(checksum, data)
                    nbytes += block.nbytes
                    # Or the page cache would fill with unwritten pages.
                    if panel % _PANELS_BETWEEN_FLUSHES == 0 or panel == part[-1]:
                        os.fdatasync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            array.crcs[0] = joined_checksum(self._ranks, checksum, nbytes) or 0

    def _part_of(self, count: int) -> range:
        """Return this process's part of ``count`` consecutive things, divided equally."""
        rank, ranks = self._ranks.rank, self._ranks.count
        return range(count * rank // ranks, count * (rank + 1) // ranks)

    def first_rows(self, space: str, panel: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Return initial rows of a node type [R, D], the first ones of a panel of ``PANEL_ROWS``. They depend on the
        seed, the type's name and the row, not on other types."""
        dtype = self.arrays[embedding_name(space)].dtype
        generator = np.random.Generator(np.random.Philox(key=[self._seed, crc32(space.encode()) << 32 | panel]))
        rows: np.ndarray[Any, Any] = generator.standard_normal(shape, dtype=dtype.type)
        rows *= dtype.type(self.embedding.std)
        return rows

    def close(self) -> None:
        """Close the files; files that belong to no run are gone."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._closed, self._open = True, False

    # ---- versions ----------------------------------------------------------------------------------------------

    def rate(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the learning rate of the next step; ``optimizer``: the model's."""
        return float(optimizer.param_groups[0]["lr"]) if self.embedding.lr is None else self.embedding.lr

    def begin(self, *, lr: float, number: int) -> None:
        """Begin step ``number``, counted from 1, which will be computed and written. With several processes, wait until
        all have come so far, and the first has written its checkpoint."""
        self._await_all()
        self.stepping.begin(lr=lr, number=number)
        for name, array in self.arrays.items():
            taken = {array.current, self._saved.get(name), self._best.get(name)}
            array.following = next(version for version in range(len(array.paths)) if version not in taken)
        self.pending = True

    def commit(self) -> None:
        """Make what was written the version that is read from here on; in a run it is flushed to the disk, whoever has
        written it."""
        for array in self.arrays.values():
            if self._folder is not None:
                flush(array.next_path)
            array.current = array.following
        self._await_all()
        self.pending = False

    def _await_all(self) -> None:
        """Return when all processes have come so far."""
        self._ranks.gathered(torch.zeros(1))

    def state(self) -> dict[str, Any]:
        """Return the current versions for a checkpoint; call ``saved`` when that is written."""
        crcs = {name: dict(array.crcs) for name, array in self.arrays.items()}
        return {"versions": self._versions, "crcs": crcs, "optimizer": self.embedding.optimizer.name}

    def saved(self) -> None:
        """Keep the current versions, which a checkpoint names, until the next one."""
        self._saved = self._versions

    def kept_as_best(self) -> None:
        """Keep the current rows, those of the best epoch, until the next one."""
        self._best = {name: self.arrays[name].current for name in self._spaces}

    @property
    def _versions(self) -> dict[str, int]:
        return {name: array.current for name, array in self.arrays.items()}

    def load(self, state: Mapping[str, Any] | None, best: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's ``state()``, with the best epoch's rows from ``best``. Raises RunError if they
        do not exist or belong to another embedding."""
        versions = _versions_of(state)
        if state is None or versions.keys() != self.arrays.keys() or self._folder is None:
            raise RunError("the checkpoint is of another embedding, or of none")
        for name, array in self.arrays.items():
            _check_file(array, self._folder / f"{name}.{versions[name]}.npy")
            array.current, array.crcs = versions[name], _crcs_of(state, name)
            self._compare(array, self._folder / f"{name}.{versions[name]}.npy")
        self._best = {name: version for name, version in _versions_of(best).items() if name in self._spaces}
        self.saved()

    def _compare(self, array: VersionedArray, path: Path) -> None:
        """Raise SpillError if the file differs from the checkpoint's checksum. Several processes read a part each, as
        none of them will read all of it in its passes."""
        crc = array.crcs.get(array.current)
        if self._ranks.count == 1 or crc is None:
            return
        found, part = 0, self._part_of(array.shape[0] * array.row_bytes)
        with path.open("rb", buffering=0) as file:
            for start in range(part.start, part.stop, _COMPARED_BYTES):
                read = os.pread(file.fileno(), min(_COMPARED_BYTES, part.stop - start), array.start_bytes + start)
                found = google_crc32c.extend(found, read)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if joined_checksum(self._ranks, found, len(part)) != crc:
            raise SpillError(f"{array.name}: the SSD returns other bytes of {path} than were written there")


def _versions_of(state: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the versions named by ``LearntRows.state``, by array; empty without a state."""
    return {} if state is None else dict(state["versions"])


def _crcs_of(state: Mapping[str, Any], name: str) -> dict[int, int]:
    """Return the checksums of an array's versions in ``LearntRows.state``; empty in states from before they were
    kept."""
    return dict(state.get("crcs", {}).get(name, {}))


def _make_file(path: Path, array: VersionedArray, *, anew: bool) -> None:
    """Create a version's file with its full size; ``anew``: filled with zeros."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if anew:
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, array.file_nbytes)
            os.pwrite(descriptor, array.header(), 0)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_file(array: VersionedArray, path: Path) -> None:
    """Raise RunError if the file of a version has another size than when a checkpoint named it."""
    with as_error(RunError, path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        same = file.read(len(array.header())) == array.header()
    if size != array.file_nbytes or not same:
        raise RunError(f"{path} is not the embedding that the checkpoint names")
