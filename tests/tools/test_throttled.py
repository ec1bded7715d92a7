# SPDX-License-Identifier: Apache-2.0
"""tools/throttled.py: a tile takes a multiple of its processor time, and of a rank that lags a larger one."""

from pathlib import Path
from time import thread_time

import pytest

from ooc.engine.exchange import Exchange
from ooc.engine.session import Session
from ooc.engine.workers import WorkerPool
from tests.tools.loaded import load_tool


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tile_takes_a_multiple_of_its_processor_time(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for owner, name in ((WorkerPool, "timed"), (Exchange, "_send"), (Exchange, "_shift"), (Session, "record")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be put back
    options = {"times": 3, "lag": 2, "lagging": 1, "since": 1, "link": 1e9, "notes": str(tmp_path)}
    load_tool("throttled.py", monkeypatch).slow_down(options, rank)
    pool = WorkerPool(1)

    def tile() -> float:
        begun_s = thread_time()
        while thread_time() < begun_s + 0.01:
            pass
        return thread_time() - begun_s

    taken_s = sum(pool.timed(tile) for _ in range(3))
    assert pool.busy_s >= (3, 6)[rank] * taken_s - 2e-3
