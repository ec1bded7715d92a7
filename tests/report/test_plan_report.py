# SPDX-License-Identifier: Apache-2.0
"""What stages move, and from when to when matrices are needed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ooc.engine.record import EpochRecord
from ooc.events import EpochFinished, Event, Note
from ooc.plan import Direction, Kind, Matrix, Pull, Stage, Topology, Workload
from ooc.plan.workload import EdgeArray, EdgeData
from ooc.progress.plan_report import lifetimes, stage_statistics
from ooc.report.logs import Correction


def a_workload() -> Workload:
    """Forward, loss, backward over 20 rows in tiles of 10, 5 of which the loss needs; 30 edges in the first tile."""
    matrices = {
        "x": Matrix("x", 20, 4, 2, Kind.STORE),
        "m": Matrix("m", 20, 3, 4, Kind.SCRATCH),
        "z": Matrix("z", 20, 3, 4, Kind.SCRATCH),
        "dp": Matrix("dp", 5, 3, 4, Kind.SCRATCH),
    }
    train = (
        Stage("forward", 20, ("x",), None, ("z", "m"), 100, multiplies_per_row=12),
        Stage("loss", 5, ("z",), Pull("m", "p", Direction.IN), ("dp",), 100, reverse=True),
        Stage("backward", 20, ("x", "z"), Pull("dp", "dm", Direction.OUT), (), 100, reverse=True),
    )
    topologies = {d: Topology(d, 4, [0, 30, 40]) for d in Direction}
    return Workload(20, 10, matrices, {"train": train}, topologies, 0, 0, 4, 1)


def test_a_stage_is_counted_over_its_own_rows() -> None:
    forward, loss, backward = stage_statistics(a_workload())
    none = dict.fromkeys(("edges", "edge_bytes", "pulled_bytes"), 0)
    moved = {"loaded_bytes": 160, "stored_bytes": 480}
    assert forward == {"stage": "forward", "rows": 20, "multiplies": 240} | none | moved
    assert (loss["rows"], loss["edges"], loss["edge_bytes"]) == (5, 30, 120)
    assert (loss["loaded_bytes"], loss["pulled_bytes"], loss["stored_bytes"]) == (60, 240, 60)
    assert (backward["edges"], backward["pulled_bytes"], backward["loaded_bytes"]) == (40, 60, 400)


def test_a_stage_loads_entries_of_sparse_features() -> None:
    work = a_workload()
    first, *others = work.programs["train"]
    entries = Topology(Direction.FEATURES, 4, [0, 50, 70], {EdgeData.WEIGHT: EdgeArray(1, 2)})
    programs = {"train": (replace(first, loads=(), entry_bytes=8), *others)}
    sparse = replace(work, programs=programs, topologies={**work.topologies, Direction.FEATURES: entries})
    assert stage_statistics(sparse)[0]["loaded_bytes"] == 70 * (4 + 2)


def test_a_matrix_lives_from_its_writer_to_its_last_reader() -> None:
    assert [tuple(lifetime.values()) for lifetime in lifetimes(a_workload())] == [
        ("x", 160, None, "forward", ["backward"]),
        ("z", 240, "forward", "loss", ["backward"]),
        ("m", 240, "forward", "loss", []),
        ("dp", 60, "loss", None, ["backward"]),
    ]


def test_the_second_epoch_corrects_the_forecast_of_the_others_and_the_fourth_where_that_was_none_like_them() -> None:
    """The first one fills the memory; nothing is told of what is left where that is a moment."""
    none = {"ssd_read_bytes": 0, "ssd_write_bytes": 0, "host_peak_bytes": 0, "device_peak_bytes": 0, "io_wait_s": 0.0}
    report: Any = SimpleNamespace(epoch_s=2.0, score_s=0.5)
    second = "an epoch takes 3.0 s, 1.20 times the forecast; the 5 others take about 15 s"
    for last, times_s, expected in (
        (7, (9.0, 2.4, 5.0, 2.5), [second]),
        (
            7,
            (9.0, 2.4, 5.0, 4.4, 4.4),
            [second, "an epoch takes 5.0 s, 2.00 times the forecast; the 3 others take about 15 s"],
        ),
        (2, (9.0, 2.4), []),
    ):
        told: list[Event] = []
        tell = Correction(report, last, told.append)
        for epoch, time_s in enumerate(times_s, start=1):
            tell(EpochFinished(EpochRecord(epoch=epoch, loss=1.0, time_s=time_s, eval_s=0.6, **none)))
        assert told == [Note(text) for text in expected]
