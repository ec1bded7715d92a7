# SPDX-License-Identifier: Apache-2.0
"""Long work is shown, short work is not, and plain output comes in measured doses."""

import io
from typing import Any

import pytest

from ooc.events import EpochFinished, Note, TaskAdvanced, TaskFinished, TaskStarted
from ooc.progress.figures import (
    format_count,
    format_duration,
    format_epoch,
    format_progress,
    format_rate,
    sparkline,
)
from ooc.progress.reporter import Reporter, Verbosity
from ooc.report.console import wrapped
from tests.cli.test_run import record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run_task(reporter: Reporter, clock: Clock, seconds: int) -> None:
    reporter(TaskStarted("sorting", 1000, "edges"))
    for second in range(1, seconds + 1):
        clock.now_s += 1.0
        reporter(TaskAdvanced("sorting", 1000 * second // seconds))
    reporter(TaskFinished("sorting"))


def outputs(stream: type[io.StringIO], seconds: int, **options: Any) -> str:
    clock, errors = Clock(), stream()
    with Reporter(errors=errors, results=io.StringIO(), clock=clock, **options) as reporter:
        run_task(reporter, clock, seconds)
    return errors.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_short_work_shows_nothing(stream: type[io.StringIO]) -> None:
    assert outputs(stream, 1) == ""


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_quiet_shows_nothing(stream: type[io.StringIO]) -> None:
    assert outputs(stream, 60, verbosity=Verbosity.ERROR) == ""


def test_lines_come_every_five_seconds_with_rate_and_time_left() -> None:
    lines = outputs(io.StringIO, 20).splitlines()
    assert lines == [
        "sorting: 10 % of 1.00k edges, 50 edges/s, 18 s left",
        "sorting: 35 % of 1.00k edges, 50 edges/s, 13 s left",
        "sorting: 60 % of 1.00k edges, 50 edges/s, 8.0 s left",
        "sorting: 85 % of 1.00k edges, 50 edges/s, 3.0 s left",
    ]


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = outputs(Terminal, 20)
    assert "sorting" in text and "edges/s" in text and "left" in text
    assert text.replace("\n", "").rstrip().endswith("\x1b[2K\x1b[?25h")  # the line is cleared, the cursor shown again


def test_an_unknown_total_has_no_share_and_no_time_left() -> None:
    assert format_progress("reading", 5000, 0, "bytes", 2.0) == "reading: 5.00 KB, 2.50 KB/s"


def test_levels_show_less_and_more() -> None:
    """Notes without progress; and when what was done."""
    assert outputs(io.StringIO, 20, verbosity=Verbosity.WARNING) == ""
    assert outputs(io.StringIO, 1, verbosity=Verbosity.DEBUG) == "sorting: 1.0 s\n"
    errors = io.StringIO()
    Reporter(errors=errors, verbosity=Verbosity.WARNING)(Note("less memory is free"))
    assert errors.getvalue() == "less memory is free\n"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in outputs(Terminal, 20) and outputs(Terminal, 20).count("\n") == 4


def test_a_curve_is_a_row_of_blocks() -> None:
    assert sparkline([0.0, 1.0, 7.0], 10) == "▁▂█"
    assert sparkline([3.0, 3.0], 10) == "▅▅" and sparkline([], 10) == sparkline([float("nan")], 10) == ""
    assert sparkline([0.0, float("inf"), 1.0], 10) == "▁ █"
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"


def test_events_of_unknown_tasks_are_ignored() -> None:
    errors = io.StringIO()
    with Reporter(errors=errors) as reporter:
        reporter(TaskAdvanced("sorting", 5))
        reporter(TaskFinished("sorting"))
    assert errors.getvalue() == ""


def test_epochs_are_results_and_notes_are_not() -> None:
    errors, results = io.StringIO(), io.StringIO()
    with Reporter(errors=errors, results=results, epochs=10) as reporter:
        reporter(Note("the folder is slow"))
        reporter(EpochFinished(record(3, valid_score=0.75, eval_s=0.5)))
    assert errors.getvalue() == "the folder is slow\n"
    assert results.getvalue() == "epoch  3/10  loss 0.16667  train 0.5000 valid 0.7500 test 0.2500  0.60 s\n"


def test_an_epoch_fits_80_columns_and_a_wide_terminal_takes_it_in_one_line() -> None:
    last = record(1000, valid_score=0.75, eval_s=3599.0, time_s=7199.0, ssd_read_bytes=10**12)
    line = format_epoch(last, 1000)
    assert len(line) <= 80 and line.startswith("epoch 1000/1000  loss ") and line.endswith("  2 h 59 min")
    assert format_epoch(last, 1000, width=160).endswith("2 h 59 min  read 1.00 TB  written 20 B")
    assert "read" not in format_epoch(record(1, ssd_read_bytes=0, ssd_write_bytes=0), 1)


def test_numbers_are_readable() -> None:
    assert format_count(1_250_000, "edges") == "1.25M edges"
    assert format_count(999, "edges") == "999 edges"
    assert format_rate(0.05, "epochs") == "3.0 epochs/min"
    assert format_rate(1.54, "passes") == "1.5 passes/s"
    assert format_rate(2e9, "bytes") == "2.00 GB/s"
    assert [format_duration(s) for s in (0.42, 3.21, 59.4, 90, 4000)] == [
        "0.42 s",
        "3.2 s",
        "59 s",
        "1 min 30 s",
        "1 h 6 min",
    ]


@pytest.mark.parametrize("width", [-5, 0, 1, 4])
def test_a_terminal_may_be_narrower_than_a_word(width: int) -> None:
    assert wrapped("takes 12 MB", width) == ["takes", "12 MB"]
