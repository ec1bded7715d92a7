# SPDX-License-Identifier: Apache-2.0
"""What a check found: values by part, what was left out and why, what failed."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class LeftOut(Exception):
    """A part, or a piece of one, that cannot run here; the message says what is missing."""


class Failed(Exception):
    """A result that is wrong; the message says which."""


def same_bits(values: Mapping[str, Any], name: str) -> str:
    """Raises ``Failed`` where the losses and weights of the epochs of part ``name`` are not those of all in memory."""
    whole = "whole on the GPU" + name[name.index(",") :] if "," in name else "whole on the GPU"
    for part in (whole, name):
        if part not in values:
            raise LeftOut(f"needs the part {part}")
    if values[name]["bits"] != values[whole]["bits"]:
        losses = [[float.fromhex(loss) for loss in values[part]["bits"]["losses"]] for part in (whole, name)]
        raise Failed(f"other bits than those of {whole}: losses {losses[1]} instead of {losses[0]}")
    return f"those of {whole}"


class Kind(Enum):
    """What became of a part."""

    VALUE = "value"
    LEFT_OUT = "left out"
    FAILED = "failed"


def judged(compute: Callable[[], Any]) -> tuple[Kind, Any]:
    """The value of ``compute``, or in one line why there is none: every exception is caught, and told by its name."""
    try:
        return Kind.VALUE, compute()
    except LeftOut as reason:
        return Kind.LEFT_OUT, str(reason)
    except Failed as reason:
        return Kind.FAILED, str(reason)
    except ImportError as error:
        return Kind.LEFT_OUT, f"{error.name or error} cannot be imported"
    except Exception as error:
        if is_out_of_memory(error):
            return Kind.LEFT_OUT, "out of memory on the device"
        return Kind.FAILED, _in_one_line(error)


@dataclass
class Report:
    """``seconds`` is what the whole check may take from now on."""

    seconds: float
    rehearsal: bool
    values: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _start: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self._start + self.seconds - time.monotonic()

    def part(self, name: str, compute: Callable[[], Any], *, needs_s: float = 0.0) -> Any:
        """The value of ``compute``, kept under ``name``; None where it was left out or failed, which is noted.

        Whatever goes wrong in one part, the others shall run.
        """
        if self.seconds_left < needs_s:
            self.left_out[name] = f"needs about {needs_s:.0f} s, and {max(0.0, self.seconds_left):.0f} s are left"
            return None
        print(f"{name} …", flush=True)
        start = time.monotonic()
        kind, value = judged(compute)
        match kind:
            case Kind.LEFT_OUT:
                self.left_out[name] = value
                return None
            case Kind.FAILED:
                self.failures[name] = value
                return None
        self.values[name] = value
        self.values.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
        return value

    def write(self, path: Path) -> None:
        """All of it as JSON."""
        data = {
            "rehearsal": self.rehearsal,
            **self.values,
            "left_out": self.left_out,
            "failures": self.failures,
        }
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device said so, by torch, which is imported then."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def print_table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Rows under their columns; numbers with three digits that count."""
    texts = [tuple(_text(value) for value in row) for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *texts, strict=True)]
    print(f"\n{title}" if title else "")
    for row in (columns, *texts):
        first, *others = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        cells = (text.strip().rjust(width) for text, width in zip(others, widths[1:], strict=True))
        print("  ".join(("", first, *cells)))


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return str(value)
