# SPDX-License-Identifier: Apache-2.0
"""Files damaged on purpose: one byte changed, or the end cut off. What a conversion of them may come to.

It gives the right store, where the byte does not matter, or is refused in one line. Another store is wrong
wherever the file has a checksum or a count that could have told (:func:`could_tell`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from shutil import rmtree
from typing import Any, assert_never

import numpy as np

import ooc
from ooc.errors import OocError
from ooc.storage.store import Store
from tests.conversion.arrays import files_of
from tests.sources.fixtures import Made

_CHECKED = (".gz", ".zst", ".zip", ".npz")
_LABEL_BYTES = 4
_NOT_COMPARED = ("created", "source", "name")


class Outcome(Enum):
    """What came of converting a damaged source."""

    RIGHT = "the right store"
    REFUSED = "refused in one line"
    OTHER = "another store"
    BROKEN = "an error that is not ours, or of several lines"


class Verdict(Enum):
    """Whether that is right."""

    RIGHT = "right"
    REFUSED = "refused"
    UNTOLD = "could not be told"
    WRONG = "WRONG"


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One change to the file ``path``: byte ``at`` becomes ``value``, or with None the file ends there."""

    path: Path
    at: int
    value: int | None

    def __str__(self) -> str:
        what = "cut off" if self.value is None else f"byte {self.value:#04x}"
        return f"{self.path.name}: {what} at {self.at} of {self.path.stat().st_size}"

    def applied(self, data: bytes) -> bytes:
        """``data``, damaged."""
        if self.value is None:
            return data[: self.at]
        return data[: self.at] + bytes([self.value]) + data[self.at + 1 :]


def damages(folder: Path, rng: np.random.Generator) -> Iterator[Damage]:
    """Random damages, without end, to the files in ``folder``; each file as often as any other."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    while True:
        path = files[rng.integers(len(files))]
        at = int(rng.integers(path.stat().st_size))
        if rng.random() < 0.25:
            yield Damage(path=path, at=at, value=None)
        else:
            before = path.read_bytes()[at]
            yield Damage(path=path, at=at, value=(before + int(rng.integers(1, 256))) % 256)


def judge(damage: Damage, outcome: Outcome) -> Verdict:
    """What to think of ``outcome``."""
    match outcome:
        case Outcome.RIGHT:
            return Verdict.RIGHT
        case Outcome.REFUSED:
            return Verdict.REFUSED
        case Outcome.OTHER:
            return Verdict.WRONG if could_tell(damage) else Verdict.UNTOLD
        case Outcome.BROKEN:
            return Verdict.WRONG
        case _:
            assert_never(outcome)


def could_tell(damage: Damage) -> bool:
    """Whether the format carries a checksum, or a count, that this damage goes against.

    Compressed files have checksums. A truncation goes against what npy, Matrix Market, SNAP and WebGraph
    count; a text table or a list without a count may well end anywhere.
    """
    if damage.path.suffix in _CHECKED:
        return True
    counted = (".npy", ".graph", ".mtx", ".txt", ".parquet", ".pt")
    ends_anywhere = _ends_alike(damage) or _is_prefix(damage)
    return damage.value is None and damage.path.suffix in counted and not ends_anywhere


def _ends_alike(damage: Damage) -> bool:
    """Whether a text is cut within its last line: its last number is then another one, or lacks a newline."""
    text = damage.path.read_bytes()
    return damage.path.suffix in (".mtx", ".txt") and b"\n" not in text[damage.at :].strip(b"\r\n")


def _is_prefix(damage: Damage) -> bool:
    """Whether these are the labels of IGB's full, values without a header of as many papers as have one.

    A whole number of them is such a file, of any length; only of the published size is it known how many there are.
    """
    path = damage.path
    return path.name.startswith("node_label_") and "full" in path.parts and damage.at % _LABEL_BYTES == 0


class Trial:
    """Converts a fixture, damaged in one way after another, and compares. A context for ``with`` is not needed:
    every file is put back at once."""

    def __init__(self, made: Made, work: Path, **options: Any) -> None:
        """``work``: an empty folder for stores. ``options``: for the conversion, besides the fixture's own."""
        self._made, self._work = made, work
        self._options = {**made.options, **options}
        store = self._convert()
        self._right = _contents(store)
        rmtree(store.path)

    def outcome(self, damage: Damage) -> tuple[Outcome, str]:
        """What converting comes to with ``damage`` done, and the message if it was refused."""
        data = damage.path.read_bytes()
        damage.path.write_bytes(damage.applied(data))
        try:
            store = self._convert()
        except OocError as error:
            text = str(error)
            return (Outcome.REFUSED if text and "\n" not in text else Outcome.BROKEN), text
        except Exception as error:
            return Outcome.BROKEN, f"{type(error).__name__}: {error}"
        finally:
            damage.path.write_bytes(data)
        found = _contents(store)
        rmtree(store.path)
        return (Outcome.RIGHT if found == self._right else Outcome.OTHER), ""

    def _convert(self) -> Store:
        for left in self._work.iterdir():
            rmtree(left)
        return ooc.convert(self._made.source, self._work / "g.ooc", **self._options)


def _contents(store: Store) -> dict[str, Any]:
    attributes = {name: value for name, value in store.attributes.items() if name not in _NOT_COMPARED}
    return {"attributes": json.dumps(attributes, sort_keys=True), **files_of(store.path)}
