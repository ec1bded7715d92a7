# SPDX-License-Identifier: Apache-2.0
"""The view of a training says how far it is, what it takes, and what was promised; whatever the width."""

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ooc.events import EpochFinished, Note, Relay, TaskAdvanced, TaskStarted
from ooc.progress.live import Tier, TrainingView, bar
from ooc.progress.reporter import Reporter, Verbosity, displayed, in_notebook
from tests.cli.test_run import record
from tests.progress.test_reporter import Clock, Terminal

TIERS = (Tier("memory", 100, 90, ("device_peak_bytes", "host_peak_bytes")),)
EPOCH = SimpleNamespace(ssd_busy_s=0.3, wait_s=0.02)
BYTES = {"ssd_read_bytes": 569_000_000, "ssd_write_bytes": 234_000_000}
PROMISE = SimpleNamespace(timeline=EPOCH, epoch_s=1.0, compute_s=0.9, score_s=0.4, tiers=TIERS, **BYTES)


def view_of(clock: Clock, **changes: Any) -> TrainingView:
    facts: dict[str, Any] = {"title": "GCN on a.ooc", "first": 1, "last": 4, "metric": "accuracy", "rising": True}
    return TrainingView(**(facts | {"forecast": PROMISE, "clock": clock} | changes))


def shown(view: TrainingView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_before_the_first_epoch_the_promise_is_shown() -> None:
    lines = shown(view_of(Clock()), 80)
    assert lines[0] == "GCN on a.ooc" and lines[1].startswith("epoch 1/4 ──") and "5.6 s left" in lines[1]
    assert [line.split()[-2:] for line in lines if line.startswith("epoch  ")] == [["1.0", "s"]]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_and_says_everything(width: int) -> None:
    clock = Clock()
    view = view_of(clock)
    for epoch in (1, 2):
        clock.now_s += 3
        view(EpochFinished(record(epoch, valid_score=0.5 + epoch / 10, loss=1 / epoch, eval_s=0.5)))
    view(TaskStarted("epoch 3", 8, "passes"))
    view(TaskAdvanced("epoch", 4))
    lines = shown(view, width)
    assert all(len(line) <= width for line in lines) and len(lines) <= 22
    if width < 80:
        return
    text = "\n".join(lines)
    assert "epoch 3/4 ━" in text and "6.0 s left  pass 5 of 8" in text
    for part in ("0.50000 █▁", "lowest 0.50000", "0.7000 ▁█", "best 0.7000 (2)", "of 100 B", "569 MB", "scoring"):
        assert part in text


def test_a_run_that_is_gone_on_with_shows_all_of_it() -> None:
    view = view_of(Clock(), first=3, last=4, records=[record(1), record(2)])
    lines = shown(view, 80)
    assert lines[1].startswith("epoch 3/4 " + 13 * "━" + 13 * "─") and "1.4 s left" not in lines[1]
    assert "█▁" in lines[2]


def test_of_batches_is_said_how_many_are_done() -> None:
    view = view_of(Clock(), forecast=None, tiers=TIERS)
    view(TaskStarted("epoch 1", 8, "batches"))
    view(TaskAdvanced("epoch", 4))
    text = "\n".join(shown(view, 120))
    assert "batch 5 of 8" in text and "of 100 B" in text and "90 B" in text and "forecast" not in text
    view(EpochFinished(record(1, host_peak_bytes=90, device_peak_bytes=0)))
    assert "\n".join(shown(view, 120)).count("90 B") == 1


def test_what_goes_to_a_gpu_is_told() -> None:
    view = view_of(Clock())
    view(EpochFinished(record(1, to_device_bytes=3_000_000, to_host_bytes=1_000_000)))
    assert re.search(r"to the GPU +3.00 MB +and 1.00 MB back", "\n".join(shown(view, 120)))


def test_the_best_is_that_of_the_metric() -> None:
    view = view_of(Clock(), rising=False, metric="mae")
    for epoch, score in ((1, 3.0), (2, 1.0), (3, 2.0)):
        view(EpochFinished(record(epoch, valid_score=score)))
    assert "best 1.0000 (2)" in "\n".join(shown(view, 120))


def test_a_bar_is_as_long_as_its_share() -> None:
    assert [bar(share, 2) for share in (0.0, 0.5, 0.75, 1.0, 7.0)] == ["", "━", "━╸", "━━", "━━"]


def terminal_output(**options: Any) -> str:
    stream = Terminal()
    with Reporter(errors=stream, results=stream, epochs=4, **options) as reporter:
        reporter.show(view_of(Clock()))
        reporter(TaskStarted("epoch 1", 8, "passes"))
        reporter(TaskAdvanced("epoch 1", 1))
        reporter(Note("the folder is slow"))
        reporter(EpochFinished(record(1)))
    return stream.getvalue()


def test_a_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = terminal_output()
    assert "GCN on a.ooc" in text and "the folder is slow\n" in text and "epoch 1/4  loss" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again
    assert text.rstrip().endswith("\x1b[2K")  # the last line of the view is cleared
    assert "epoch 1/4  loss 0.25000" in terminal_output(verbosity=Verbosity.DEBUG)


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("", "")])
def test_elsewhere_there_are_lines(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if name:
        monkeypatch.setenv(name, value)
        text = terminal_output()
    else:
        text = terminal_output(verbosity=Verbosity.ERROR)
    assert "\x1b" not in text and ("epoch 1/4  loss 0.25000" in text) == bool(name)


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[36m" in terminal_output()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in terminal_output()


def test_from_python_a_line_an_epoch_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    relay = Relay()
    with displayed(relay, lambda: view_of(Clock()), 4):
        relay(TaskStarted("epoch 1", 8, "passes"))
        relay(Note("not for here"))
        relay(EpochFinished(record(1)))
    relay(EpochFinished(record(2)))  # nobody listens any more
    out, err = capsys.readouterr()
    assert out == "" and err == "epoch 1/4  loss 0.25000  train 0.5000 test 0.2500  0.10 s\n"


def test_from_python_the_view_stays_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, relay = Terminal(), Relay()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with displayed(relay, lambda: view_of(Clock(), last=1), 1):
        relay(EpochFinished(record(1)))
    last = stream.getvalue().split("\x1b[2K")[-1]
    assert "epoch 1/1" in last and " done" in last and "lowest 0.25000" in last and "\x1b[?25h" in last


def test_a_notebook_has_the_view_in_one_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ZMQInteractiveShell:
        pass

    class Shell(ZMQInteractiveShell):
        pass

    said: list[tuple[dict[str, str], dict[str, Any]]] = []
    cells = SimpleNamespace(display=lambda data, **how: said.append((data, how)))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=Shell))
    monkeypatch.setitem(sys.modules, "IPython.display", cells)
    assert in_notebook()
    relay = Relay()
    with displayed(relay, lambda: view_of(Clock()), 4):
        for epoch in (1, 2, 3):
            relay(EpochFinished(record(epoch)))
    # Of epochs that follow one another faster than one can look, the first and the last.
    assert [how["update"] for _, how in said] == [False, True]
    assert len({how["display_id"] for _, how in said}) == 1
    assert "epoch 4/4" in said[-1][0]["text/plain"] and "<pre" in said[-1][0]["text/html"]
    assert capsys.readouterr() == ("", "")
