# SPDX-License-Identifier: Apache-2.0
"""The place where a new store is made: a folder beside its target, from which it is moved when all of it is on the
disk.

``OUT.partial`` contains ``store`` (the future OUT), ``scratch`` and ``journal.json``. It outlives a killed conversion,
and the same conversion resumes in it.

The journal, one small file, lists the stages that are complete and on the disk. A mark promises that its data is there:
everything beside the journal is flushed before the mark is written. Marks of stages that follow one another within
seconds are written together, except where a stage's input is removed afterwards.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

from ooc.errors import BudgetError, SourceError, StoreError, as_error
from ooc.events import Listener, Note, reported
from ooc.storage.array import exchanged, flush, flush_all, lock, lock_holder, replace_file
from ooc.storage.store import PARTIAL_SUFFIX
from ooc.storage.zarr_json import METADATA_FILE

_FLUSH_EVERY_S = 5.0
"""The least time between two flushes."""


class Journal:
    """The marks of a conversion, one per stage, in the file ``path``; ``key`` identifies it, ``created``: when it
    began.

    Made by :meth:`begin` or, for what an earlier process left, by :meth:`read`.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.key: dict[str, Any] = content["key"]
        self.created = str(content["created"])
        self._results: dict[str, dict[str, Any]] = content["results"]
        self._path = path
        self._saved_s = time.monotonic()

    @classmethod
    def begin(cls, path: Path, key: dict[str, Any]) -> "Journal":
        """Return the journal of a new conversion."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        journal = cls(path, {"key": key, "created": now, "results": {}})
        journal.save()
        return journal

    @classmethod
    def read(cls, path: Path) -> "Journal | None":
        """Return the journal that an earlier process left; None where there is no reliable one."""
        try:
            return cls(path, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def stages(self) -> list[str]:
        """The completed stages, in order."""
        return list(self._results)

    def result(self, stage: str) -> Any:
        """Return the result of ``stage``; None while it is not complete."""
        return self._results.get(stage)

    def finish(self, stage: str, result: dict[str, Any], *, now: bool = False) -> dict[str, Any]:
        """Mark ``stage`` as complete, with its ``result`` as JSON data.

        ``now``: the mark must be on the disk before anything else is done, unless the source cannot be identified, so
        that the conversion cannot be resumed.
        """
        self._results[stage] = result
        if self.key["input"] and (now or time.monotonic() - self._saved_s >= _FLUSH_EVERY_S):
            self.save()
        return result

    def save(self) -> None:
        """Flush all data, and write the marks."""
        flush_all([self._path.parent])
        replace_file(
            self._path, json.dumps({"key": self.key, "created": self.created, "results": self._results}).encode()
        )
        self._saved_s = time.monotonic()


_STORE, _SCRATCH, _JOURNAL, _OLD = "store", "scratch", "journal.json", "old"
_FINISHED_STAGE = "finished"


ON_CANCEL = ("keep", "remove")
"""What may happen to the work so far when a conversion is cancelled; if kept, the same conversion resumes."""


def resolved(path: Path) -> Path:
    """Return ``path`` with its folder made absolute; a final link is not followed, since the link would be replaced."""
    return Path(os.path.realpath(path.parent)) / path.name if path.name else path.resolve()


def check_target(target: Path, *, force: bool) -> None:
    """Raise SourceError where ``target`` exists and may not be replaced; ``force`` permits that for stores only."""
    if not os.path.lexists(target):
        return
    if not force:
        raise SourceError(f"{target} exists; give force=True to replace it, or another output")
    if not (target / METADATA_FILE).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise SourceError(f"{target} exists and is no store; it is not replaced even with force=True")


class Workplace:
    """``OUT.partial`` while this process holds it, with ``store`` to write to, ``scratch`` and ``journal``.

    ``listener`` is told of progress. ``continued``: whether there is work of an earlier process; ``written``: whether
    that had written everything. ``done``: whether it had also finished, so that OUT exists and nothing remains to be
    done.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        *,
        key: dict[str, Any],
        force: bool,
        in_place: bool,
        listener: Listener,
    ) -> None:
        self.folder = folder
        self.store = folder / _STORE
        self.scratch = folder / _SCRATCH
        self._target = target
        self.listener = listener
        journal = Journal.read(folder / _JOURNAL)
        left = journal.key if journal is not None else None
        same = left == key and bool(key["input"])
        finished = journal is not None and _is_finished(journal, target)
        self.done = finished and (same or in_place)
        self._flushed = same and journal is not None and _is_finished(journal, self.store)
        self.written = self.done or self._flushed
        lost = journal is not None and journal.result(_FINISHED_STAGE) is not None and not self._flushed
        self.continued = same and not finished and not lost
        if not self.done:
            check_target(target, force=force)
        if journal is not None and (self.done or self.continued):
            self.journal = journal
        else:
            self.journal = self._start_over(key, left or {}, tell=self.store.exists() and not finished)

    def written_bytes(self) -> int:
        """Return the bytes of the store and of scratch files so far."""
        files = (file for folder in (self.store, self.scratch) for file in folder.rglob("*") if file.is_file())
        return sum(file.stat().st_size for file in files)

    def finish(self, *, force: bool) -> None:
        """Flush the store and give it its name, replacing an existing store if ``force``."""
        if not self._flushed:
            with reported(self.listener, "flushing to disk", 1, "stores") as advance:
                self.journal.finish(_FINISHED_STAGE, {"metadata": digest(self.store)})
                self.journal.save()
                advance(1)
        check_target(self._target, force=force)
        self._replace()
        flush(self._target.parent)

    def _start_over(self, key: dict[str, Any], left: dict[str, Any], *, tell: bool) -> Journal:
        entries = list(self.folder.iterdir())
        if entries and tell:
            differing = ", ".join(name for name in key if left.get(name) != key[name]) or "input"
            self.listener(Note(f"{self.folder} is left from another conversion (other {differing}): starting over"))
        for entry in entries:
            rmtree(entry) if entry.is_dir() else entry.unlink()
        self.store.mkdir()
        return Journal.begin(self.folder / _JOURNAL, key)

    def _replace(self) -> None:
        if not os.path.lexists(self._target):
            self.store.rename(self._target)
        elif not exchanged(self.store, self._target):
            old = self.folder / _OLD
            rmtree(old, ignore_errors=True)
            self._target.rename(old)
            self.store.rename(self._target)


@contextmanager
def workplace(
    target: Path,
    *,
    key: dict[str, Any],
    force: bool,
    in_place: bool = False,
    on_cancel: str,
    listener: Listener,
) -> Iterator[Workplace]:
    """Yield the place to make ``target`` in, which gets its name at the end.

    It is removed with any error, but not when killed, or cancelled with ``keep``. ``key`` identifies the conversion:
    ``key["input"]`` is the source, empty where it cannot be identified. ``in_place``: the target is the source.
    SourceError where another process works there, or the target must not be replaced.
    """
    if not target.name:
        check_target(target, force=force)  # The root folder: never.
    folder = target.with_name(target.name + PARTIAL_SUFFIX)
    with _lock_workplace(folder, target):
        worthless = Journal.read(folder / _JOURNAL) is None
        try:
            place = Workplace(folder, target, key=key, force=force, in_place=in_place, listener=listener)
            if place.continued:
                stages = ", ".join(place.journal.stages()) or "nothing"
                listener(Note(f"going on with the conversion in {folder} (done so far: {stages})"))
        except BaseException as error:
            if worthless:
                rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise _write_error(error, folder) from error
            raise
        keep = False
        try:
            yield place
            if not place.done:
                place.finish(force=force)
        except KeyboardInterrupt:
            keep = on_cancel == "keep" and bool(key["input"])
            if keep:
                place.journal.save()
                listener(Note(f"what is done stays in {folder}: the same conversion goes on; remove it if not wanted"))
            raise
        except BudgetError:
            keep = place.continued
            raise
        except OSError as error:
            raise _write_error(error, folder) from error
        finally:
            if not keep:  # The journal is removed last, since it identifies the rest.
                for entry in (folder / _OLD, folder / _STORE, folder / _SCRATCH, folder):
                    rmtree(entry, ignore_errors=True)


def _write_error(error: OSError, folder: Path) -> StoreError:
    return StoreError(f"{error.filename or folder} cannot be written: {error.strerror or error}")


@contextmanager
def _lock_workplace(folder: Path, target: Path) -> Iterator[None]:
    """Make ``folder`` and keep other conversions out of it while this process lives."""
    with as_error(SourceError, f"{folder} cannot be made"):
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            lock(descriptor)
            # Another conversion may have finished, and removed the folder, since it was opened.
            held = folder.exists() and folder.samefile(f"/proc/self/fd/{descriptor}")
        except BlockingIOError:
            held = False
        if not held:
            raise SourceError(f"another process{lock_holder(folder)} is converting to {target}")
        yield
    finally:
        os.close(descriptor)


def _is_finished(journal: Journal, store: Path) -> bool:
    """Return whether the process of ``journal`` had finished, and ``store`` is what it wrote."""
    result = journal.result(_FINISHED_STAGE)
    return result is not None and result["metadata"] == digest(store)


def digest(store: Path) -> str:
    """Return a digest of the metadata of ``store``; empty where there is none."""
    try:
        return hashlib.sha256((store / METADATA_FILE).read_bytes()).hexdigest()
    except OSError:
        return ""
