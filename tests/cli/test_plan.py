# SPDX-License-Identifier: Apache-2.0
"""``ooc plan`` says what training would take, writes nothing, and can be held to it afterwards."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ooc
from ooc.cli.arguments.settings import RUN, SAMPLING, train_options
from ooc.cli.plan import load_hardware, parse_graph, shipped
from ooc.errors import BudgetError, HardwareError, OptionError
from ooc.events import ignore
from ooc.plan import UNMEASURED, Hardware, Limits
from ooc.plan.graphs import KNOWN
from ooc.plan.simulate.timeline import Resource
from ooc.report.what_if import full_axes, grid, next_points, parse_axes
from ooc.sizes import parse_size
from tests.cli.conftest import RunCommand
from tests.cli.test_run import record

GRAPH = "nodes=22000,edges=220000,features=32,classes=4"
SMALL = ("--hidden", "16", "--layers", "2", "--threads", "1")
BUDGETS = ("--gpu-budget", "4100K", "--host-budget", "1M")


@pytest.fixture
def graph(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of this test's own: training keeps the first aggregation in it, and others count on its absence."""
    return Path(shutil.copytree(graph, tmp_path_factory.mktemp("own") / "graph.ooc"))


def planned(run: RunCommand, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = run("plan", *arguments, *SMALL, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_every_option_of_training_that_could_change_the_plan_is_there() -> None:
    from ooc.cli.plan import command

    own = {option.name for option in train_options() if option.group not in (RUN, SAMPLING)}
    assert own <= {parameter.name for parameter in command.params}


def test_the_forecast_is_what_training_then_moves(here: Path, run: RunCommand) -> None:
    """Bytes to the byte, memory within what was promised; and ``--compare`` says so."""
    graph = here / "graph.ooc"
    assert run("convert", f"synthetic:{GRAPH},seed=1", graph, "--quiet")[0] == 0
    promised = planned(run, graph, *BUDGETS, "--no-advice", "--eval-every", "0")
    assert list(here.iterdir()) == [graph]
    budgets = ("--eval-every", "0", "--epochs", "3", "--quiet", "--out", "r")
    assert run("train", graph, *SMALL, *BUDGETS, *budgets)[0] == 0
    assert json.loads(Path("r/plan.json").read_text())["ssd_read_bytes"] == promised["ssd_read_bytes"]
    last = json.loads(Path("r/metrics.jsonl").read_text().splitlines()[-1])
    assert promised["ssd_write_bytes"] > 0
    for name in ("ssd_read_bytes", "ssd_write_bytes"):
        assert last[name] == promised[name]
    assert last["device_peak_bytes"] <= promised["gpu_peak_bytes"] <= 4_100_000
    assert last["host_peak_bytes"] <= promised["host_peak_bytes"] <= 1_000_000

    code, out, _ = run("plan", "--compare", "r", "--json")
    compared = {quantity["name"]: quantity for quantity in json.loads(out)["quantities"]}
    assert code == 0
    assert compared["SSD read"]["ratio"] == compared["SSD written"]["ratio"] == 1
    assert compared["time an epoch"]["measured"] > 0
    other = here / "other.ooc"
    assert run("convert", "synthetic:nodes=2000,edges=9000,features=32,classes=4", other, "--quiet")[0] == 0
    code, out, err = run("plan", other, "--compare", "r")
    assert (code, out, err.count("\n")) == (2, "", 1) and "r was trained on another store than" in err
    assert run("plan", graph, "--compare", "r")[0] == 0
    code, out, _ = run("plan", "--compare", "r")
    assert code == 0 and "the median of 2 epochs" in out and "SSD written" in out


def test_what_is_read_to_fill_the_memory_is_told(here: Path, run: RunCommand) -> None:
    """By the first epoch, also where every one is followed by an evaluation of its own, which works in the same
    memory."""
    graph = here / "graph.ooc"
    assert run("convert", f"synthetic:{GRAPH},seed=1", graph, "--quiet")[0] == 0
    room = ("--gpu-budget", "200M", "--host-budget", "200M", "--epochs", "3", *SMALL)
    assert run("train", graph, *room, "--eval-every", "0", "--out", "warm")[0] == 0
    code, out, _ = run("train", graph, *room, "--eval-every", "0", "--out", "a", "-v")
    forecast = json.loads(Path("a/plan.json").read_text())
    first, *later = [json.loads(line)["ssd_read_bytes"] for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert code == 0 and forecast["ssd_read_bytes"] == 0 and later == [0, 0]
    assert first == forecast["first_epoch_read_bytes"] > 0
    assert re.search(
        r"0 B \(\d\S* [KM]B in the first, which fills the memory\) read and 0 B written", " ".join(out.split())
    )
    assert run("train", graph, *room, "--eval-every", "1", "--out", "b")[0] == 0
    promised = json.loads(Path("b/plan.json").read_text())["ssd_read_bytes"]
    read = [json.loads(line)["ssd_read_bytes"] for line in Path("b/metrics.jsonl").read_text().splitlines()]
    assert promised == 0 and read == [first, 0, 0]


def test_more_memory_than_there_is_is_planned_for_and_said(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.memory.available_memory_bytes", lambda: 1_000_000_000)
    asked = ("--graph", GRAPH, *SMALL, "--no-advice", "--gpu-budget", "900M", "--host-budget", "900G")
    code, out, _ = run("plan", *asked)
    assert code == 0 and "of 901 GB, at most" in out
    assert "assumed: more memory than is free: training here would be planned for 1.00 GB" in out
    code, out, _ = run("plan", *asked, "--hardware", "laptop")
    assert code == 0 and "more memory" not in out


def test_the_floor_is_the_least_that_does(run: RunCommand) -> None:
    """Its parts add up to budgets that do; a per cent less is refused."""
    parts = planned(run, "--graph", GRAPH, "--floor")["floor"]
    host = parts["row offsets, scalings and scores, on the host"]
    device = sum(parts.values()) - host
    assert host > 0 and all(nbytes >= 0 for nbytes in parts.values())
    planned(run, "--graph", GRAPH, "--no-advice", "--gpu-budget", str(device), "--host-budget", str(host))
    less = ("--gpu-budget", str(device * 99 // 100), "--host-budget", str(host))
    assert run("plan", "--graph", GRAPH, *SMALL, *less)[0] == 2
    assert "in all" in run("plan", "--graph", GRAPH, *SMALL, "--floor")[1]
    assert run("plan", "--graph", GRAPH, "--floor", "--gpu-budget", "1G")[0] == 2


def test_the_json_has_what_is_documented(run: RunCommand) -> None:
    found = planned(run, "--graph", GRAPH, *BUDGETS)
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for name in found:
        assert f"`{name}`" in page, name
    assert found["epoch_s"] > 0
    assert {fate["fate"] for fate in found["fates"]} <= {"device", "host", "ssd", "recompute", "host + ssd"}
    for fate in found["fates"]:
        assert sum(fate[way] for way in ("device", "host", "ssd", "recompute")) == 100
    assert {change["name"] for change in found["changes"]} == {
        "twice the memory",
        "a disk twice as fast",
        "--spill-dtype bfloat16",
    }
    assert any("spread evenly" in line for line in found["assumptions"])
    busiest = max(found["resources"], key=lambda resource: resource["busy_s"])
    assert found["bottleneck"] == busiest["resource"]


def test_tables_name_every_matrix_and_pass(here: Path, run: RunCommand) -> None:
    code, out, _ = run("plan", "--graph", GRAPH, *BUDGETS, *SMALL)
    assert code == 0
    for text in ("in-edges", "backward use", "twice the memory", "busiest:", "assumed: counts of given", "loss"):
        assert text in out
    assert list(here.iterdir()) == []


def test_many_layers_are_said_to_take_long(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.cli.plan._MANY_LAYERS", 1)
    code, _, err = run("plan", "--graph", GRAPH, *SMALL, "--floor")
    assert (code, err) == (0, "planning 2 layers, which may take minutes\n")


def test_tables_are_not_cut_on_80_columns(run: RunCommand) -> None:
    budgets = ("--gpu-budget", "8G", "--host-budget", "16G")
    code, out, _ = run("plan", "--graph", "ogbn-papers100M", "--layers", "2", "--no-advice", *budgets)
    tables = out[out.index("matrix ") : out.index("assumed: ")]
    assert code == 0 and "…" not in tables and "1,615,685,872" in tables
    assert all(len(line) <= 80 for line in tables.splitlines())
    for heading in ("slabs", "bound by", "multiply-adds", "backward use"):
        assert heading in tables


def test_what_if_plans_for_every_point_and_more_memory_helps(run: RunCommand, here: Path) -> None:
    axes = ("gpu=1K,4100K,64M", "host=1M ssd=2G,4G/s")
    code, out, _ = run("plan", "--graph", GRAPH, *SMALL, "--what-if", *axes, "--json", "--plot", "p.svg")
    found = json.loads(out)
    cells = [cell for cell in found["cells"] if cell["ssd_bytes_per_s"] == 2e9]
    assert code == 0 and len(found["cells"]) == 6 and len(cells) == 3
    assert [cell["feasible"] for cell in cells] == [False, True, True]
    assert "give --gpu-budget" in cells[0]["reason"]
    least, more = cells[1:]
    assert more["epoch_s"] < least["epoch_s"] and more["ssd_write_bytes"] < least["ssd_write_bytes"]
    assert least["pareto"] and not found["cells"][-1]["pareto"]
    # What is lacking is no more than what does.
    lacking = cells[0]["lacking_bytes"]
    limits = {"gpu": 1000 + lacking["gpu"], "host": 10**6 + lacking.get("host", 0)}
    budgets = [text for name, size in limits.items() for text in (f"--{name}-budget", str(size))]
    assert run("plan", "--graph", GRAPH, *SMALL, *budgets, "--no-advice")[0] == 0
    assert "Pareto" in Path("p.svg").read_text() and "too small" in Path("p.svg").read_text()


def test_layers_that_compute_all_rows_are_assumed_to(run: RunCommand) -> None:
    code, out, _ = run("plan", "--graph", GRAPH, *SMALL, "--no-savings", "--no-advice")
    assert code == 0 and "assumed: every layer computes all rows (--no-savings)\n" in out


def test_what_if_in_words(run: RunCommand) -> None:
    code, out, _ = run("plan", "--graph", GRAPH, *SMALL, "--what-if", "gpu=1K,2M", "ssd=2G")
    assert code == 0 and "too small" in out and "2.00 MB" in out and "gpu +" in out
    code, out, _ = run("plan", "--graph", GRAPH, *SMALL, "--what-if", "memory=1K,2K", "ssd=2G")
    assert code == 0 and "no point of these does; what each lacks stands in its place\n" in out
    code, out, _ = run("plan", "--graph", GRAPH, *SMALL, "--hardware", "a5000", "--what-if", "gpu=1G host=1G ssd=2G")
    assert code == 0 and "cards are as fast as a5000's, and differ in memory alone" in " ".join(out.split())
    code, out, _ = run("plan", "--graph", GRAPH, *SMALL, "--what-if")
    assert code == 0 and re.search(r"from memory .*, ssd 2.00 GB/s, .*:", out) and "  ssd 4.00 GB/s saves" in out
    assert re.search(r"^ \d+\.?\d* [MG]B +\d+\.\d+ s \*", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("memory_bytes", [10**9, 32 * 10**9])
def test_the_usual_axes(memory_bytes: int) -> None:
    limits = Limits(10**9, 2 * 10**9)
    axes = full_axes({}, UNMEASURED, limits, memory_bytes=memory_bytes, least_bytes=70 * 10**6)
    sizes = [value.amount for value in axes["memory"]]
    assert 2 <= len(sizes) <= 7 and sizes == sorted(set(sizes)) and sizes[0] == 50 * 10**6
    assert memory_bytes < sizes[-1] <= 2 * memory_bytes
    assert [value.label for value in axes["ssd"]] == ["2.00 GB/s", "4.00 GB/s"]
    axes = full_axes({}, load_hardware("a5000"), limits, memory_bytes=memory_bytes, least_bytes=1)
    assert [value.label for value in axes["gpu"]][:2] == ["8 GB card", "12 GB card"]
    assert [value.amount for value in axes["host"]] == [int(0.9 * n * memory_bytes) for n in (0.5, 1, 2)]
    given = parse_axes(["gpu=1M"])
    assert full_axes(given, UNMEASURED, limits, memory_bytes=1, least_bytes=1)["host"][0].amount == 2 * 10**9


def test_the_front_is_what_no_other_point_beats() -> None:
    """Against the definition, on figures of a stand-in for the planner; what cannot matter is not planned for."""
    planned = []

    def plan(limits: Limits, hardware: Hardware) -> Any:
        planned.append((limits.device_bytes, limits.host_bytes))
        if limits.device_bytes < 2:
            raise BudgetError("give gpu_budget='2'")
        ssd_bytes = 0 if limits.host_bytes == 3 else 10
        rate = hardware.disk.read_bytes_per_s.at(1e6)
        timeline = SimpleNamespace(bottleneck=Resource.COMPUTE)
        epoch_s = 10 / limits.device_bytes + ssd_bytes * 2e9 / rate
        return SimpleNamespace(epoch_s=epoch_s, ssd_read_bytes=ssd_bytes, ssd_write_bytes=0, timeline=timeline)

    axes = parse_axes(["gpu=1,2,3", "host=1,2,3", "ssd=2G,4G"])
    cells = grid(axes, Limits(1, 1), UNMEASURED, plan, ignore)
    points = {(c["gpu_budget_bytes"], c["host_budget_bytes"], c["ssd_bytes_per_s"]): c for c in cells}
    front = {point for point, cell in points.items() if cell["pareto"]}
    assert front == {(g, h, s) for g in (2, 3) for h, s in ((1, 2e9), (1, 4e9), (3, 2e9))}
    assert points[1, 1, 2e9]["lacking_bytes"] == {"gpu": 1}
    assert len(planned) == 9 + 4
    best, *_ = next_points(cells, {"gpu_budget_bytes": 2, "host_budget_bytes": 2, "ssd_bytes_per_s": int(2e9)})
    assert (best["axis"], best["to"], best["from"]["host"]) == ("host", "3 B", "2 B")


def test_a_budget_that_does_not_do_is_one_line_and_what_it_names_does(run: RunCommand) -> None:
    tight = ("--graph", GRAPH, *SMALL, "--no-advice", "--host-budget", "1M", "--json")
    code, out, err = run("plan", *tight, "--gpu-budget", "10K")
    assert (code, out, err.count("\n")) == (2, "", 1)
    least = err.split("--gpu-budget ")[1].split()[0].rstrip(";,")
    assert run("plan", *tight, "--gpu-budget", least)[0] == 0


def test_one_memory_is_both_budgets(run: RunCommand) -> None:
    """The least that is named does, however little either budget would be, and --what-if goes through sizes of it."""
    small = ("--graph", GRAPH, *SMALL, "--no-advice")
    for too_little in ("10K", "1M"):
        code, out, err = run("plan", *small, "--memory", too_little)
        assert (code, out, err.count("\n")) == (2, "", 1) and "budget" not in err and "device" not in err
        least = err.split("give --memory ")[1].strip()
    assert run("plan", *small, "--memory", least)[0] == 0
    nearly = str(parse_size(least) * 99 // 100)
    assert run("plan", *small, "--memory", nearly)[0] == 2
    code, out, _ = run("plan", *small, "--memory", "64M")
    assert code == 0 and "memory 64.0 MB" in out and not re.search("device|host (memory|budget)", out)
    found = planned(run, *small, "--memory", "60M")
    assert (found["memory_bytes"], found["gpu_budget_bytes"], found["host_budget_bytes"]) == (60e6, 20e6, 40e6)
    code, out, _ = run("plan", *small, "--what-if", "memory=1K,64M")
    assert code == 0 and re.search(r"1\.00 KB +too small", out) and re.search(r"64\.0 MB +0\.\d+ s", out)
    for arguments, line in (
        (("--memory", "1G", "--gpu-budget", "1G"), "give either it or --gpu-budget and --host-budget"),
        (("--memory", "1G", "--hardware", "a5000"), "for a GPU give --gpu-budget and --host-budget"),
        (("--what-if", "memory=1G", "--hardware", "a5000"), "a5000 has a GPU; give gpu= and host="),
    ):
        code, out, err = run("plan", *small, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and line in err


def test_a_gpu_budget_too_small_beside_ample_host_memory_is_named_alone(run: RunCommand) -> None:
    """What the parameters and temporaries take is not made up for by the other budget."""
    ample = ("--graph", GRAPH, *SMALL, "--no-advice", "--host-budget", "1G", "--json")
    code, out, err = run("plan", *ample, "--gpu-budget", "1K")
    assert (code, out) == (2, "") and "of the gpu budget alone, which is 1.00 KB; give --gpu-budget" in err
    assert "leanest" not in err
    assert run("plan", *ample, "--gpu-budget", err.split("--gpu-budget ")[1].strip())[0] == 0


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_machine_is_described_and_says_where_from(name: str, run: RunCommand) -> None:
    machine = load_hardware(name)
    assert machine.name == name
    assert machine.source.startswith("data sheets, not measured")
    assert machine.has_device_memory and machine.device_memory_bytes < machine.host_memory_bytes


def test_machines_are_listed(run: RunCommand) -> None:
    assert {"a100-40g", "a100-80g", "a5000", "h200", "laptop"} <= set(shipped())
    code, out, _ = run("plan", "--hardware", "list")
    assert code == 0 and all(name in out for name in shipped())
    assert set(json.loads(run("plan", "--hardware", "list", "--json")[1])) == set(shipped())


def test_a_described_machine_gives_its_memory(run: RunCommand, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(load_hardware("a5000").as_dict() | {"name": "mine"}))
    for name, expected in (("a5000", "a5000"), (str(file), "mine")):
        found = planned(run, "--graph", GRAPH, "--hardware", name, "--no-advice")
        assert found["hardware"]["name"] == expected
        assert (found["gpu_budget_bytes"], found["host_budget_bytes"]) == (21_600_000_000, 115_200_000_000)


def test_a_faster_disk_is_forecast_to_be_no_slower(run: RunCommand, tmp_path: Path) -> None:
    slow = load_hardware("laptop").as_dict()
    slow["disk"] |= {"read_bytes_per_s": 1e6, "write_bytes_per_s": 1e6, "both_ways_bytes_per_s": 1e6}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    tight = ("--graph", GRAPH, "--gpu-budget", "8M", "--host-budget", "1M", "--no-advice")
    fast = planned(run, *tight, "--hardware", "laptop")
    assert fast["epoch_s"] < planned(run, *tight, "--hardware", str(tmp_path / "slow.json"))["epoch_s"]


def test_several_processes_share_the_rows(run: RunCommand, tmp_path: Path) -> None:
    """A row a process: what all have adds up, and the drawing has one below the other."""
    machine = ("--hardware", "a5000", "--link", "20G", "--gantt", tmp_path / "ranks.svg", "--exchange-by", "host")
    found = planned(run, "--graph", "nodes=20M,edges=200M,features=32,classes=4", *machine, "--ranks", "3")["ranks"]
    assert [sum(one["rows"] for one in found["ranks"]), len(found["ranks"])] == [20_000_000, 3]
    assert found["links"] == "20.0 GB a second, by way of the host"
    assert 1 < found["speed_up"] < 3 and found["epoch_s"] > max(one["compute_s"] for one in found["ranks"])
    for one in found["ranks"]:
        a_byte_s = 2 / 25.2e9  # both GPUs' wires; the link is faster
        assert one["link_s"] == pytest.approx(one["received_bytes"] * a_byte_s) and one["received_bytes"] > 0
        assert 0 < one["link_exposed_s"] < one["link_s"]
    assert found["pulls"] and {one["sent"] for one in found["pulls"]} <= {"halo", "columns"}
    for one in found["pulls"]:  # every edge leads anywhere, and all rows are sent
        assert one["columns_bytes"] is None or one["columns_bytes"] < one["halo_bytes"]
    assert all(f"rank {rank}: " in (tmp_path / "ranks.svg").read_text() for rank in range(3))


def test_what_is_named_for_several_processes_suffices(run: RunCommand, tmp_path: Path) -> None:
    """Where there is too little for row offsets, too, and so nothing is known of whose rows are wanted."""
    ooc.convert("synthetic:nodes=20000,edges=80000,features=8,classes=4", tmp_path / "g.ooc")
    given = "plan", tmp_path / "g.ooc", *SMALL, "--device", "cpu", "--ranks", "2", "--memory"
    code, _, err = run(*given, "1K")
    found = re.search(r"row offsets.* give --memory (\w+), for 2 processes", err)
    assert code == 2 and found, err
    assert run(*given, found[1])[0] == 0


def test_the_epoch_is_drawn(run: RunCommand, tmp_path: Path) -> None:
    for suffix in (".svg", ".html", ".json"):
        planned(run, "--graph", GRAPH, *BUDGETS, "--no-advice", "--gantt", tmp_path / f"epoch{suffix}")
        assert (tmp_path / f"epoch{suffix}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cora", "no such graph; known are reddit"),
        ("nodes=10,nodes=20,edges=5,features=1,classes=2", "nodes is given twice"),
        ("nodes=10", "edges, features, classes missing"),
        ("reddit,colour=3", "'colour=3' is no entry"),
        ("reddit,edges=many", "edges=many is no count"),
        ("reddit,edges=1e999", "edges=1e999 is no count"),
        ("reddit,labelled=300000", "labelled=300000 is more than the 232,965 nodes"),
        ("reddit,labelled=-1", "labelled=-1 is neither a fraction up to 1 nor a count"),
        ("reddit,dtype=int8", "dtype=int8 is not one of float16"),
        ("reddit,undirected=yes", "undirected=yes is neither 0 nor 1"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(text: str, line: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_graph(text)
    assert line in str(raised.value)


def test_labelled_is_a_fraction_up_to_one_and_a_count_above() -> None:
    assert parse_graph("reddit,labelled=0.5").labelled == 116_482
    assert parse_graph("reddit,labelled=1").labelled == 232_965
    assert parse_graph("reddit,labelled=2").labelled == 2
    assert parse_graph("MAG240M") == KNOWN["MAG240M"]
    graph = parse_graph("nodes=1.5M,edges=2e9,features=8,classes=2,undirected=1,dtype=float16")
    assert (graph.nodes, graph.edges, graph.labelled) == (1_500_000, 2_000_000_000, 1_500_000)
    assert graph.undirected and graph.feature_dtype == "float16"


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["hots=1G"], r"give gpu=8G.*; did you mean host\?"),
        (["memory=1G", "gpu=1G"], "both budgets"),
        (["gpu=1G", "gpu=2G"], "gpu is given twice"),
        (["gpu=big"], "'big' is no size"),
    ],
)
def test_axes_that_make_no_sense_are_refused(texts: list[str], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        parse_axes(texts)
    both = parse_axes(["host=2G,1G", "gpu=1G"])
    assert both == parse_axes(["host=2G,1G  gpu=1G"])
    assert {axis: [value.amount for value in values] for axis, values in both.items()} == {
        "host": [10**9, 2 * 10**9],
        "gpu": [10**9],
    }


def test_what_cannot_be_planned_is_one_line(graph: Path, here: Path, run: RunCommand) -> None:
    Path("bad.json").write_text('{"name": "bad"}')
    Path("no.json").write_text("{")
    Path("list.json").write_text("[]")
    for arguments, line in (
        ((graph, "--graph", "reddit"), "one graph at a time"),
        ((), "no *.ooc is in the current folder"),
        (("--graph", GRAPH, "--hardware", "tpu"), "no such machine; there are a100-40g"),
        (("--graph", GRAPH, "--hardware", "none.json"), "No such file"),
        (("--graph", GRAPH, "--hardware", "no.json"), "no JSON"),
        (("--graph", GRAPH, "--hardware", "list.json"), "list.json: it holds no JSON object"),
        (("--graph", GRAPH, "--hardware", "bad.json"), "bad.json: source is missing"),
        (("--graph", GRAPH, "--gantt", "epoch.png"), "ends in .svg, .html or .json"),
        (("--compare", "nothing"), "has no part in --compare"),
        (("--compare", "nothing", "--graph", GRAPH), "--compare takes what the run was trained on"),
        (("--graph", GRAPH, "--what-if", "host=1G", "--gantt", "epoch.svg"), "--gantt has no part in --what-if"),
        (("--graph", GRAPH, "--what-if", "--plot", "epoch.pdf"), "epoch.pdf: give a name that ends in .svg or .png"),
        (("--graph", GRAPH, "--plot", "epoch.svg"), "--plot draws what --what-if finds"),
    ):
        code, out, err = run("plan", *arguments, *SMALL, "--no-advice")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert line in err
    with pytest.raises(HardwareError):
        load_hardware("bad.json")


def test_a_run_without_a_forecast_is_refused(here: Path, run: RunCommand) -> None:
    Path("r").mkdir()
    Path("r/config.json").write_text("{}")
    assert "there is no run at nothing" in run("plan", "--compare", "nothing")[2]
    assert "has no part" in run("plan", "--compare", "r", "--what-if")[2]
    assert "runs in batches, from Python or of earlier versions have none" in run("plan", "--compare", "r")[2]
    Path("r/plan.json").write_text('{"first_epoch": 1}')
    assert "has finished no epoch" in run("plan", "--compare", "r")[2]
    Path("r/metrics.jsonl").write_text(record(1).to_line())
    assert "plan.json is damaged" in run("plan", "--compare", "r")[2]
