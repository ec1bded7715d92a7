# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_check goes through all of its steps without a GPU, and says in one line when there is none."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.loaded import load_tool

CHECKOUT = Path(__file__).resolve().parent.parent.parent

sys.path.insert(0, str(CHECKOUT / "tools"))
from gpu_parts import clock, epochs, parts  # noqa: E402
from gpu_parts.report import Failed, LeftOut, Report, same_bits  # noqa: E402
from gpu_parts.suite import run_tests  # noqa: E402
from gpu_parts.worker import Worker  # noqa: E402

sys.path.remove(str(CHECKOUT / "tools"))


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The tool in a folder, in this process, which has torch already; the processes that measure are its own. ``path``
    comes first where these look for modules. Its status, and what it has said on both streams."""

    def run(folder: Path, *arguments: str, path: Sequence[str] = ()) -> tuple[int, str, str]:
        tool = load_tool("gpu_check", monkeypatch)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, *filter(None, sys.path)]))
        capfd.readouterr()
        return tool.main(arguments), *capfd.readouterr()

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path, run: Run) -> None:
    """Status 3, and nothing that could be taken for results."""
    status, out, err = run(tmp_path)
    assert status == 3
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("gpu_check: nothing was measured: no NVIDIA GPU can be used: torch ")
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_a_rehearsal_of_some_parts(tmp_path: Path, run: Run) -> None:
    """With what these need: a kernel with its check, and epochs in less memory, of the same bits."""
    pytest.importorskip("triton", reason="kernels for the GPU need triton: pip install -r requirements.gpu.txt")
    asked = ("sum 4 float32", "epochs sage", "whole on the GPU", "eighth on GPU and host")
    status, out, err = run(tmp_path, "--rehearse", "--seconds", "400", *(f"--only={name}" for name in asked))
    assert status == 0, out + err
    data = json.loads((tmp_path / "gpu_check.json").read_text())
    assert data["failures"] == data["left_out"] == {}
    assert set(data["sum 4 float32"]["backward"]["seconds"]) == {"ooc", "torch.sparse CSR", "PyG"}
    losses = data["epochs sage"]["loss"]
    assert all(losses[f"PyG, {form}"] == pytest.approx(losses["ooc"], rel=1e-3) for form in ("edge_index", "CSR"))
    assert data["bits of eighth on GPU and host"] == "those of whole on the GPU"
    assert data["eighth on GPU and host"]["ssd_read_bytes"] > 0
    assert "say nothing about any GPU" in out


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_rehearsal_goes_through_every_part(tmp_path: Path, run: Run) -> None:
    """On the processor, tiny: all kernels, their checks, epochs against PyG; it says that times mean nothing."""
    pytest.importorskip("triton", reason="kernels for the GPU need triton: pip install -r requirements.gpu.txt")
    status, out, err = run(tmp_path, "--rehearse", "--seconds", "400")
    assert status == 0, out + err
    data = json.loads((tmp_path / "gpu_check.json").read_text())
    assert data["rehearsal"] is True
    assert data["failures"] == {}
    assert data["left_out"] == {}
    assert set(data) >= {"machine", "tests", "device copy", "pcie", "dense products", "sum 4 float32", "sum 4 bfloat16"}
    assert data["tests"] == {"passed": 1, "processes": 1}
    assert set(data["sum 4 float32"]["backward"]["seconds"]) == {"ooc", "torch.sparse CSR", "PyG"}
    assert set(data["other pulls"]["seconds"]) == set(data["other pulls"]["counted_bytes"])
    assert len(data["other pulls"]["seconds"]) == 11
    for name in parts.MODELS:
        losses, timed = data[f"epochs {name}"]["loss"], data[f"epochs {name}"]["PyG"]
        assert all(losses[f"PyG, {form}"] == pytest.approx(losses["ooc"], rel=1e-3) for form in timed)
        assert set(timed) == {"edge_index", "CSR"}
    assert data["compiled sage"]["losses"][-1] == pytest.approx(data["epochs sage"]["loss"]["ooc"], rel=1e-3)
    assert "say nothing about any GPU" in out
    trained = ("whole-on-the-GPU", "eighth-on-the-GPU", "eighth-on-GPU-and-host")
    traces = {f"gpu_check.{what}.events.trace.json" for what in trained}
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_check.json", *traces}
    assert data["whole on the GPU"]["ssd_read_bytes"] == 0
    for name, of_disk in (("eighth on the GPU", False), ("eighth on GPU and host", True)):
        epoch, seen = data[name], data[name]["watched"]["by_events"]
        assert seen["to device"]["bytes"] == epoch["to_device_bytes"] > 0
        assert seen["to host"]["bytes"] == epoch["to_host_bytes"] > 0
        assert bool(epoch["ssd_read_bytes"]) is of_disk
        assert epoch["forecast"]["seconds"] > 0
        assert data[f"bits of {name}"] == "those of whole on the GPU"
        assert epoch["bits"] == data["whole on the GPU"]["bits"]
        (trace,) = epoch["traces"]
        drawn = json.loads((tmp_path / trace).read_text())["traceEvents"]
        assert sum(one.get("args", {}).get("bytes", 0) for one in drawn) == seen["both"]["bytes"]
    assert set(data["large forecasts"]) == {"by", "this graph", "the whole graph", "the whole graph, 40G and 512G"}
    assert data["large epochs"]["to_device_bytes"] == data["large forecasts"]["this graph"]["to_device_bytes"]
    assert {bar["point"] for bar in data["bars"]} == {1, 2, 3, 4}


MISSING = "import sys; sys.modules.update(dict.fromkeys(('triton', 'torch_geometric', 'hypothesis')))"
"""Importing a module that is None there fails as if it were not installed."""


@pytest.mark.timeout(600)
def test_what_is_not_installed_is_left_out_by_name(tmp_path: Path, run: Run) -> None:
    """The rest is measured all the same, and nothing has failed."""
    without, folder = tmp_path / "without", tmp_path / "here"
    without.mkdir()
    folder.mkdir()
    (without / "sitecustomize.py").write_text(MISSING)
    asked = ("tests", "device copy", "sum 4 float32", "epochs gat", "eighth on the GPU", "compiled sage")
    only = [f"--only={name}" for name in asked]
    status, out, err = run(folder, "--rehearse", "--seconds", "400", *only, path=[str(without)])
    assert status == 0, out + err
    data = json.loads((folder / "gpu_check.json").read_text())
    assert data["failures"] == {}
    assert data["left_out"]["triton"] == "triton cannot be imported"
    assert "hypothesis" in data["left_out"]["tests"]
    of_pyg = {"epochs sage", "epochs gat", "eighth on the GPU", "bits of eighth on the GPU", "compiled sage"}
    assert set(data["left_out"]) == {"triton", "tests", "graph", "sum 4 float32", *of_pyg}
    assert data["left_out"]["graph"] == "needs the part triton"
    assert data["device copy"]["bytes_per_s"] > 0
    assert "left out: epochs gat: torch_geometric" in out


def raise_(error: Exception) -> Any:
    raise error


def test_one_part_that_fails_does_not_stop_the_others() -> None:
    report = Report(seconds=10, rehearsal=True)
    assert report.part("wrong", lambda: raise_(Failed("off by 3"))) is None
    assert report.part("broken", lambda: raise_(ValueError("no\nsuch thing"))) is None
    assert report.part("absent", lambda: raise_(LeftOut("no disk"))) is None
    assert report.part("unknown", lambda: raise_(ModuleNotFoundError("No module named 'x'", name="x"))) is None
    assert report.part("full", lambda: raise_(torch.cuda.OutOfMemoryError("CUDA out of memory"))) is None
    assert report.part("fine", lambda: 3) == 3
    assert report.failures == {"wrong": "off by 3", "broken": "ValueError: no"}
    assert report.left_out == {
        "absent": "no disk",
        "unknown": "x cannot be imported",
        "full": "out of memory on the device",
    }
    assert report.values["fine"] == 3


def test_epochs_of_ours_stay_where_pyg_s_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, whose epochs they are then."""
    store = epochs.find_store(tmp_path / "small.ooc", epochs.small_graph(60, 300))
    full = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(epochs, "_full_batch", lambda *arguments: raise_(full))
    found = epochs.compare(store, "gat", 8, torch.device("cpu"), tmp_path)
    assert found["ooc"]["seconds"] > 0
    assert found["left_out"] == dict.fromkeys(("PyG, edge_index", "PyG, CSR"), "out of memory on the device")
    monkeypatch.setattr(epochs, "_full_batch", lambda *arguments: raise_(RuntimeError("shapes")))
    with pytest.raises(RuntimeError, match="shapes"):
        epochs.compare(store, "gat", 8, torch.device("cpu"), tmp_path)


SERVING = """
import os, subprocess, sys, time
from multiprocessing.connection import Connection
sys.path.insert(0, sys.argv[1])
from gpu_parts.report import LeftOut
from gpu_parts.worker import serve

def compute(name, limit_s):
    if name == "hang":
        child = subprocess.Popen(["sleep", "300"])
        open(sys.argv[2], "w").write(str(child.pid))
        time.sleep(300)
    if name == "crash":
        os._exit(9)
    if name == "absent":
        raise LeftOut("no disk")
    if name == "wrong":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return os.getpid()

serve(Connection(int(sys.argv[3])), compute)
"""


def test_what_hangs_or_crashes_is_ended_and_the_next_part_goes_on(tmp_path: Path) -> None:
    """With all that it has started; a process that has failed is not asked again, one that left something out is."""
    child = tmp_path / "child"
    worker = Worker([sys.executable, "-c", SERVING, str(CHECKOUT / "tools"), str(child)])
    try:
        first = worker.ask("number", 60)
        with pytest.raises(LeftOut, match="no disk"):
            worker.ask("absent", 60)
        assert worker.ask("number", 60) == first
        with pytest.raises(Failed, match="no answer after 3 s, so its process was ended"):
            worker.ask("hang", 3)
        deadline = time.monotonic() + 10
        while is_running(int(child.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(int(child.read_text()))
        with pytest.raises(Failed, match="ended by itself, with status 9"):
            worker.ask("crash", 60)
        second = worker.ask("number", 60)
        with pytest.raises(Failed, match="RuntimeError: CUDA error: an illegal memory access"):
            worker.ask("wrong", 60)
        assert len({first, second, worker.ask("number", 60)}) == 3
    finally:
        worker.close()


def is_running(process: int) -> bool:
    """One that has ended and that nobody has asked about is none."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_tests_that_do_not_end_in_time_are_counted_as_far_as_they_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some passed: that is told with the limit. One failed: so has the part."""

    def late(told: str) -> Callable[..., Any]:
        return lambda *command, **options: raise_(subprocess.TimeoutExpired("pytest", 3.0, told.encode()))

    monkeypatch.setattr("gpu_parts.suite.NEEDED", ())
    passed = "tests/gpu/test_sums.py::test_one PASSED [ 1%]\ntests/gpu/test_sums.py::test_two[a b] PASSED\ntests/gpu/x"
    monkeypatch.setattr("gpu_parts.suite.subprocess.run", late(passed))
    assert run_tests(3.0, processes=3) == {"passed": 6, "processes": 3, "ended_after_s": 3.0}
    monkeypatch.setattr("gpu_parts.suite.subprocess.run", late(passed + "\ntests/gpu/test_gat.py::test FAILED"))
    with pytest.raises(Failed, match="ended after 3 s: 1 failed, 2 passed"):
        run_tests(3.0, processes=1)


NO_TESTS = subprocess.CompletedProcess[str]([], 5, "3 deselected", "")
"""As pytest ends where it has been given nothing to run."""


def test_that_no_process_has_a_test_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some get none, where they are many; not all."""
    monkeypatch.setattr("gpu_parts.suite.NEEDED", ())
    one = subprocess.CompletedProcess[str]([], 0, "1 passed, 2 deselected in 0.1s", "")
    shares = {"0/2": one, "1/2": NO_TESTS}
    monkeypatch.setattr(
        "gpu_parts.suite.subprocess.run", lambda *command, env, **options: shares[env["GPU_CHECK_SHARE"]]
    )
    assert run_tests(100, processes=2) == {"passed": 1, "processes": 2}
    monkeypatch.setattr("gpu_parts.suite.subprocess.run", lambda *command, **options: NO_TESTS)
    with pytest.raises(Failed, match="none ended"):
        run_tests(100, processes=1)


def test_tests_that_need_a_package_that_is_missing_are_skipped_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of kernels run without what training needs."""
    pytest.importorskip("triton", reason="without it the tests are left out")
    (tmp_path / "without.py").write_text(WITHOUT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugins = ("-p", "without", "-p", "pytest_timeout")
    found = run_tests(100, ("-k", "no_rows_and_no_edges", *plugins), 1, ["test_sums.py", "test_training.py"])
    assert found["passed"] == 1
    assert found["cannot_be_imported"] == ["torch_geometric"]


WITHOUT = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch_geometric":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""
"""What hides packages; those that zarr registers with pytest need one of them."""


def test_what_takes_the_host_or_the_disk_is_timed_when_the_stores_are_there() -> None:
    """And if they take as long as they may, there is time for all that comes behind them."""
    planned = list(parts.parts(tiny=False))
    names = [part.name for part in planned]
    stores = names.index("large store")
    assert names.index("stores") < stores < min(names.index(name) for name in ("pcie", "disk", "profile"))
    assert all(names.index(part.after) < names.index(part.name) for part in planned if part.after is not None)
    assert max(names.index(name) for name in names if name.startswith("sum ")) < names.index("stores")
    needed_s = [part.needs_s for part in planned[stores + 1 :] if not part.spare]
    assert parts.STORES_S + sum(needed_s) <= 510, "tools/gpu_check's LIMIT_S"
    assert not any(before.spare and not part.spare for before, part in pairwise(planned[stores:])), "these come last"


def test_other_bits_in_less_memory_are_a_failure() -> None:
    """Told with the losses; each model is held against itself."""
    whole: dict[str, Any] = {"bits": {"losses": [(0.5).hex()], "weights": "a"}}
    other: dict[str, Any] = {"bits": {"losses": [(0.25).hex()], "weights": "b"}}
    values = {"whole on the GPU": whole, "eighth on the GPU": whole, "eighth on the GPU, gat": other}
    assert same_bits(values, "eighth on the GPU") == "those of whole on the GPU"
    with pytest.raises(LeftOut, match="needs the part whole on the GPU, gat"):
        same_bits(values, "eighth on the GPU, gat")
    with pytest.raises(Failed, match=r"other bits than .*, gat: losses \[0.25\] instead of \[0.5\]"):
        same_bits({**values, "whole on the GPU, gat": whole}, "eighth on the GPU, gat")


def test_single_parts_come_with_what_they_need() -> None:
    """In the usual order; a name that is none is refused."""
    planned = list(parts.parts(tiny=False))
    assert [part.name for part in parts.chosen(planned, ["compiled gat"])] == ["stores", "epochs gat", "compiled gat"]
    assert parts.chosen(planned, []) == planned
    with pytest.raises(KeyError):
        parts.chosen(planned, ["no such part"])


def test_short_calls_are_timed_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first one's launch, for which the device waits, hardly counts; long ones by themselves."""
    now_s, calls = 0.0, 0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_s = 0.0

        def record(self) -> None:
            nonlocal now_s
            self.at_s = now_s
            now_s += 5e-5  # until a first call has been launched

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.at_s - self.at_s)

    def call(seconds: float) -> None:
        nonlocal now_s, calls
        now_s += seconds
        calls += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu = torch.device("cuda")
    assert clock.seconds_of(gpu, lambda: call(1e-4)) == pytest.approx(1e-4, rel=0.01)
    calls = 0
    assert clock.seconds_of(gpu, lambda: call(0.02)) == pytest.approx(0.02, rel=0.01)
    assert calls == 1


def test_a_part_that_would_begin_too_late_is_left_out() -> None:
    report = Report(seconds=5, rehearsal=True)
    assert report.part("long", lambda: 3, needs_s=60) is None
    assert report.left_out["long"].startswith("needs about 60 s, and ")


def test_a_test_that_fails_is_told() -> None:
    """As pytest tells it; here of an option that it does not have."""
    pytest.importorskip("triton", reason="without it the tests are left out")
    with pytest.raises(Failed, match=r"(?s)pytest ended with 4: .*--no-such-option"):
        run_tests(60, ("--no-such-option",), 1)
