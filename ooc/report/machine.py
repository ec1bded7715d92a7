# SPDX-License-Identifier: Apache-2.0
"""The examination behind ``ooc doctor`` of disk, memory, processors, GPU and libraries. It changes nothing.

Every problem is one that the user can act upon, and has exactly one remedy; so has every suggestion. An absence (no GPU
on a machine that has none) is a fact, neither problem nor suggestion.
"""

import ctypes
import errno
import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ooc.memory import available_memory_bytes, cache_folder, default_budgets, filesystem_of, processor_name
from ooc.prefetch.engines import kvikio
from ooc.prefetch.engines.choice import BY_GPUDIRECT, BY_WAY_OF_HOST, choose_engine, probe_direct
from ooc.prefetch.engines.kernel_queue import KernelQueue
from ooc.sizes import format_size

LIBRARIES = ("pyarrow", "torch", "torch-geometric", "numpy", "zarr", "google-crc32c", "triton", "nvidia-ml-py")
_DRIVER = Path("/proc/driver/nvidia/version")
_GDS_MODULE = Path("/proc/driver/nvidia-fs")
_CONTROL_GROUP = "a control group"
_USUAL_FREE_SHARE = 0.6
"""The share of the machine's memory that should be free; where less is, other programs hold too much."""
_PROFILE_FOLDER = cache_folder()
"""The folder of ``ooc profile``'s results. Looking up this machine's own would load torch, which takes seconds."""
_IO_SUBMIT_REMEDIES = {
    errno.EAGAIN: "sysctl -w fs.aio-max-nr=1048576 (as root)",
    errno.EPERM: "allow io_setup, io_submit, io_getevents and io_destroy in the container's seccomp profile",
}
"""The remedy by error number where io_submit does not work; for any other number it is ``_DEFAULT_REMEDY``."""
_DEFAULT_REMEDY = "run on a kernel built with CONFIG_AIO"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Severity(StrEnum):
    """The weight of a problem, the heaviest first."""

    STOPS = "stops"
    """Training is impossible with this folder."""
    SLOWS = "slows"
    HELPS = "helps"
    """Nothing is wrong, but the remedy would make training better."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, or a possible improvement, and the one thing to do about it."""

    what: str
    remedy: str
    severity: Severity = Severity.SLOWS


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an examination. ``facts`` are by section and name; names of byte counts say so."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    hints: list[Problem] = field(default_factory=list)

    def add_problem(self, what: str, remedy: str, severity: Severity = Severity.SLOWS) -> None:
        """Add a problem."""
        self.problems.append(Problem(what, remedy, severity))

    def add_hint(self, what: str, remedy: str) -> None:
        """Add an improvement that is possible though nothing is wrong."""
        self.hints.append(Problem(what, remedy, Severity.HELPS))

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence."""
        stops = [problem for problem in self.problems if problem.severity is Severity.STOPS]
        if stops:
            return f"training cannot work there: {stops[0].what}"
        disk, memory = self.facts["disk"], self.facts["memory"]
        means = (
            f"{format_size(memory['default_memory_bytes'])} of memory, {format_size(disk['free_bytes'])} of "
            f"{disk['filesystem']} for what does not fit, {self.facts['processors']['usable']} processors"
        )
        if self.problems:
            number = f"{len(self.problems)} things are" if len(self.problems) > 1 else "one thing is"
            return f"training works, but {number} not as it should be; {means}"
        return f"ready to train: {means}"

    @property
    def remedies(self) -> list[Problem]:
        """Problems and possible improvements, those that would help most first."""
        weights = list(Severity)
        return sorted([*self.problems, *self.hints], key=lambda problem: weights.index(problem.severity))


def examine(path: Path) -> Report:
    """Return a report on the machine as a training with its scratch files in ``path`` would find it."""
    report = Report()
    folder = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    if folder != path.absolute():
        report.add_problem(f"{path} does not exist; looked at {folder} instead", f"mkdir -p {shlex.quote(str(path))}")
    elif not folder.is_dir():
        report.add_problem(f"{path} is no folder; looked at {folder.parent} instead", "name a folder", Severity.STOPS)
        folder = folder.parent
    driver = _read_first_line(_DRIVER)
    report.facts["disk"] = _examine_disk(folder, report, with_driver=driver is not None)
    report.facts["memory"] = _examine_memory(report, report.facts["disk"]["free_bytes"])
    report.facts["processors"] = _examine_processors(report)
    report.facts["gpu"] = _examine_gpu(driver, report)
    report.facts["libraries"] = versions_of((*LIBRARIES, "kvikio-cu13"))
    _add_hints(report, folder)
    return report


def _add_hints(report: Report, folder: Path) -> None:
    """Add the improvements possible though nothing is wrong, those that help most first."""
    memory, processors = report.facts["memory"], report.facts["processors"]
    if not any(_PROFILE_FOLDER.glob("profile-*.json")):
        at = "" if folder == Path.cwd() else f" --spill-dir {shlex.quote(str(folder))}"
        report.add_hint("plans and forecasts go by estimates of another machine", f"ooc profile{at} (15 s)")
    free, total = memory["free_bytes"], memory["total_bytes"]
    if memory["limited_by"] == _CONTROL_GROUP:
        what = f"a control group allows {format_size(free)} of the machine's {format_size(total)} of memory"
        report.add_hint(what, "start the container or job with more memory; what fits is not moved in every epoch")
    elif free < _USUAL_FREE_SHARE * total:
        what = f"other programs hold {format_size(total - free)} of {format_size(total)} of memory"
        report.add_hint(what, "end those that are not needed; what fits is not moved in every epoch")
    asked = processors["omp_num_threads"]
    if asked is not None and asked.isdecimal() and int(asked) < processors["usable"]:
        what = f"OMP_NUM_THREADS is {asked}, and {processors['usable']} processors are usable"
        report.add_hint(what, f"give --threads {processors['usable']}, or unset OMP_NUM_THREADS")
    if report.facts["libraries"]["pyarrow"] is None:
        report.add_hint("Parquet cannot be read or written", "pip install pyarrow")
    what = "what more memory or a faster disk would bring is the graph's affair"
    report.add_hint(what, "ooc plan STORE (below: what would help)")


# ---- disk --------------------------------------------------------------------------------------------------


def _examine_disk(folder: Path, report: Report, *, with_driver: bool) -> dict[str, Any]:
    filesystem, probe = filesystem_of(folder), probe_direct(folder)
    engine, reason = choose_engine(folder)  # as in training, with or without a GPU
    engine.close()
    failed = _io_submit_error()
    io_submit = os.strerror(failed) if failed else "available"
    found = kvikio.probe(folder)
    lacks = _missing_for_gpudirect(found, with_driver=with_driver)
    free = shutil.disk_usage(folder).free
    if probe.works is None:
        report.add_problem(probe.reason, "give --spill-dir a folder that you may write to", Severity.STOPS)
    elif filesystem in ("tmpfs", "ramfs"):
        what = f"{folder} is memory ({filesystem}), so spilling there saves none"
        report.add_problem(what, "give --spill-dir a folder on a disk")
    elif not probe.works:
        what = f"{probe.reason}, so the page cache comes on top of the budgets"
        report.add_problem(what, "give --spill-dir a folder on a local disk")
    if failed and probe.works:
        report.add_problem(f"io_submit is not to be had: {io_submit}", _IO_SUBMIT_REMEDIES.get(failed, _DEFAULT_REMEDY))
    return {
        "folder": str(folder),
        "filesystem": filesystem,
        "free_bytes": free,
        "engine": engine.name,
        "why": reason,
        "o_direct": {True: "works", False: "refused", None: "could not be tried"}[probe.works],
        "io_submit": io_submit,
        "to_a_gpu": BY_GPUDIRECT if found.reaches_gpu else BY_WAY_OF_HOST,
        "gpudirect": not lacks,
        "gpudirect_lacks": lacks,
    }


def _io_submit_error() -> int:
    """Return the error number with which io_submit fails; 0 if it works."""
    try:
        KernelQueue(1).close(is_idle=True)
    except OSError as error:
        return error.errno or errno.ENOSYS
    return 0


def _missing_for_gpudirect(found: kvikio.Probe, *, with_driver: bool) -> list[str]:
    """Return what is missing for GPUDirect Storage with a folder; nothing if it works."""
    needed = {
        "an NVIDIA driver": with_driver,
        "libcuda.so.1": _is_loadable("libcuda.so.1"),
        "the kernel module nvidia-fs": _GDS_MODULE.exists(),
    }
    lacks = [what for what, there in needed.items() if not there]
    if found.works and not found.gpudirect:
        lacks.append("GPUDirect in kvikio, which runs in compatibility mode")
    elif not (found.works and found.reaches_gpu):
        lacks.append(found.reason)
    return lacks


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# ---- memory and processors -----------------------------------------------------------------------------------


def _examine_memory(report: Report, disk_free_bytes: int) -> dict[str, Any]:
    machine = psutil.virtual_memory()
    free = available_memory_bytes()
    device, host = default_budgets(None)
    huge = _read_first_line(_HUGE_PAGES)
    huge_pages = huge.partition("[")[2].partition("]")[0] if huge else "unknown"
    if huge_pages == "never":
        what = "huge pages are off, so that arenas are slow to touch"
        report.add_problem(what, f"echo madvise > {_HUGE_PAGES} (as root)")
    if disk_free_bytes < device + host:
        there = (
            f"the disk has {format_size(disk_free_bytes)} free, less than the memory of {format_size(device + host)}"
        )
        remedy = "free some of it, or give --spill-dir a folder on a larger disk"
        report.add_problem(f"{there}: little can be spilled", remedy)
    return {
        "total_bytes": int(machine.total),
        "free_bytes": free,
        "limited_by": _CONTROL_GROUP if free < int(machine.available) * 0.95 else "the machine",
        "default_memory_bytes": device + host,
        "default_gpu_budget_on_cpu_bytes": device,
        "default_host_budget_bytes": host,
        "left_bytes": free - device - host,
        "huge_pages": huge_pages,
    }


def _examine_processors(report: Report) -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is not None and asked.isdecimal() and int(asked) > usable:
        what = f"OMP_NUM_THREADS is {asked}, but only {usable} processors are usable"
        report.add_problem(what, f"export OMP_NUM_THREADS={usable}")
    return {
        "model": processor_name(),
        "usable": usable,
        "of": os.cpu_count(),
        "omp_num_threads": asked,
        "kernel": platform.release(),
    }


# ---- GPU and libraries ---------------------------------------------------------------------------------------


def _examine_gpu(driver: str | None, report: Report) -> dict[str, Any]:
    """Return facts about the GPU; torch is asked only where there is a driver, since its import takes seconds."""
    facts: dict[str, Any] = {"driver": driver}
    if driver is None:
        return facts
    import torch

    facts["torch_cuda"] = torch.version.cuda
    facts["usable"] = torch.cuda.is_available()
    if torch.version.cuda is None:
        report.add_problem(
            "there is an NVIDIA driver, but torch was built without CUDA", "install the CUDA build of torch"
        )
        return facts
    if not facts["usable"]:
        remedy = "check nvidia-smi and the driver's version against torch's CUDA"
        report.add_problem("torch finds no usable CUDA device", remedy)
        return facts
    facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts["free_bytes"], facts["total_bytes"] = map(int, torch.cuda.mem_get_info())
    return facts


def versions_of(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of Python and of ``packages``; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _read_first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None
