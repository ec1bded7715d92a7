# SPDX-License-Identifier: Apache-2.0
"""A disk that loses power: what may be found of the files that a process was writing, where only fsync is a promise.

A :class:`Recorder` in the process notes every change of a folder's names, and what was flushed: a file's content as of
its last fsync, the entries of a folder as of its own. :func:`after_power_loss` draws one of the states that the disk
may be in then, in one of two models.

``ordered``: names change on the disk in the order in which they changed, and an fsync makes all changes before it last
(a journaling file system); contents are on their own. ``strict``: only what POSIX promises. A change of names lasts
once its folder was flushed, each of the others is there or not. A rename is there whole or not at all.

In both, a file's content is what was flushed, what was written last, or torn: a mixture of the two by sectors of
512 bytes, of either length, with zeros where neither has been written.

See Pillai et al., All File Systems Are Not Created Equal, OSDI 2014 (ALICE); SQLite's tests do the same.
"""

import os
import random
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import is_change

_SECTOR = 512
MODELS = ("ordered", "strict")

Node = tuple[int, int]
"""An inode, and how often its number had been given anew."""


@dataclass
class Change:
    """Entries of folders that changed at once: ``(folder, name, before, after)``."""

    entries: list[tuple[Node, str, Node | None, Node | None]]
    lasts: bool = False


@dataclass
class Record:
    """All there is to know when the power goes. ``contents`` are by node: as flushed last, and as they are now."""

    root: Node
    folders: set[Node]
    first: dict[Node, dict[str, Node]]
    changes: list[Change] = field(default_factory=list)
    flushed: dict[Node, bytes] = field(default_factory=dict)
    current: dict[Node, bytes] = field(default_factory=dict)


class Recorder:
    """Watches ``root`` from now on: ``record`` is what :meth:`stop` makes. Takes the place of ``os.fsync``.

    ``events`` counts what was done to the files; right before the ``at``-th, ``then`` is called.
    """

    def __init__(self, root: Path, *, at: int = 0, then: Any = None) -> None:
        self.events = 0
        self._path, self._at, self._then = str(root.resolve()), at, then
        self._lock = threading.RLock()
        self._busy = False
        self._generation: dict[int, int] = {}
        self._paths: dict[Node, str] = {}
        self._folders: dict[Node, dict[str, Node]] = {}
        self._known: dict[int, Node] = {}
        seen = self._scan()
        root_node = self._node(Path(self._path).stat().st_ino)
        self.record = Record(root_node, set(seen), {folder: dict(entries) for folder, entries in seen.items()})
        self._folders = seen
        for node, path in self._paths.items():
            if node not in seen:
                self.record.flushed[node] = _content(path)
        sys.addaudithook(self._watch)
        os.fsync = self._fsync

    def stop(self) -> Record:
        """What is known now."""
        with self._lock:
            self._busy = True
            self._compare()
            for node, path in self._paths.items():
                if node not in self.record.folders:
                    self.record.current[node] = _content(path)
        return self.record

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._busy or not is_change(event, arguments, self._path):
            return
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                self._compare()
                self.events += 1
                due = self.events == self._at
            finally:
                self._busy = False
        if due:
            self._then()

    def _fsync(self, descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        with self._lock:
            self._busy = True
            try:
                self._compare()
                status = os.fstat(number)
                node = self._known.get(status.st_ino)
                if node is None:
                    return
                if stat.S_ISDIR(status.st_mode):
                    for change in self.record.changes:
                        change.lasts |= any(folder == node for folder, *_ in change.entries)
                else:
                    self.record.flushed[node] = _content(self._paths[node])
                self.record.changes.append(
                    Change([], lasts=True)
                )  # how far names are on the disk, where they are in order
            finally:
                self._busy = False

    def _compare(self) -> None:
        """Note what has changed since the last time."""
        before, now = self._folders, self._scan()
        gone: dict[Node, list[tuple[Node, str]]] = {}
        entries: list[tuple[Node, str, Node | None, Node | None]] = []
        for folder in {**before, **now}:
            old, new = before.get(folder, {}), now.get(folder, {})
            for name in {**old, **new}:
                if old.get(name) != new.get(name):
                    entries.append((folder, name, old.get(name), new.get(name)))
                    if name in old:
                        gone.setdefault(old[name], []).append((folder, name))
        self._folders = now
        self.record.folders |= now.keys()
        moved = [entry for entry in entries if entry[3] in gone or any(other[3] == entry[2] for other in entries)]
        if moved:
            self.record.changes.append(Change(moved))
        self.record.changes.extend(Change([entry]) for entry in entries if entry not in moved)

    def _scan(self) -> dict[Node, dict[str, Node]]:
        paths: dict[Node, str] = {}
        found: dict[Node, dict[str, Node]] = {}
        present: set[int] = set()

        def walk(path: str, node: Node) -> None:
            found[node] = {}
            paths[node] = path
            with os.scandir(path) as listing:
                entries = [
                    (entry.name, entry.path, entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in listing
                ]
            for name, inner, inode, is_folder in entries:
                present.add(inode)
                one = self._node(inode)
                found[node][name] = one
                paths[one] = inner
                if is_folder:
                    walk(inner, one)

        root = Path(self._path).stat().st_ino
        present.add(root)
        busy, self._busy = self._busy, True
        try:
            walk(self._path, self._node(root))
        finally:
            self._busy = busy
        for inode in self._known.keys() - present:  # whoever gets the number next is another one
            del self._known[inode]
            self._generation[inode] = self._generation.get(inode, 0) + 1
        self._paths = paths
        return found

    def _node(self, inode: int) -> Node:
        return self._known.setdefault(inode, (inode, self._generation.get(inode, 0)))


def after_power_loss(record: Record, model: str, rng: random.Random) -> dict[str, bytes | None]:
    """One state that the disk may be in: the content of each file, None for folders, by path."""
    folders = {folder: dict(entries) for folder, entries in record.first.items()}
    for change in _surviving(record, model, rng):
        for folder, name, before, after in change.entries:
            names = folders.setdefault(folder, {})
            if after is not None:
                names[name] = after
            elif names.get(name) == before:
                del names[name]
    how = rng.choice(("flushed", "current", "torn", "any"))
    return dict(_contents(record, folders, record.root, "", how, rng))


def _surviving(record: Record, model: str, rng: random.Random) -> list[Change]:
    changes = record.changes
    if model == "ordered":
        least = max((number for number, change in enumerate(changes, start=1) if change.lasts), default=0)
        return changes[: rng.randint(least, len(changes))]
    share = rng.choice((0.0, 0.3, 0.7, 1.0))
    return [change for change in changes if change.lasts or rng.random() < share]


def _contents(
    record: Record, folders: dict[Node, dict[str, Node]], folder: Node, path: str, how: str, rng: random.Random
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in sorted(folders.get(folder, {}).items()):
        inner = f"{path}{name}"
        if node in record.folders:
            yield inner, None
            yield from _contents(record, folders, node, inner + "/", how, rng)
        else:
            flushed = record.flushed.get(node, b"")
            yield inner, _content_of(flushed, record.current.get(node, flushed), how, rng)


def _content_of(flushed: bytes, current: bytes, how: str, rng: random.Random) -> bytes:
    how = rng.choice(("flushed", "current", "torn")) if how == "any" else how
    if how != "torn" or flushed == current:
        return current if how == "current" else flushed
    least, most = sorted((len(flushed), len(current)))
    length = rng.choice((least, most, rng.randint(least, most)))
    torn = bytearray()
    for at in range(0, length, _SECTOR):
        source = rng.choice((flushed, current))
        torn += source[at : at + _SECTOR].ljust(_SECTOR, b"\0")
    return bytes(torn[:length])


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
