# SPDX-License-Identifier: Apache-2.0
"""The page about a run says what its figures say, needs nothing but itself, and fits a telephone."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import ooc
from ooc import cli
from ooc.errors import OptionError, RunError
from ooc.report.gantt import write_trace
from ooc.report.page.charts import run_labels
from ooc.report.page.document import page, write_report
from ooc.report.page.figures import (
    MOST_EPOCHS,
    compared,
    describe_matrix,
    describe_pass,
    figures,
    find_improvements,
    verdict,
)
from ooc.train.runs.run import TIMELINE, RunFolder
from ooc.train.trainer import Trainer
from tests.examples import ordinary
from tests.report.browser import Page, browser, chromium

MOST_BYTES = 300_000
"""Of a page, beside its data."""
SETTINGS = ("--model", "sage", "--hidden", "16", "--memory", "6M", "--threads", "1", "--quiet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on a graph that does not fit, and one as an earlier version would have left it."""
    folder = tmp_path_factory.mktemp("reports")
    store = str(folder / "g.ooc")
    ooc.convert("synthetic:nodes=6000,edges=40000,features=32,classes=4,seed=1", store)
    for name, epochs, report in (("first", "4", ["--report", str(folder / "4.html")]), ("<second>", "2", [])):
        arguments = ["train", store, *SETTINGS, "--epochs", epochs, "--out", str(folder / name), *report]
        assert cli.main(arguments) == 0
    shutil.copytree(folder / "first", folder / "old")
    for name in ("planned.json", "timeline.json", "starts.jsonl", "plan.json"):
        (folder / "old" / name).unlink()
    return folder


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    return figures(folder / "first")


def text_of(html: str) -> str:
    """What one reads of a page."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.DOTALL))


def test_verdict_and_ranked_tables_come_first_and_say_what_was_measured(folder: Path, first: dict[str, Any]) -> None:
    html = (folder / "4.html").read_text(encoding="utf-8")
    last = RunFolder.open(folder / "first").records()[-1]
    said = first["verdict"]
    assert "within its budget" in said and f"{last.loss:.4g}" in said
    html = html.replace("\u00a0", " ")
    marks = (said, "What took the time", "What would help most", "<svg", "One epoch", "Command")
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)
    times = [row["time_s"] for row in first["time"]]
    assert times == sorted(times, reverse=True)
    medians = first["medians"]
    assert sum(times) == pytest.approx(medians["time_s"] + medians["eval_s"], rel=0.2)
    saved = [row["saves_s"] for row in first["helps"] if row["saves_s"] is not None]
    assert saved == sorted(saved, reverse=True) and all(s <= medians["time_s"] + medians["eval_s"] for s in saved)
    command = first["start"]["command"]
    assert command.split()[0] == "ooc" and first["start"]["versions"]["torch"] in html


def test_the_page_is_small_and_asks_for_nothing(folder: Path) -> None:
    html = (folder / "4.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, flags=re.DOTALL)
    assert data is not None and len(html) - len(data[1]) < MOST_BYTES
    assert "http" not in html.replace("http://www.w3.org/", "").replace("http-equiv", "")
    assert not re.search(r"(src|href)=(?!\"(#|data:))", html.replace(data[1], ""))
    assert len(set(re.findall(r'\bid="([^"]*)"', html))) == len(re.findall(r'\bid="', html)), "ids are unique"


def test_the_data_is_in_the_page_and_the_same_as_printed(
    folder: Path, first: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    html = (folder / "4.html").read_text(encoding="utf-8")
    data = re.search(r'id="figures">(.*?)</script>', html, flags=re.DOTALL)
    assert data is not None and json.loads(data[1]) == [first]
    assert cli.main(["report", str(folder / "first"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_curves_of_long_runs_are_thinned_but_keep_their_ends_and_the_best(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "old", tmp_path / "long")
    line = json.loads((folder / "old" / "metrics.jsonl").read_text().splitlines()[0])
    count = 3 * MOST_EPOCHS
    lines = [line | {"epoch": k, "valid_score": 0.9 if k == 8 else 0.1} for k in range(1, count + 1)]
    (tmp_path / "long" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    epochs = figures(tmp_path / "long")["curves"]["epoch"]
    assert len(epochs) <= MOST_EPOCHS + 2 and epochs[0] == 1 and epochs[-1] == count and 8 in epochs


def test_runs_of_earlier_versions_have_a_report_that_says_what_is_missing(folder: Path) -> None:
    found = figures(folder / "old")
    assert len(found["missing"]) == 4
    html = page([found])
    assert all(line in text_of(html) for line in found["missing"])
    assert "What took the time" in html and "<svg" in html


def test_several_runs_stand_side_by_side(folder: Path) -> None:
    assert run_labels([{"run": name} for name in ("runs/r", "other/r", "r/")]) == ["runs/r", "other/r", "r"]
    assert run_labels([{"run": name} for name in ("runs/r", "runs/r")]) == ["r (1)", "r (2)"]
    html = page([figures(folder / name) for name in ("first", "<second>", "old")])
    assert "Side by side" in html and "3 runs" in html
    assert "<second>" not in html and "&lt;second&gt;" in html
    assert re.findall(r">(Validation [^<]*)</h", html)[:3] == [
        f"Validation accuracy{what}" for what in ("", " by time", " by bytes read and written")
    ]
    verdicts = re.findall(r'class="verdict">([^<]*)', html)
    assert len(verdicts) == 4 and "different graphs" not in verdicts[0]
    assert "by time an epoch" in verdicts[0] and "all stayed within their memory" in verdicts[0]


def test_only_what_a_model_can_spill_in_is_proposed(first: dict[str, Any]) -> None:
    """Attention cannot in a narrower type."""
    waiting = first | {"medians": first["medians"] | {"wait_s": first["medians"]["time_s"]}}
    for may_round in (True, False):
        forecast = first["forecast"] | {"spills_rounded": may_round}
        proposed = [one["what"] for one in find_improvements(waiting | {"forecast": forecast})]
        assert ("--spill-dtype bfloat16" in proposed) == may_round and "an SSD twice as fast" in proposed


def test_runs_on_different_graphs_are_called_so(first: dict[str, Any]) -> None:
    other = first | {"graph": first["graph"] | {"num_nodes": 5}}
    assert compared([first, other], ["one", "other"]).startswith("These runs are on different graphs: one and other")


def test_what_is_no_run_or_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run"):
        write_report([tmp_path / "none"], tmp_path / "a.html")
    with pytest.raises(OptionError, match="No such file or directory"):
        write_report([folder / "first"], tmp_path / "none" / "a.html")
    shutil.copytree(folder / "first", tmp_path / "damaged")
    (tmp_path / "damaged" / "timeline.json").write_text('{"epoch": 2}')
    with pytest.raises(RunError, match=r"timeline\.json is damaged"):
        figures(tmp_path / "damaged")
    with pytest.raises(RunError, match=r"the timelines in .*damaged are damaged: '"):
        write_trace(tmp_path / "damaged", tmp_path / "a.json")
    (tmp_path / "damaged" / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="has finished no epoch yet"):
        figures(tmp_path / "damaged")
    assert not list(tmp_path.glob("a.*"))


@pytest.mark.parametrize("name", ["epoch_s", "fates"])
def test_a_damaged_forecast_is_none_of_a_run_without_epochs(name: str, folder: Path, tmp_path: Path) -> None:
    """A run that has been gone on with, and has finished no epoch since, has a page."""
    shutil.copytree(folder / "first", tmp_path / "r")
    forecast = json.loads((tmp_path / "r" / "plan.json").read_text())
    (tmp_path / "r" / "plan.json").write_text(json.dumps(forecast | {"first_epoch": 5}))
    assert "no epoch has finished since it was made" in figures(tmp_path / "r")["missing"][0]
    del forecast[name]
    (tmp_path / "r" / "plan.json").write_text(json.dumps(forecast))
    with pytest.raises(RunError, match=rf"plan\.json is damaged: '{name}'"):
        figures(tmp_path / "r")


def test_a_run_on_a_gpu_is_compared_by_both_memories(folder: Path, tmp_path: Path) -> None:
    """Without passes where not every epoch has as many as were forecast."""
    shutil.copytree(folder / "first", tmp_path / "r")
    forecast = json.loads((tmp_path / "r" / "plan.json").read_text())
    sizes = {"memory_bytes": None, "gpu_budget_bytes": 2_000_000, "host_budget_bytes": 9_000_000}
    peaks = {"device_peak_bytes": 1_000_000, "host_peak_bytes": 3_000_000, "to_device_bytes": 5}
    (tmp_path / "r" / "plan.json").write_text(json.dumps(forecast | sizes))
    *lines, last = ((tmp_path / "r" / "metrics.jsonl").read_text()).splitlines()
    changed = [json.loads(line) | peaks for line in lines] + [json.loads(last) | peaks | {"passes": []}]
    (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    found = figures(tmp_path / "r")
    quantities = {one["name"]: one["measured"] for one in found["comparison"]["quantities"]}
    assert (quantities["peak device memory"], quantities["peak host memory"]) == (1_000_000, 3_000_000)
    assert found["comparison"]["passes"] == []
    assert found["missing"] == ["kernels and copies on the GPU: only the SSD, memory and passes are timed there"]
    assert "(1.00 MB of 2.00 MB on the GPU, 3.00 MB of 9.00 MB on the host)" in found["verdict"]
    page([found])


def test_a_run_that_is_stopped_has_its_page_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    fit = Trainer.fit

    def interrupted(self: Trainer, **options: Any) -> None:
        fit(self, **{**options, "epochs": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", interrupted)
    arguments = ("train", "g.ooc", *SETTINGS, "--epochs", "3", "--out", "stopped", "--report", "stopped.html")
    assert cli.main(arguments) == cli.EXIT_INTERRUPTED
    assert "after 1 epoch the loss" in (folder / "stopped.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "first", "--out", "a.png"), "give a name that ends in .html"),
        (("report", "first", "--json", "--trace", "a.json"), "give one of them"),
        (("report", "first", "old", "--trace", "a.json"), "--trace takes one run"),
        (
            ("report", "old", "--trace", "a.json"),
            "timeline.json: runs in batches or of earlier versions have none",
        ),
        (("report", "none"), "there is no run at none"),
        (("train", "g.ooc", "--report", "no/where.html"), "there is no folder no"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(arguments) == 2
    found = capsys.readouterr()
    assert message in found.err and found.err.count("\n") == 1 and not found.out
    assert not (folder / "a.json").exists() and not (folder / "runs").exists()


def test_the_trace_is_of_the_trace_event_format(folder: Path, tmp_path: Path) -> None:
    """Required keys by kind of event, numbers in microseconds, times ascending; both epochs as processes."""
    write_trace(folder / "first", tmp_path / "epoch.json")
    found = json.loads((tmp_path / "epoch.json").read_text())
    assert found["displayTimeUnit"] in ("ms", "ns")
    timed = []
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            case "X":
                assert event["ts"] >= 0 and event["dur"] >= 0
                timed.append(event)
            case "C":
                assert event["args"] and all(isinstance(value, int) for value in event["args"].values())
                timed.append(event)
            case kind:
                raise AssertionError(f"an event of kind {kind}")
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "planned", 2: "measured"}
    measured = RunFolder.open(folder / "first").read(TIMELINE)
    assert measured is not None
    last = max(e["ts"] + e["dur"] for e in timed if e["pid"] == 2 and e["ph"] == "X")
    epoch_us = measured["epoch_s"] * 1e6
    assert 0.2 * epoch_us < last <= 1.001 * epoch_us  # a busy machine may let an epoch's end wait
    for thread in {(e["pid"], e["tid"]) for e in timed if e["ph"] == "X"}:
        mine = [e for e in timed if e["ph"] == "X" and (e["pid"], e["tid"]) == thread]
        ends = [e["ts"] + e["dur"] for e in mine]
        assert all(end <= e["ts"] + 1e-3 for end, e in zip(ends, mine[1:], strict=False)), "one thing at a time"


@pytest.mark.parametrize(
    ("waited_s", "moved", "said"),
    [
        (8.0, 1.0, "The SSD bounded training: of 10 s an epoch, computing waited 8.0 s (80 %)"),
        (
            2.0,
            1.0,
            "the SSD held it up: of 10 s an epoch, computing waited 2.0 s (20 %)",
        ),
        (0.5, 1.0, "Computing bounded training: of 10 s an epoch, computing waited 0.50 s (5 %)"),
        (0.01, 1.0, "next to nothing of it was waiting"),
        (0.0, 0.0, "everything stayed in memory"),
    ],
)
def test_the_verdict_says_what_bounded_the_epoch(
    first: dict[str, Any], waited_s: float, moved: float, said: str
) -> None:
    medians = {"time_s": 10.0, "wait_s": waited_s, "ssd_read_bytes": moved, "ssd_write_bytes": 0.0}
    assert said in verdict(first | {"medians": medians})
    beyond = first["forecast"] | {"gpu_budget_bytes": 1, "host_budget_bytes": 1}
    assert "went beyond its budget" in verdict(first | {"forecast": beyond})


def test_names_are_those_of_the_field() -> None:
    assert describe_matrix("z2") == "pre-activations of layer 2"
    assert describe_matrix("z2.1") == "pre-activations of layer 2, computed again"
    assert describe_matrix("dh2.1") == "gradient of the activations of layer 2, so far"
    assert describe_matrix("emb.exp_avg") == "what the embedding's optimizer keeps: exp_avg"
    assert describe_matrix("demb.all") == "gradient of the embedding"
    assert describe_matrix("nodes/v1.papers/x") == "input features of nodes v1.papers"
    assert describe_matrix("nodes/author/emb.exp_avg").endswith("of the embedding of nodes author: exp_avg")
    assert describe_matrix("dnodes/author/emb.all") == "gradient of the embedding of nodes author"
    assert describe_matrix("split/train") == "mask of the train nodes"
    assert describe_pass("pull m3, slab by slab") == "aggregate over in-neighbours, layer 3"
    assert describe_matrix("what") == "what" and describe_pass("what") == "what"


# ---- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    program = chromium()
    if program is None:
        pytest.skip("no chromium is installed")
    with browser(program) as tab:
        yield tab


@pytest.mark.parametrize(
    ("width", "dark", "scripts"),
    ordinary(product([1440, 390], [False, True], [True, False]), *((1440, False, True), (390, True, False))),
)
def test_it_looks_like_a_page_without_a_network(folder: Path, tab: Page, width: int, dark: bool, scripts: bool) -> None:
    """As wide as the window and no wider, with everything drawn, in the colours asked for, and nothing asked for."""
    tab.requested.clear()
    tab.open(folder / "4.html", width=width, dark=dark, scripts=scripts)
    assert tab.requested == [(folder / "4.html").as_uri()] and not tab.failed and not tab.errors
    tab.ask("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.value("document.documentElement.scrollWidth") == width
    charts = tab.value("[...document.querySelectorAll('.chart')].map(e => e.getBoundingClientRect().toJSON())")
    assert len(charts) >= 6
    assert all(box["width"] > 250 and box["left"] >= 0 and box["right"] <= width for box in charts)
    letters = tab.value("document.querySelector('.chart text').getBoundingClientRect().height")
    assert letters > 8, "letters of charts can be read"
    with Image.open(io.BytesIO(tab.screenshot(height=2000))) as shot:
        colours = shot.convert("RGB").getcolors(1 << 24)
    assert colours is not None and len(colours) > 200
    background = max(colours)[1]
    assert (sum(background) < 200) is dark


def test_the_epoch_can_be_zoomed(folder: Path, tab: Page) -> None:
    """Both drawings together, by button and by Ctrl and wheel; the wheel alone scrolls the page."""
    tab.open(folder / "4.html", width=1440)
    ticks = "[...document.querySelectorAll('svg.gantt')].map(s => s.querySelectorAll('[data-t]')[1].textContent)"
    before = tab.value(ticks)
    wheel = (
        "document.querySelector('svg.gantt').dispatchEvent(new WheelEvent('wheel', "
        "{deltaY: -400, ctrlKey: %s, clientX: 700, bubbles: true, cancelable: true}))"
    )
    assert tab.value(wheel % "false") is True and tab.value(ticks) == before
    assert tab.value(wheel % "true") is False
    zoomed = tab.value(ticks)
    assert all(after != tick for after, tick in zip(zoomed, before, strict=True))
    tab.value("document.querySelector('button[data-zoom=\"0\"]').click()")
    whole = tab.value(ticks)
    assert [float(text.split()[0]) for text in whole] != [float(text.split()[0]) for text in zoomed]
