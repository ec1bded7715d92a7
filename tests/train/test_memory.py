# SPDX-License-Identifier: Apache-2.0
"""Resident memory of a whole process stays under the two budgets plus the stated overhead."""

import json
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ooc
from ooc.train.resources import OVERHEAD_BYTES
from tests.examples import cases, examples

NODES, EDGES, FEATURES, HIDDEN = 150_000, 300_000, 128, 128
GPU_BUDGET, HOST_BUDGET = 40_000_000, 24_000_000
WHOLE_MATRIX_BYTES = NODES * HIDDEN * 4
"""77 MB; an epoch of three layers in memory keeps about ten of these. What libraries and allocators take of their own
(measured: 47 to 68 MB beside the budgets, from run to run) is less."""

WORKER = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    import torch
    from torch_geometric.nn.models import GCN, GraphSAGE
    import ooc
    import ooc.train.trainer
    from ooc.kernels.pulls import rehearse
    from ooc.train.prediction import Prediction
    from ooc.train.resources import Resources

    rehearse(128, torch.float32)  # the compiler is a library, too
    imports, code = status("VmRSS"), status("RssFile")
    store, kind, gpu, host, hidden, spill, *names = sys.argv[1:]
    store = ooc.open(store)
    torch.manual_seed(0)
    kind = {"gcn": GCN, "sage": GraphSAGE}[kind]
    model = kind(store.num_features, int(hidden), 3, store.num_classes, dropout=0.5)
    with ooc.Trainer(model, store, int(gpu), int(host), device="cpu", spill_dir=spill) as trainer:
        records = trainer.fit(epochs=2, eval_every=2)
        planned = trainer.plan.device_peak_bytes, trainer.plan.host_peak_bytes
    last = records[-1]
    code = status("RssFile") - code  # pages of libraries, which the system takes back when it lacks memory
    peaks = [status("VmHWM")]
    for name in names:
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        resources = Resources.parse(int(gpu), int(host), spill_dir=spill)
        Prediction(model, store, resources, "embeddings").write(Path(spill) / name)
        peaks.append(status("VmHWM"))
    print(json.dumps({"imports": imports, "code": code, "peaks": peaks, "planned": planned,
                      "measured": [last.device_peak_bytes, last.host_peak_bytes],
                      "moved": last.ssd_write_bytes, "losses": [r.loss for r in records]}))
    """
)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph whose every matrix is nearly as large as both budgets together."""
    path = tmp_path_factory.mktemp("store") / "graph.ooc"
    ooc.convert(f"synthetic:nodes={NODES},edges={EDGES},features={FEATURES},classes=16,directed=1", path)
    return path


@pytest.mark.parametrize("kind", ["sage", "gcn"][: examples(1)])
def test_resident_memory_stays_under_the_budgets(kind: str, store_path: Path, tmp_path: Path) -> None:
    """The kernel's own count of a fresh process, imports and all, and net of the imports too: while it trains,
    and while it predicts, though the table that is then written is as large as both budgets together."""
    assert 4 * WHOLE_MATRIX_BYTES > 3 * (GPU_BUDGET + HOST_BUDGET), "budgets of about one matrix"
    names = cases(["out.npy"], ["out.npy", "out.zarr"])
    arguments = [str(store_path), kind, str(GPU_BUDGET), str(HOST_BUDGET), str(HIDDEN)]
    grown = GPU_BUDGET + HOST_BUDGET + WHOLE_MATRIX_BYTES
    for turn in (
        "first",
        "second",
    ):  # now and then allocators keep 20 MB more; what nobody has admitted is there each time
        (folder := tmp_path / turn).mkdir()
        command = [sys.executable, "-c", WORKER, *arguments, str(folder), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        told = json.loads(done.stdout.splitlines()[-1])
        if max(told["peaks"]) - told["imports"] - told["code"] <= grown:
            break
    assert told["moved"] > 2 * WHOLE_MATRIX_BYTES, "out of core, or the test shows nothing"
    assert len(told["peaks"]) == 1 + len(names)
    assert max(told["peaks"]) <= GPU_BUDGET + HOST_BUDGET + OVERHEAD_BYTES
    assert max(told["peaks"]) - told["imports"] - told["code"] <= grown
    assert told["measured"][0] <= told["planned"][0] <= GPU_BUDGET
    assert told["measured"][1] <= told["planned"][1] <= HOST_BUDGET
    on_cpu = 580_000_000 if find_spec("triton") else 500_000_000
    stated = on_cpu if torch.version.cuda is None else 900_000_000
    assert stated + (130_000_000 if find_spec("numba") else 0) >= OVERHEAD_BYTES
    assert told["losses"][1] != told["losses"][0], "a step was taken"
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / "out.npy").stat().st_size > WHOLE_MATRIX_BYTES
