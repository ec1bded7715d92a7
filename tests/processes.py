# SPDX-License-Identifier: Apache-2.0
"""Several processes of one training, forked here."""

import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def fork() -> int:
    """``os.fork`` once all other threads sleep. Python joins a thread before the thread has ended: MKL still frees what
    it has of it, under locks that would never be released in the child (5 of 57 forks right after a join hung)."""
    while any(state != "S" for state in _states_of_other_threads()):
        time.sleep(0.001)
    return os.fork()


def _states_of_other_threads() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if int(task.name) != threading.get_native_id():
                yield (task / "stat").read_text().rpartition(") ")[2][0]


def together(count: int, folder: Path, work: Callable[[int], Any], *, meet: bool = True) -> list[Any]:
    """What ``work`` gives each of so many forked processes of one group, by rank; None for one that is killed. They
    ``meet`` here."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    children = []
    for rank in range(count):
        child = fork()
        if child == 0:
            try:
                if count > 1 and meet:
                    # Of no backend by name, as torch's own examples have it: ours are made beside it.
                    dist.init_process_group(init_method=f"file://{folder}/group", rank=rank, world_size=count)
                torch.save(work(rank), folder / f"{rank}.pt")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        children.append(child)
    try:
        while children:
            os.waitpid(children[0], 0)
            del children[0]
    finally:
        for child in children:  # the test's time is up
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    found = [folder / f"{rank}.pt" for rank in range(count)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]
