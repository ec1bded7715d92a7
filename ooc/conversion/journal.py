# SPDX-License-Identifier: Apache-2.0
"""What of a conversion is done and on the disk, in one small file, so that a killed conversion goes on.

A mark promises that what it speaks of is there. It outlives the process in any case; the machine's end too where
it is durable, that is, where everything it speaks of was flushed to the disk first. Marks that follow one another
within seconds are not: they hold as long as the machine has not been started anew, and count for nothing after.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ooc.storage.array import flush, flush_all

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LEAST_SECONDS = 5.0  # Between two durable marks, ...
_MOST_SHARE = 0.05  # ... which take no more than that of the time.

Flushing = Callable[[], None]


class Journal:
    """The marks of a conversion, one a stage, in the file ``path``; ``key`` identifies it, ``created``: when it began.

    Made by :meth:`begin` or, of what an earlier process left, by :meth:`read`.
    """

    def __init__(self, path: Path, content: dict[str, Any], unflushed: list[Flushing]) -> None:
        self.key: dict[str, Any] = content["key"]
        self.created = str(content["created"])
        self._results: dict[str, dict[str, Any]] = content["results"]
        self._path = path
        self._unflushed = unflushed
        self._last = time.monotonic()
        self._pause = _LEAST_SECONDS

    @classmethod
    def begin(cls, path: Path, key: dict[str, Any]) -> "Journal":
        """A new conversion's."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        journal = cls(path, {"key": key, "created": now, "results": {}}, [])
        journal._write(boot="")
        return journal

    @classmethod
    def read(cls, path: Path) -> "Journal | None":
        """What an earlier process left; None where there is nothing that can be relied on."""
        try:
            content = json.loads(path.read_text())
            boot = content["boot"]
            # What that process had not flushed, this one must before its own marks are durable.
            return (
                cls(path, content, [lambda: flush_all([path.parent])] * bool(boot)) if boot in ("", _boot()) else None
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def stages(self) -> list[str]:
        """The stages that are done, in order."""
        return list(self._results)

    def result(self, stage: str) -> Any:
        """What ``stage`` came to; None while it is not done."""
        return self._results.get(stage)

    def finish(self, stage: str, result: dict[str, Any], flushing: Flushing, *, now: bool = False) -> dict[str, Any]:
        """``stage`` is done, and all it wrote is on the disk after ``flushing()``; the ``result``, as JSON has it.

        ``now``: durable at once.
        """
        self._unflushed.append(flushing)
        self._results[stage] = result
        begun = time.monotonic()
        boot = "" if now or begun - self._last >= self._pause else _boot()
        if not boot:
            for waiting in self._unflushed:
                waiting()
            self._unflushed = []
            for folder in self._path.parent.iterdir():  # what was made in them, and flushed itself, has a name there
                if folder.is_dir():
                    flush(folder)
            self._last = time.monotonic()
            self._pause = max(_LEAST_SECONDS, (self._last - begun) / _MOST_SHARE)
        self._write(boot=boot)
        return result

    def _write(self, *, boot: str) -> None:
        content = {"key": self.key, "created": self.created, "boot": boot, "results": self._results}
        unfinished = self._path.with_name(self._path.name + ".new")
        with unfinished.open("w") as file:
            json.dump(content, file)
            if not boot:
                file.flush()
                os.fsync(file.fileno())
        unfinished.rename(self._path)
        if not boot:
            flush(self._path.parent)


def _boot() -> str:
    """What this start of the machine is called; empty where it cannot be told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
