# SPDX-License-Identifier: Apache-2.0
"""The parts by name: what each computes, how long it usually takes, and when it has taken too long."""

import importlib.util
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

WIDTHS = (64, 128, 256)
TYPES = ("float32", "bfloat16")
MODELS = ("sage", "gat")
TESTS_S = 170.0
"""Of the nine minutes, for the tests."""


@dataclass(frozen=True)
class Part:
    """``needs_s``: where less is left it is not begun; after ``limit_s`` it is ended. ``after``: a part without whose
    value it makes no sense."""

    name: str
    needs_s: float
    limit_s: float
    after: str | None = None


def parts(*, tiny: bool) -> Iterator[Part]:
    """In order, those that matter most first."""
    yield Part("machine", 0, 60)
    yield Part("tests", 20, TESTS_S + 10)
    yield Part("device copy", 0, 30)
    yield Part("pcie", 0, 40)
    yield Part("dense products", 0, 40)
    if not tiny:
        yield Part("disk", 15, 45)
    yield Part("triton", 0, 30)
    yield Part("graph", 20, 60, after="triton")
    for width in (4,) if tiny else WIDTHS:
        for kind in TYPES:
            yield Part(f"sum {width} {kind}", 20, 60, after="graph")
    yield Part("other pulls", 30, 90, after="graph")
    yield Part("store", 60, 120)
    for model in MODELS:
        yield Part(f"epochs {model}", 40, 90, after="store")
    yield Part("epochs sage in an eighth", 30, 60, after="store")


class Parts:
    """What they compute, with files in ``scratch``; ``tiny``: a rehearsal on the processor."""

    def __init__(self, scratch: Path, *, nodes: int, edges: int, tiny: bool) -> None:
        self._scratch = scratch
        self._sizes = (20, 60) if tiny else (nodes, edges)
        self._tiny = tiny

    def compute(self, name: str, limit_s: float) -> Any:
        """The value of a part, within ``limit_s`` where it can see to that itself."""
        kind, *rest = name.split(" ")
        if kind == "sum":
            from gpu_parts import pulls

            return pulls.compare_sums(self._graph, int(rest[0]), rest[1], self._device)
        if kind == "epochs":
            return self._epochs(rest[0], in_an_eighth=len(rest) > 1)
        computes: dict[str, Callable[[], Any]] = {
            "machine": lambda: describe(self._device),
            "tests": lambda: self._tests(limit_s - 10),
            "device copy": self._device_copy,
            "pcie": self._pcie,
            "dense products": self._dense_products,
            "disk": self._disk,
            "triton": self._triton,
            "graph": lambda: self._graph.describe(),
            "other pulls": self._other_pulls,
            "store": lambda: f"{self._store.num_nodes} nodes, {self._store.num_edges} edges",
        }
        return computes[name]()

    @cached_property
    def _device(self) -> Any:
        import torch

        return torch.device("cpu" if self._tiny else "cuda:0")

    @cached_property
    def _graph(self) -> Any:
        from gpu_parts import pulls

        return pulls.PowerLaw.draw(*self._sizes, self._device)

    @cached_property
    def _store(self) -> Any:
        """Converted once: a later process opens it."""
        from gpu_parts import epochs

        self.__dict__.pop("_graph", None)  # its memory is the epochs'
        if not self._tiny:
            import torch

            torch.cuda.empty_cache()
        return epochs.find_store(self._scratch, *((300, 2000) if self._tiny else (500_000, 10_000_000)))

    def _tests(self, limit_s: float) -> Any:
        from gpu_parts import suite

        return suite.run_tests(limit_s, ("-k", "no_rows_and_no_edges") if self._tiny else ())

    def _device_copy(self) -> Any:
        from gpu_parts import ceilings

        return ceilings.device_copy(self._device, ceilings.copy_bytes(self._device, rehearsal=self._tiny))

    def _pcie(self) -> Any:
        from gpu_parts import ceilings

        return ceilings.wire(self._device, 1 << 16 if self._tiny else 512 << 20)

    def _dense_products(self) -> Any:
        from gpu_parts import ceilings

        return ceilings.dense_products(self._device, 16 if self._tiny else 8192)

    def _disk(self) -> Any:
        from gpu_parts import ceilings

        return ceilings.disk(self._scratch)

    def _triton(self) -> Any:
        from gpu_parts import pulls

        return pulls.needs_triton()

    def _other_pulls(self) -> Any:
        from gpu_parts import pulls

        return pulls.time_others(self._graph, 4 if self._tiny else 128, 2, self._device)

    def _epochs(self, model: str, *, in_an_eighth: bool) -> Any:
        from gpu_parts import epochs

        hidden = 8 if self._tiny else 256
        if in_an_eighth:
            return epochs.in_little_memory(self._store, model, hidden, self._device, self._scratch)
        return epochs.compare(self._store, model, hidden, self._device, self._scratch)


def describe(device: Any) -> dict[str, Any]:
    """What was measured on: the GPU, its driver, the packages."""
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {
            name: importlib.util.find_spec(name) is not None for name in ("torch_geometric", "zarr", "kvikio")
        },
    }
    if device.type != "cuda":
        return facts | {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
