# SPDX-License-Identifier: Apache-2.0
"""A process that measures, so that what hangs or crashes in it ends with it.

A kernel that never ends cannot be interrupted from the process that has launched it, and one that reads foreign memory
leaves a GPU's context of no use to anybody in the process. So parts are computed in a process of their own, one after
the other; where one takes too long, or has spoilt the context, the process is ended with all that it has started, and
the next part gets a new one, which draws the graph again and finds the store where it was.
"""

import contextlib
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(TOOLS), str(TOOLS.parent)]

from gpu_parts.report import Failed, Kind, LeftOut, judged  # noqa: E402  (needs the path above)

_END_S = 5.0
"""How long a killed process is waited for: one that hangs in a driver may never end."""


class Worker:
    """Computes parts by name, by ``command`` with the number of a pipe behind it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    @classmethod
    def of(cls, arguments: Namespace, scratch: Path) -> "Worker":
        """For the options of ``tools/gpu_check``, with files in ``scratch``."""
        sizes = [str(arguments.nodes), str(arguments.edges), str(arguments.scale)]
        options = [str(Path(arguments.json).resolve()), *sizes, "rehearse" if arguments.rehearse else "measure"]
        return cls([sys.executable, str(Path(__file__).resolve()), str(scratch), *options])

    def ask(self, name: str, limit_s: float) -> Any:
        """The value of a part. ``LeftOut`` and ``Failed`` as there; the latter for what takes longer than ``limit_s``,
        and for what ends the process."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._pipe is not None
        try:
            self._pipe.send((name, limit_s))
            if not self._pipe.poll(limit_s):
                self.close()
                raise Failed(f"no answer after {limit_s:.0f} s, so its process was ended")
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            status = self._process.returncode
            self.close()
            raise Failed(f"its process ended by itself, with status {status}") from None
        if kind is Kind.VALUE:
            return value
        if kind is Kind.LEFT_OUT:
            raise LeftOut(value)
        self.close()  # the context may be of no use any more
        raise Failed(value)

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
            )

    def kill(self) -> None:
        """End the process, whatever it is asked by whichever thread; that one learns of it as if it had crashed."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and all that it has started. May be called twice."""
        if self._process is None or self._pipe is None:
            return
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._pipe.close()
        self._process = self._pipe = None


def serve(pipe: Connection, compute: Callable[[str, float], Any]) -> None:
    """Answer until the other end is closed."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, limit_s = pipe.recv()
            pipe.send(judged(lambda name=name, limit_s=limit_s: compute(name, limit_s)))


if __name__ == "__main__":
    from gpu_parts.parts import Parts

    scratch, drawings, nodes, edges, scale, kind, number = sys.argv[1:]
    if kind == "rehearse":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    sizes: dict[str, Any] = {"nodes": int(nodes), "edges": int(edges), "scale": float(scale)}
    parts = Parts(Path(scratch), Path(drawings), **sizes, tiny=kind == "rehearse")
    serve(Connection(int(number)), parts.compute)
