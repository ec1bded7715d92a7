# SPDX-License-Identifier: Apache-2.0
"""``ooc`` on processors and links that are slowed down by sleeping, so that more processes than cores can be timed.

    torchrun --standalone --nproc-per-node=4 tools/throttled.py '{"times": 8, "link": 1e8, "notes": "notes"}' train …

A tile takes ``times`` as long as the processor time that it has taken: the rest is slept, and sleeping needs no core,
so that 4 processes slowed 8-fold keep half a core busy with tiles. However busy the machine is, that is what a tile
takes, unless it had to wait for a core for longer. What has been received is slept for at ``link`` bytes a second,
besides the time that it took. Only what is done between tiles (handing them out, folding sums, the optimizer's step)
is as fast as ever. ``lag``, with ``lagging`` and ``since``: this rank's tiles take so many times as long as the others'
from that epoch on. Into the folder ``notes`` goes a line of JSON a rank and epoch.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ooc.cli import main
from ooc.engine.exchange import Exchange
from ooc.engine.session import Session
from ooc.engine.workers import WorkerPool

_WORTH_SLEEPING_S = 1e-3


def slow_down(options: dict[str, Any], rank: int) -> None:
    """Have the engine's tiles and links take longer from here on; one thread a process."""
    epochs, owed_s = 0, 0.0
    timed, record = WorkerPool.timed, Session.record

    def slowly(pool: WorkerPool, compute: Callable[[], Any], worker: int = 0) -> Any:
        def compute_and_sleep() -> Any:
            nonlocal owed_s
            begun_s, cpu_s = time.perf_counter(), time.thread_time()
            found = compute()
            lags = rank == options.get("lagging") and epochs + 1 >= options["since"]
            times = options["times"] * (options["lag"] if lags else 1)
            owed_s += times * (time.thread_time() - cpu_s) - (time.perf_counter() - begun_s)
            if owed_s > _WORTH_SLEEPING_S:
                begun_s = time.perf_counter()
                time.sleep(owed_s)
                owed_s -= time.perf_counter() - begun_s
            return found

        return timed(pool, compute_and_sleep, worker)

    def slow_link(send: Callable[..., None]) -> Callable[..., None]:
        def sent(exchange: Exchange, *what: Any) -> None:
            before = exchange.received_bytes
            send(exchange, *what)
            time.sleep((exchange.received_bytes - before) / options["link"])

        return sent

    def noted(session: Session, *what: Any, **more: Any) -> Any:
        nonlocal epochs
        epochs += 1
        found, exchange = record(session, *what, **more), session._prepared.exchange
        note = {
            "time_s": found.time_s,
            "compute_s": [item.compute_s for item in found.passes],
            "wait_s": found.exchange_wait_s,
            "received_bytes": found.received_bytes,
            "loss": found.loss,
            "part": 1.0 if exchange is None else exchange.parts[rank],
        }
        with (Path(options["notes"]) / str(rank)).open("a") as file:
            file.write(json.dumps(note) + "\n")
        return found

    WorkerPool.timed, Session.record = slowly, noted  # type: ignore[method-assign]
    if options.get("link"):
        Exchange._send, Exchange._shift = map(slow_link, (Exchange._send, Exchange._shift))  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(json.loads(sys.argv.pop(1)), int(os.environ.get("RANK", "0")))
    sys.exit(main())
