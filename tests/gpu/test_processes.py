# SPDX-License-Identifier: Apache-2.0
"""Two processes train on two GPUs, or both on the one that there is, what one process does there, bit for bit, whether
rows go from GPU to GPU or by way of the host; one that is killed is named."""

import os
import socket
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
_WAYS = ["host", *["device"] * (torch.cuda.device_count() > 1 and torch.distributed.is_nccl_available())]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def _command(store: Path, written: object, ways: str) -> list[str]:
    return ["-m", "tests.gpu.one_of_several", str(store), str(written), DEVICE.type, ways]


def _around() -> dict[str, str]:
    """The environment of processes."""
    around = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < 2:  # then both are shown it
        around["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    return around


@pytest.mark.timeout(400)
def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    case = GraphCase(nodes=20_000, edges=160_000, features=48, isolated=20, unlabelled=40)
    store = store_of(random_data(case, dtype=torch.float32), tmp_path)

    def outcome(*launcher: str) -> dict[str, dict[str, Any]]:
        written = tmp_path / f"{len(launcher)}.pt"
        command = [sys.executable, *launcher, *_command(store.path, written, ",".join(_WAYS))]
        done = subprocess.run(command, env=_around(), cwd=_ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, dict[str, Any]] = torch.load(written, weights_only=False)
        return found

    alone, together = outcome(), outcome(*_TORCHRUN)
    for name, values in alone.items():
        for what, value in values.items():
            other = together[name][what]
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, (name, what)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", _WAYS)
def test_a_process_that_is_killed_is_named(way: str, tmp_path: Path) -> None:
    """Without torchrun, which ends all others; NCCL waits for it until its heart has not beaten for 30 seconds."""
    store = store_of(random_data(GraphCase(nodes=20_000, edges=160_000, features=48), dtype=torch.float32), tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(2):
        told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *_command(store.path, "killed", way)]
        processes.append(subprocess.Popen(command, env=_around() | met | told, cwd=_ROOT, stderr=-1, text=True))
    try:
        for process in processes:
            process.wait(150)
        assert processes[0].stderr is not None and "rank 1 has" in processes[0].stderr.read().splitlines()[-1]
    finally:
        for process in processes:
            process.kill()
