# SPDX-License-Identifier: Apache-2.0
"""Downloaded tar archives, which must be unpacked: plain files below one folder, which appears when it is whole."""

import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from ooc.errors import BudgetError, SourceError
from ooc.events import Listener, TaskAdvanced, TaskFinished, TaskStarted
from ooc.sizes import format_size

_PIECE_BYTES = 1 << 20
_BROKEN = (EOFError, ValueError, zlib.error, tarfile.TarError)


def unpack(archive: Path, folder: Path, *, listener: Listener) -> None:
    """Unpack the tar ``archive``, compressed or not, to ``folder``, which must not exist.

    A folder in the archive that is called as ``folder`` is ``folder`` itself. SourceError for a damaged archive, for
    links, and for names that lead elsewhere, BudgetError when the disk has no room; then nothing is left.
    """
    partial = folder.with_name(folder.name + ".unpacking")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _unpack(archive, partial, folder.name, listener)
        partial.replace(folder)
    except _BROKEN as error:
        raise SourceError(f"{archive} cannot be unpacked, it is damaged or incomplete: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(archive: Path, partial: Path, top: str, listener: Listener) -> None:
    task = f"unpacking {archive.name}"
    listener(TaskStarted(task, archive.stat().st_size, "bytes"))
    with archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as stream:
        for member in stream:
            if member.isdir():
                continue
            content = stream.extractfile(member) if member.isreg() else None
            if content is None:
                raise SourceError(f"{archive} holds {member.name}, which is no plain file")
            with content:
                _write(content, partial.joinpath(*_inside(member.name, archive, top)), member.size)
            listener(TaskAdvanced(task, raw.tell()))
    listener(TaskFinished(task))


def _inside(name: str, archive: Path, top: str) -> tuple[str, ...]:
    """``name`` as parts of a path below the target, without the folder ``top`` at its start."""
    path = PurePosixPath(name.replace("\\", "/"))
    parts = tuple(part for part in path.parts if part != ".")
    if path.is_absolute() or not parts or ".." in parts or "\0" in name:
        raise SourceError(f"{archive} holds {name!r}, which leads out of its folder")
    return parts[1:] if parts[0] == top and len(parts) > 1 else parts


def _write(content: IO[bytes], target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(target.parent).free):
        raise BudgetError(f"{target} needs {format_size(size)} of disk, {format_size(free)} are free")
    with target.open("xb") as file:
        while data := content.read(_PIECE_BYTES):
            file.write(data)
