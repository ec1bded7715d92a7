# SPDX-License-Identifier: Apache-2.0
"""Two processes train on two GPUs, or both on the one that there is, what one process does there, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness.comparison import store_of
from tests.gpu.device import DEVICE, INTERPRETED
from tests.graphs import GraphCase, random_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU, or two")]

_ROOT = Path(__file__).resolve().parent.parent.parent
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.timeout(400)
def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    case = GraphCase(nodes=20_000, edges=160_000, features=48, isolated=20, unlabelled=40)
    store = store_of(random_data(case, dtype=torch.float32), tmp_path)
    around = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < 2:  # then both are shown it
        around["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"

    def outcome(*launcher: str) -> dict[str, dict[str, Any]]:
        written = tmp_path / f"{len(launcher)}.pt"
        command = [sys.executable, *launcher, "-m", "tests.gpu.one_of_several", str(store.path), str(written)]
        done = subprocess.run([*command, DEVICE.type], env=around, cwd=_ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, dict[str, Any]] = torch.load(written, weights_only=False)
        return found

    alone, together = outcome(), outcome(*_TORCHRUN)
    for name, values in alone.items():
        for what, value in values.items():
            other = together[name][what]
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, (name, what)
