# SPDX-License-Identifier: Apache-2.0
"""The parts by name: what each computes, how long it usually takes, and when it has taken too long."""

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from gpu_parts.report import LeftOut

WIDTHS = (64, 128, 256)
TYPES = ("float32", "bfloat16")
MODELS = ("sage", "gcn", "gat")
TESTS_S = 150.0
"""Of the nine minutes, for the tests."""
STORES_S = 220.0
"""For the stores, which are converted by a process each, beside the tests and what only the GPU computes; what takes
the host or the disk is not timed before they are done or given up."""


@dataclass(frozen=True)
class Part:
    """``needs_s``: where less is left it is not begun; after ``limit_s`` it is ended. ``after``: a part without whose
    value it makes no sense. ``beside``: begun at once, in a process beside the others', and waited for in its place.
    ``spare``: for what time is left, or a call of its own (``--only``)."""

    name: str
    needs_s: float
    limit_s: float
    after: str | None = None
    beside: bool = False
    spare: bool = False


def parts(*, tiny: bool) -> Iterator[Part]:
    """In order: the tests, what is timed on the GPU alone, and once the stores are there what takes the host and the
    disk as well, those that matter most first. All of them together take less than nine minutes if they take what they
    need and not their limits; no GPU has told yet."""
    yield Part("machine", 0, 60)
    yield Part("tests", 20, TESTS_S + 10)
    yield Part("device copy", 0, 30)
    yield Part("dense products", 0, 40)
    yield Part("triton", 0, 30)
    yield Part("graph", 10, 60, after="triton")
    for width in (4,) if tiny else WIDTHS:
        for kind in TYPES:
            yield Part(f"sum {width} {kind}", 10, 60, after="graph")
    yield Part("stores", 0, STORES_S, beside=not tiny)
    yield Part("large store", 0, STORES_S, beside=True)
    yield Part("pcie", 0, 40)
    if not tiny:
        yield Part("disk", 20, 60)
        yield Part("profile", 20, 60)
    for model in MODELS:
        yield Part(f"epochs {model}", 20, 75, after="stores")
    yield Part("whole on the GPU", 20, 60, after="stores")
    yield Part("eighth on the GPU", 25, 60, after="stores")
    yield Part("eighth on GPU and host", 25, 60, after="stores")
    yield Part("large forecasts", 15, 60, after="large store")
    yield Part("large epochs", 40, 110, after="large store")
    yield Part("other pulls", 35, 90, after="graph")
    for model in MODELS[:1] if tiny else MODELS:
        yield Part(f"compiled {model}", 30, 120, after=f"epochs {model}", spare=model != MODELS[0])
    for model in () if tiny else MODELS[1:]:
        for part in ("whole on the GPU", "eighth on the GPU", "eighth on GPU and host"):
            yield Part(f"{part}, {model}", 25, 60, after="stores", spare=True)


def chosen(planned: Iterable[Part], names: Sequence[str]) -> list[Part]:
    """Those of ``names``, or all where there are none, and what they come after. KeyError: a name that is no part's."""
    by_name = {part.name: part for part in planned}
    wanted, open_names = set(), list(names or by_name)
    while open_names:
        part = by_name[open_names.pop()]
        wanted.add(part.name)
        open_names += [part.after] if part.after is not None else []
    return [part for part in by_name.values() if part.name in wanted]


class Parts:
    """What they compute, with files in ``scratch``; ``tiny``: a rehearsal on the processor. ``scale``: of the graph
    shaped like papers100M. ``drawings``: traces are files beside it, whose names begin with its."""

    def __init__(self, scratch: Path, drawings: Path, *, nodes: int, edges: int, scale: float, tiny: bool) -> None:
        self._scratch = scratch
        self._drawings = drawings
        self._sizes = (8, 16) if tiny else (nodes, edges)
        self._scale = 1e-4 if tiny else scale
        self._tiny = tiny

    def compute(self, name: str, limit_s: float) -> Any:
        """The value of a part, within ``limit_s`` where it can see to that itself."""
        kind, *rest = name.split(" ")
        if kind == "sum":
            from gpu_parts import pulls

            return pulls.compare_sums(self._graph, int(rest[0]), rest[1], self._device)
        if name == "large store":
            return _converted(self._large_store)
        if kind in ("epochs", "compiled", "whole", "eighth", "large"):
            return self._training(kind, rest, limit_s)
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
            "stores": self._stores,
            "profile": self._profile,
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

    def _stores(self) -> dict[str, Any]:
        """Those that are trained on against PyG, and within an eighth."""
        return {name: _converted(store) for name, store in (("small", self._small_store), ("mid", self._mid_store))}

    def _small_store(self) -> Any:
        from gpu_parts import epochs

        sizes = (2_000, 12_000) if self._tiny else (500_000, 10_000_000)
        return epochs.find_store(self._scratch / "small.ooc", epochs.small_graph(*sizes))

    def _mid_store(self) -> Any:
        """What an eighth of is large beside a tile and a block; PyG's messages on it would not fit any GPU."""
        from gpu_parts import epochs

        sizes = (60_000, 60_000) if self._tiny else (2_000_000, 40_000_000)
        return epochs.find_store(self._scratch / "mid.ooc", epochs.small_graph(*sizes))

    def _large_store(self) -> Any:
        """In hop order: rows that reach no labelled one are left out."""
        from gpu_parts import epochs, large

        return epochs.find_store(self._scratch / "large.ooc", large.source_of(large.scaled(self._scale)), order="hop")

    def _profile(self) -> dict[str, Any]:
        """What the plans of later parts go by, and their forecasts; kept in a file for later processes."""
        from ooc.events import ignore
        from ooc.profile import measure

        self._free_memory()
        measured: dict[str, Any] = measure(self._scratch, ignore, device=self._device.type).as_dict()
        self._profile_file.write_text(json.dumps(measured), encoding="utf-8")
        return measured

    @property
    def _profile_file(self) -> Path:
        return self._scratch / "profile.json"

    @property
    def _hardware(self) -> Any:
        """This machine as measured; estimates where that has failed, or in a rehearsal."""
        from ooc.plan.hardware import UNMEASURED_DEVICE
        from ooc.profile import Profile

        if not self._profile_file.exists():
            return UNMEASURED_DEVICE
        data = json.loads(self._profile_file.read_text(encoding="utf-8"))
        return Profile.from_dict(data, where=str(self._profile_file)).hardware

    def _tests(self, limit_s: float) -> Any:
        from gpu_parts import suite

        if self._tiny:
            return suite.run_tests(limit_s, ("-k", "no_rows_and_no_edges"), 1, ["test_sums.py"])
        return suite.run_tests(limit_s)

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

    def _training(self, kind: str, rest: list[str], limit_s: float) -> Any:
        """``LeftOut`` in the trainer's own words where it refuses."""
        from gpu_parts import epochs, large
        from ooc.errors import OocError
        from ooc.plan import Limits

        self._free_memory()
        hidden = 8 if self._tiny else 256
        try:
            if kind == "epochs":
                return epochs.compare(self._small_store(), rest[0], hidden, self._device, self._scratch)
            if kind == "compiled":
                return epochs.compiled(self._small_store(), rest[0], hidden, self._device)
            if kind in ("whole", "eighth"):
                model = rest[-1] if rest[-1] in MODELS else MODELS[0]
                mid, host_too = self._mid_store(), any(word.startswith("host") for word in rest)
                limits = epochs.all_of_it(mid, hidden) if kind == "whole" else epochs.eighths(mid, hidden, host_too)
                if self._tiny and kind == "eighth":
                    limits = Limits(26_000_000, 12_000_000 if host_too else 10**9, block_rows=2048)
                drawn = "-".join([kind, *rest]).replace(",", "")
                drawing = self._drawings.with_name(f"{self._drawings.stem}.{drawn}")
                given = mid, model, hidden, self._computing(timed=True), self._hardware, limits
                return epochs.in_budgets(*given, folder=self._scratch, drawing=drawing)
            limits = Limits(30_000_000, 30_000_000) if self._tiny else large.BUDGETS
            given = self._large_store(), hidden, self._computing(), self._hardware, limits
            if rest == ["forecasts"]:
                return large.forecasts(*given, whole=large.scaled(1e-3) if self._tiny else large.PAPERS)
            return large.epochs(*given, folder=self._scratch, limit_s=limit_s - 10)
        except OocError as refused:
            raise LeftOut(str(refused)) from None

    def _computing(self, *, timed: bool = False) -> Any:
        """What trains; its events are ``timed`` where somebody wants to know what overlaps."""
        if self._tiny:
            from gpu_parts.rehearsal import HostDevice

            return HostDevice()
        from ooc.prefetch.cuda import Cuda

        return Cuda(timed=timed)

    def _free_memory(self) -> None:
        """The graph of the kernels makes room; what needs it later draws it again."""
        self.__dict__.pop("_graph", None)
        if not self._tiny:
            import torch

            torch.cuda.empty_cache()


def _converted(store: Callable[[], Any]) -> dict[str, Any]:
    """What came of a conversion, and how long it took."""
    begun_s = monotonic()
    made = store()
    return {"nodes": made.num_nodes, "edges": made.num_edges, "seconds": round(monotonic() - begun_s, 1)}


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
