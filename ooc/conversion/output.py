# SPDX-License-Identifier: Apache-2.0
"""Where a new store comes to be: under another name until all of it is on the disk."""

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from ooc.errors import SourceError, StoreError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.storage.array import flush
from ooc.storage.store import PARTIAL_SUFFIX

SCRATCH = "scratch"
"""The folder for temporary files in a partial store; removed before the store gets its name."""

_HERE = -100  # AT_FDCWD: relative paths are from the current folder
_EXCHANGE = 2  # RENAME_EXCHANGE


def resolved(path: Path) -> Path:
    """``path`` with its folder made absolute; a last link is not followed, it is what would be replaced."""
    return path.parent.resolve() / path.name if path.name else path.resolve()


def check_target(target: Path, *, force: bool) -> None:
    """SourceError where ``target`` exists and may not be replaced; ``force`` allows that for stores alone."""
    if not os.path.lexists(target):
        return
    if not force:
        raise SourceError(f"{target} exists; give --force to replace it, or another output")
    if not (target / "zarr.json").is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise SourceError(f"{target} exists and is no store; it is not replaced even with --force")


@contextmanager
def partial(target: Path, *, force: bool, listener: Listener) -> Iterator[Path]:
    """The folder to write to; it becomes ``target`` at the end, and is removed on any error."""
    folder = target.with_name(target.name + PARTIAL_SUFFIX)
    with _locked(folder, target):
        try:
            for left in folder.iterdir():  # By a conversion that was killed: nobody holds the lock.
                _remove(left)
            yield folder
            rmtree(folder / SCRATCH, ignore_errors=True)
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
        flush(file)
        listener(TaskAdvanced(task, done))
    listener(TaskFinished(task))


def _replace(folder: Path, target: Path, *, force: bool) -> None:
    check_target(target, force=force)
    old = target.with_name(target.name + ".old")
    if not target.exists():
        folder.rename(target)
    else:
        rmtree(old, ignore_errors=True)
        if _exchanged(folder, target):
            folder.rename(old)
        else:
            target.rename(old)
            folder.rename(target)
    flush(target.parent)
    rmtree(old, ignore_errors=True)


def _exchanged(first: Path, second: Path) -> bool:
    """Give two folders each other's name at once, so that there is a store at every moment.

    False, and nothing changed, where the system or the file system cannot (NFS, for one).
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0)
