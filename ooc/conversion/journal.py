# SPDX-License-Identifier: Apache-2.0
"""Which stages of a conversion are done and on the disk, in one small file, so that a killed conversion goes on.

A mark promises that what it speaks of is there: everything that lies beside the journal is flushed before it is
written. Marks of stages that follow one another within seconds are written together, but for those after which what a
stage was made of is removed.
"""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ooc.storage.array import flush_all, replace_file

_LEAST_SECONDS = 5.0
"""Between two times at which all is flushed."""


class Journal:
    """The marks of a conversion, one a stage, in the file ``path``; ``key`` identifies it, ``created``: when it began.

    Made by :meth:`begin` or, of what an earlier process left, by :meth:`read`.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.key: dict[str, Any] = content["key"]
        self.created = str(content["created"])
        self._results: dict[str, dict[str, Any]] = content["results"]
        self._path = path
        self._saved_s = time.monotonic()

    @classmethod
    def begin(cls, path: Path, key: dict[str, Any]) -> "Journal":
        """A new conversion's."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        journal = cls(path, {"key": key, "created": now, "results": {}})
        journal.save()
        return journal

    @classmethod
    def read(cls, path: Path) -> "Journal | None":
        """What an earlier process left; None where there is nothing that can be relied on."""
        try:
            return cls(path, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def stages(self) -> list[str]:
        """The stages that are done, in order."""
        return list(self._results)

    def result(self, stage: str) -> Any:
        """What ``stage`` came to; None while it is not done."""
        return self._results.get(stage)

    def finish(self, stage: str, result: dict[str, Any], *, now: bool = False) -> dict[str, Any]:
        """``stage`` is done; the ``result``, as JSON has it. ``now``: it must be on the disk before anything else is
        done."""
        self._results[stage] = result
        if now or time.monotonic() - self._saved_s >= _LEAST_SECONDS:
            self.save()
        return result

    def save(self) -> None:
        """Have all that was done, and the marks that say so, on the disk."""
        flush_all([self._path.parent])
        replace_file(
            self._path, json.dumps({"key": self.key, "created": self.created, "results": self._results}).encode()
        )
        self._saved_s = time.monotonic()
