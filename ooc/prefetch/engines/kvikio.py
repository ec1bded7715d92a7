# SPDX-License-Identifier: Apache-2.0
"""GPUDirect Storage through KvikIO (package kvikio-cu13): from file to GPU memory without passing through host memory.

KvikIO has its own threads and accepts any offset and length, in host and device memory alike; without GPUDirect it
reads through a bounce buffer. It can be imported on machines where it does not work at all (no libcuda), and where the
driver misbehaves its constructor may hang. Hence ``probe`` runs in a separate process with a time limit.

Written to KvikIO's documented interface and tested against a stand-in; not run on hardware with GPUDirect.
"""

import errno
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooc.prefetch.engine import Counters
from ooc.prefetch.engines.direct import ThreadEngine
from ooc.prefetch.engines.plain import SystemCalls

PROBE_TIMEOUT_S = 20.0
_PIECE_BYTES = 16 << 20
_TASK_BYTES = 4 << 20
_THREADS = 8

_PROBE = """
import json, sys, tempfile
import kvikio
from kvikio import defaults
facts = {"version": getattr(kvikio, "__version__", "unknown")}
with tempfile.NamedTemporaryFile(dir=sys.argv[1]) as file:
    data = bytearray(range(256)) * 32
    back = bytearray(len(data))
    with kvikio.CuFile(file.name, "r+") as handle:
        if handle.pwrite(data).get() != len(data) or handle.pread(back).get() != len(data) or back != data:
            raise SystemExit("the bytes read are not those written")
try:
    facts["compatible"] = bool(defaults.is_compat_mode_preferred())
except Exception:
    facts["compatible"] = None
facts["reaches_gpu"] = False
if facts["compatible"] is False:
    try:
        import torch
        there = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
        with tempfile.NamedTemporaryFile(dir=sys.argv[1]) as file:
            file.write(data)
            file.flush()
            with kvikio.CuFile(file.name, "r+") as handle:
                moved = handle.pread(there).get()
                came = moved == len(data) and there.cpu().numpy().tobytes() == bytes(data)
                went = handle.pwrite(there, len(data), len(data)).get()
            file.seek(len(data))
            facts["reaches_gpu"] = came and went == len(data) and file.read() == bytes(data)
    except Exception as error:
        facts["why_not"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether KvikIO works in a folder. ``gpudirect``: by cuFile, as GPUDirect needs (None: unknown).

    ``reaches_gpu``: bytes came to a GPU's memory as written, and back.
    """

    works: bool
    reason: str
    version: str | None = None
    gpudirect: bool | None = None
    reaches_gpu: bool = False


def probe(folder: Path, *, timeout_s: float = PROBE_TIMEOUT_S, python: str = sys.executable) -> Probe:
    """Write and read a file in ``folder`` through KvikIO, in a process that may hang or crash without harm."""
    if importlib.util.find_spec("kvikio") is None:
        return Probe(False, "kvikio is not installed (pip install kvikio-cu13)")
    child = subprocess.Popen(
        [python, "-c", _PROBE, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return Probe(False, f"kvikio hung for {timeout_s:.0f} s: the driver misbehaves")
    if child.returncode:
        lines = errors.strip().splitlines() or [f"exit code {child.returncode}"]
        return Probe(False, f"kvikio cannot move bytes: {lines[-1]}")
    facts = json.loads(out.strip().splitlines()[-1])
    compatible = facts["compatible"]
    gpudirect = None if compatible is None else not compatible
    how = "cuFile" if gpudirect else "its own threads, without GPUDirect"
    reason = f"kvikio {facts['version']} with {how}"
    if gpudirect and not facts["reaches_gpu"]:
        reason += f", which does not reach a GPU ({facts.get('why_not', 'other bytes than were written')})"
    return Probe(True, reason, facts["version"], gpudirect, facts["reaches_gpu"])


def _abandon(child: "subprocess.Popen[str]") -> None:
    """Kill the process without waiting for it: one that hangs in a driver cannot be killed."""
    child.kill()
    try:
        child.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


class KvikioCalls(SystemCalls):
    """The two calls of KvikIO; ``memory`` may be on the device. A file is registered while a piece is moved."""

    def __init__(self) -> None:
        self._kvikio: Any = importlib.import_module("kvikio")
        self._kvikio.defaults.set({"num_threads": _THREADS, "task_size": _TASK_BYTES, "auto_direct_io_read": True})

    def read_at(self, descriptor: int, memory: Any, offset: int) -> int:
        with self._registered(descriptor, "r") as file:
            return int(file.pread(memory, len(memory), offset).get())

    def write_at(self, descriptor: int, memory: Any, offset: int) -> int:
        with self._registered(descriptor, "r+") as file:
            return int(file.pwrite(memory, len(memory), offset).get())

    @contextmanager
    def _registered(self, descriptor: int, flags: str) -> Iterator[Any]:
        """Register a file by its descriptor, since spill files have no name. KvikIO raises RuntimeError for any
        failure."""
        os.fstat(descriptor)  # raises OSError for a closed file, before KvikIO sees it
        try:
            with self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", flags) as file:
                yield file
        except RuntimeError as error:
            raise OSError(errno.EIO, " ".join(str(error).split())) from None


class KvikioEngine(ThreadEngine):
    """An engine whose threads wait for KvikIO's futures; KvikIO divides their pieces further, for its own threads.

    Besides host memory it moves any device array with ``__cuda_array_interface__``.
    """

    name = "kvikio"

    def __init__(self, *, calls: SystemCalls | None = None, counters: Counters | None = None) -> None:
        super().__init__(calls=calls or KvikioCalls(), piece_bytes=_PIECE_BYTES, counters=counters)
