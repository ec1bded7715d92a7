# SPDX-License-Identifier: Apache-2.0
"""Drawings of a plan are well-formed, show every resource and pass, and hold the simulator's figures."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ooc.errors import OptionError
from ooc.plan import UNMEASURED, Limits, make_plan
from ooc.plan.simulate.simulator import simulate
from ooc.plan.simulate.timeline import Resource, Timeline
from ooc.report.gantt import svg, trace, write_gantt
from tests.plan.test_planner import WORK


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(make_plan(WORK, Limits(12 << 20, 1 << 20)), WORK, UNMEASURED)


def test_the_picture_shows_every_resource_every_pass_and_the_budget(timeline: Timeline) -> None:
    drawn = ET.fromstring(svg(timeline))
    texts = {element.text for element in drawn.iter() if element.tag.endswith("text")}
    assert {resource.value for resource in timeline.busy_s} <= texts
    tips = " ".join(element.text or "" for element in drawn.iter() if element.tag.endswith("title"))
    assert all(item.title in tips for item in timeline.passes)
    assert any((text or "").startswith("budget ") for text in texts)


def test_the_picture_stays_small_however_many_blocks_there_are(timeline: Timeline) -> None:
    assert svg(timeline).count("<rect") < 2_000


def test_the_trace_holds_every_event_in_microseconds(timeline: Timeline) -> None:
    events = trace(timeline)["traceEvents"]
    reads = [e for e in events if e["ph"] == "X" and e.get("args", {}).get("bytes")]
    moved = [e for e in timeline.events if e.nbytes]
    assert sum(e["args"]["bytes"] for e in reads) == sum(e.nbytes for e in moved)
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(timeline.epoch_s * 1e6)
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(counters) == timeline.memory[0].peak_bytes
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {"passes", *(resource.value for resource in timeline.busy_s)}
    assert Resource.COMPUTE.value in named


@pytest.mark.parametrize("suffix", ["svg", "html", "json"])
def test_the_suffix_chooses_the_form(timeline: Timeline, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    write_gantt(path, timeline)
    text = path.read_text(encoding="utf-8")
    match suffix:
        case "svg":
            assert text == svg(timeline)
        case "html":
            assert (
                text.startswith("<!doctype html>")
                and svg(timeline) in text
                and "http" not in text.replace("http://www.w3.org/2000/svg", "")
            ), "a page that needs no network"
        case "json":
            assert json.loads(text) == json.loads(json.dumps(trace(timeline)))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_another_suffix_and_a_folder_that_is_not_there_are_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"a drawing ends in \.svg, \.html or \.json"):
        write_gantt(tmp_path / "plan.png", timeline)
    with pytest.raises(OptionError, match="No such file or directory"):
        write_gantt(tmp_path / "none" / "plan.svg", timeline)
