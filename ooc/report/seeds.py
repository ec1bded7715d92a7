# SPDX-License-Identifier: Apache-2.0
"""What runs of one training by several seeds have come to: mean and deviation, as papers print them."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ooc.progress.figures import format_duration
from ooc.train.metrics import Metric

_SCORES = ("best_valid", "best_test", "last_valid", "last_test")
_IN_PERCENT = (Metric.ACCURACY, Metric.MICRO_F1, Metric.MACRO_F1, Metric.ROC_AUC, Metric.AVERAGE_PRECISION)


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None] | None]:
    """Of what `ooc.report.runs.describe_run` says of each run: ``mean`` and ``std``, the sample standard deviation
    (None of one run), of each score; None for a score that a run lacks."""
    found: dict[str, dict[str, float | None] | None] = {}
    for name in _SCORES:
        values = [run[name] for run in runs if run[name] is not None]
        if not values or len(values) < len(runs):
            found[name] = None
            continue
        std = statistics.stdev(values) if len(values) > 1 else None
        found[name] = {"mean": statistics.fmean(values), "std": std}
    return found


def describe_seed(seed: int, run: dict[str, Any], seconds: float) -> str:
    """A line on what a run has come to."""
    epochs = f"{run['epochs']} epoch{'s' * (run['epochs'] != 1)}"
    if run["best_epoch"] is None:
        return f"seed {seed}: loss {run['loss']:.5f} after {epochs}; {format_duration(seconds)}"
    split = "valid" if run["best_test"] is None else "test"
    best, last = (f"{run[f'{when}_{split}']:.4f}" for when in ("best", "last"))
    beside = "" if split == "valid" else f" (valid {run['best_valid']:.4f})"
    return f"seed {seed}: {split} {best} at epoch {run['best_epoch']}{beside}, {last} after {epochs}; " + (
        format_duration(seconds)
    )


def describe_summary(runs: Sequence[dict[str, Any]], metric: Metric) -> list[str]:
    """Lines on all of them together."""
    found = summarize(runs)
    count = f"{len(runs)} seed{'s' * (len(runs) != 1)}"
    split = "test" if found["best_test"] is not None else "valid"
    best, last = found[f"best_{split}"], found[f"last_{split}"]
    if best is None or last is None:
        return [f"{count}: nothing was scored"]
    of = "test" if split == "test" else "validation"
    return [
        f"{count}, {metric.value} on {of} nodes{', mean ± standard deviation' * (len(runs) > 1)}:",
        f"  {_mean(best, metric)} at the best validation epoch",
        f"  {_mean(last, metric)} after the last epoch",
    ]


def _mean(found: dict[str, float | None], metric: Metric) -> str:
    """``81.50 ± 0.62 %``; what is no rate to two digits of its deviation: ``0.1234 ± 0.0056``."""
    mean, std = found["mean"], found["std"]
    assert mean is not None
    percent = metric in _IN_PERCENT
    scale = 100 if percent else 1
    digits = 2 if percent else 4 if not std else max(0, 1 - math.floor(math.log10(std)))
    deviation = "" if std is None else f" ± {scale * std:.{digits}f}"
    return f"{scale * mean:.{digits}f}{deviation}" + " %" * percent
