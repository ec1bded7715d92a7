# SPDX-License-Identifier: Apache-2.0
"""Numbers formatted for people: counts, rates, durations, an epoch in one line, a curve as a row of blocks."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.engine.record import EpochRecord

LINE_WIDTH = 80
"""Columns of a line, except on a wider terminal."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def format_count(count: float, unit: str) -> str:
    """``format_count(1_250_000, "edges")`` → ``"1.25M edges"``; bytes as sizes."""
    if unit == "bytes":
        return format_size(count)
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f}{letter} {unit}"
    return f"{count:.0f} {unit}"


def format_rate(per_s: float, unit: str) -> str:
    """Return a rate per second, or per minute where it is slow."""
    if per_s < 1 and unit != "bytes":
        return f"{per_s * 60:.1f} {unit}/min"
    if per_s < 10 and unit != "bytes":
        return f"{per_s:.1f} {unit}/s"
    return f"{format_count(per_s, unit)}/s"


def format_duration(seconds: float) -> str:
    """``0.42`` → ``"0.42 s"``, ``90`` → ``"1 min 30 s"``, ``4000`` → ``"1 h 6 min"``."""
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_progress(name: str, done: int, total: int, unit: str, elapsed_s: float) -> str:
    """Return a plain line with the progress, the rate and the time left."""
    how_far = f"{100 * done // total} % of {format_count(total, unit)}" if total else format_count(done, unit)
    return ", ".join([f"{name}: {how_far}", *filter(None, pace(done, total, unit, elapsed_s))])


def pace(done: int, total: int, unit: str, elapsed_s: float) -> tuple[str, str]:
    """Return the rate and the time left; an empty string while they are unknown."""
    if not done or elapsed_s <= 0:
        return "", ""
    left = f"{format_duration(max(0.0, elapsed_s * (total - done) / done))} left" if total else ""
    return format_rate(done / elapsed_s, unit), left


def format_scores(record: "EpochRecord") -> list[str]:
    """Return the scores of an epoch by split, where it was evaluated."""
    scores = {"train": record.train_score, "valid": record.valid_score, "test": record.test_score}
    return [f"{name} {value:.4f}" for name, value in scores.items() if value is not None]


def best_record(records: "Sequence[EpochRecord]", *, rising: bool) -> "EpochRecord | None":
    """Return the first epoch with the best validation score, None when none was scored; ``rising``: higher is
    better."""
    scored = [record for record in records if record.valid_score is not None]
    sign = 1 if rising else -1
    return max(scored, key=lambda record: sign * (record.valid_score or 0.0), default=None)


def format_epoch(record: "EpochRecord", epochs: int, *, width: int = LINE_WIDTH) -> str:
    """Return an epoch in one line of at most ``width`` columns; items without room are left out, the last ones first.

    The time is that of training and scoring together.
    """
    number = f"{record.epoch:>{len(str(epochs))}}/{epochs}" if epochs else str(record.epoch)
    parts = [f"epoch {number}", f"loss {record.loss:.5f}", " ".join(format_scores(record))]
    parts.append(format_duration(record.time_s + record.eval_s))
    if record.ssd_read_bytes or record.ssd_write_bytes:
        parts.append(f"read {format_size(record.ssd_read_bytes)}  written {format_size(record.ssd_write_bytes)}")
    line, *rest = filter(None, parts)
    for part in rest:
        if len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the curve of ``values`` in at most ``width`` blocks, from the least value to the greatest.

    Where there are more values than blocks, a block is a mean of several. Values that are not finite are gaps.
    """
    if len(values) > width:
        cuts = [len(values) * k // width for k in range(width + 1)]
        parts = [[value for value in values[a:b] if math.isfinite(value)] for a, b in pairwise(cuts)]
        values = [sum(part) / len(part) if part else math.nan for part in parts]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else len(_BLOCKS) // 2]

    return "".join(map(block, values))
