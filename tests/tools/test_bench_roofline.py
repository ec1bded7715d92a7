# SPDX-License-Identifier: Apache-2.0
"""The roofline's benchmark runs, and what it says of kernels and epochs is what they do."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

import ooc
from ooc.kernels import pulls
from tests.tools.loaded import load_tool

NODES, EDGES, COLUMNS, CLASSES = 18_000, 40_000, 64, 4
GRAPH = f"synthetic:nodes={NODES},edges={EDGES},features={COLUMNS},classes={CLASSES},directed=1"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool, which measures less."""
    tool = load_tool("bench_roofline", monkeypatch)
    from roofline_parts import epochs, rates

    monkeypatch.setattr(epochs, "FRACTION", 3 / 4)  # there is no plan for less of so little
    monkeypatch.setattr(rates, "STRETCHES", 4)
    monkeypatch.setattr(rates, "STRETCH_EDGES", 1 << 10)
    monkeypatch.setattr(rates, "STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(tool, "ROW_BYTES", (64,))
    monkeypatch.setattr("ooc.profile.disk.FILE_BYTES", 8 << 20)
    monkeypatch.setattr("ooc.profile.disk._MEMORY_BYTES", 4 << 20)
    monkeypatch.setattr("ooc.profile.disk._WINDOW_S", 0.001)
    monkeypatch.setattr("ooc.profile.bench.settled", lambda rounds: len(rounds) > 1)
    return tool


def test_rates_kernels_and_epochs_are_told(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "roofline.svg"
    ooc.convert(GRAPH, tmp_path / "graph.ooc")
    given = [
        "--store",
        tmp_path / "graph.ooc",
        "--folder",
        tmp_path / "scratch",
        "--threads",
        1,
        "--rounds",
        1,
        "--tile-rows",
        64,
    ]
    given += ["--hidden", COLUMNS, "--kernels", "max,gatv2", "--models", "sage", "--passes"]
    before = pulls.BY_DEVICE["cpu"]
    assert tool.main([str(one) for one in (*given, "--json", report, "--svg", picture)]) == 0
    assert pulls.BY_DEVICE["cpu"] is before

    found = json.loads(report.read_text())
    kernels = {one["name"]: one for one in found["kernels"]}
    assert {"maximum", "maximum, backward", "GATv2, targets", "product, forward"} < kernels.keys()
    assert all(one["seconds"] > 0 and one["limit_s"] > 0 for one in kernels.values())
    out = capsys.readouterr().out
    for table in ("| what | setting | rate |", "| kernel | per |", "| model | way | epoch |", "| pass | took |"):
        assert table in out
    text = "".join(ElementTree.parse(picture).getroot().itertext())
    assert all(name in text for name in kernels)
    whole, part = (one["epochs"][0] for one in found["epochs"])
    assert whole["loss"] == part["loss"]
    assert whole["least"][-1] == 0.0 < part["least"][-1]  # of the disk
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == []


def test_a_kernel_that_is_none_is_refused(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--kernels", "mean,gcn"])
    assert "argument --kernels: 'gcn' is none of mean,normalised," in capsys.readouterr().err


def test_an_edge_moves_its_neighbours_row_and_its_share_of_its_own(tool: Any, tmp_path: Path) -> None:
    """A mean pulls both ways: rows of 64 columns, an index, and of a row of its results and offsets a tenth or so."""
    from roofline_parts import kernels, rates

    store = ooc.open(ooc.convert(GRAPH, tmp_path / "graph.ooc").path)
    options = {"hidden": COLUMNS, "heads": 4, "memory": "1G", "threads": 1, "folder": str(tmp_path)}
    with rates.Rates(store, tmp_path, 1, 64) as measured:
        mean, gat = (kernels.pulled(store, name, measured, options)[0] for name in ("mean", "gat"))
    assert mean.items == 2 * EDGES and mean.fetched == 2 * EDGES
    assert mean.row_bytes == 4 * COLUMNS and mean.rows == NODES
    tiles = mean.other_bytes - 2 * 4 * (EDGES + NODES * (COLUMNS + 1))
    assert 0 <= tiles < 2 * 4 * 100  # an offset more for each
    assert mean.flops_each == COLUMNS
    # GAT pulls a score for each head beside the row, and a self-loop for each row
    assert gat.fetched == EDGES + NODES and gat.row_bytes == 4 * (COLUMNS + 4)


def test_an_epochs_limit_is_of_what_its_plan_counts(tool: Any, tmp_path: Path) -> None:
    from roofline_parts import epochs, rates

    store = ooc.open(ooc.convert(GRAPH, tmp_path / "graph.ooc").path)
    options = {"layers": 3, "hidden": COLUMNS, "heads": 4, "threads": 1, "folder": str(tmp_path)}
    with rates.Rates(store, tmp_path, 1, 64) as measured, epochs.Training(store, "sage", None, options) as training:
        measured.multiplies_per_s = lambda dtype: 1.0
        measured.row_seconds = lambda row_bytes, rows: float(row_bytes)
        measured.stream_bytes_per_s = lambda *, copying: torch.inf
        epoch = training.epoch(measured)
    # the first layer's aggregation is constant, and nothing is asked of its input's gradient
    linear = NODES * COLUMNS**2
    last = NODES * COLUMNS * CLASSES
    assert epoch.least.products_s == 2 * (2 * linear) + 3 * (2 * linear) + 3 * 2 * last
    assert epoch.least.pulls_s == 2 * EDGES * 4 * (COLUMNS + CLASSES)
    assert epoch.least.disk_s == 0.0 and epoch.own_s > 0
    assert epoch.least.limit_s == epoch.least.products_s + epoch.least.pulls_s
