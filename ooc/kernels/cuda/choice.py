# SPDX-License-Identifier: Apache-2.0
"""The shape of programs: a table by the width of rows and the size of a number, and shapes measured to be faster.

A warp of 32 threads fetches 512 bytes at once if every thread loads 16. The table gives a program as many columns as a
row has, rounded up to a power of two, and several rows if that is less than a warp's worth. Shapes do not change
results, so any may be tried; which is fastest has never been measured for this table.

Programs that need all columns of a row keep their sums in registers, in float32 whatever the source, so their rows are
counted as if they were float32. Counted in the source's own bytes, GAT's attention with heads of 64 bfloat16 numbers
had four rows a program, and 191 registers a thread forward and 187 backward, compiled for 9.0; with two rows it has 90
and 95.

Nothing is measured during training: ``shape_for`` looks up the fastest shape for a GPU in the user's cache folder, and
takes the table's if none has been measured (``tools/gpu_check`` does). Another GPU, version of Triton or of this
program has a file of its own. A damaged file counts as missing.
"""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from ooc.memory import cache_folder
from ooc.storage.array import replace_file
from ooc.version import __version__

WARP_BYTES = 512
LANE_BYTES = WARP_BYTES // 32
"""The most bytes that a thread loads with one instruction."""
MOST_WARPS = 8
_SUMMED_BYTES = 4
"""The fewest bytes of a number that is added up."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A program's shape: segments and columns (powers of two), edges whose loads are issued together, warps."""

    rows: int
    columns: int
    unroll: int
    warps: int


def power_of_two(width: int) -> int:
    """Return the smallest power of two that is at least ``width``."""
    return 1 << max(0, width - 1).bit_length()


def warps_for(block_bytes: int) -> int:
    """Return the warps of a program that holds this many bytes."""
    return min(MOST_WARPS, power_of_two(-(-block_bytes // WARP_BYTES)))


class Kernel(Enum):
    """What shapes are chosen for: a kernel's name on disk, whether a program needs all columns of a head, and how many
    edges' loads are issued together, which is fewer if an edge takes many registers."""

    SUM = "sum", False, 4
    MAXIMUM = "maximum", False, 4
    MAXIMUM_SOURCES = "maximum sources", False, 4
    ATTEND = "attend", True, 4
    ATTEND_SOURCES = "attend sources", True, 4
    MESSAGES = "messages", True, 2
    MESSAGE_SOURCES = "message sources", True, 2
    MESSAGE_TARGETS = "message targets", True, 2
    RECTIFIED = "rectified", False, 2
    RECTIFIED_MAP = "rectified map", False, 2

    def __init__(self, title: str, takes_whole_rows: bool, edges_together: int) -> None:
        self.title, self.takes_whole_rows, self.edges_together = title, takes_whole_rows, edges_together


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with rows of ``width`` numbers of ``itemsize`` bytes."""

    kernel: Kernel
    width: int
    itemsize: int

    @property
    def key(self) -> str:
        return f"{self.kernel.title} {self.width} x {self.itemsize}"

    @property
    def summed_bytes(self) -> int:
        """Bytes of a number, as rows are counted."""
        return max(self.itemsize, _SUMMED_BYTES) if self.kernel.takes_whole_rows else self.itemsize

    @property
    def usual(self) -> Shape:
        """The table's shape."""
        columns, itemsize = power_of_two(self.width), self.summed_bytes
        if not self.kernel.takes_whole_rows:
            columns = min(columns, 2 * WARP_BYTES // itemsize)
        rows = min(32, max(1, WARP_BYTES // (columns * itemsize)))
        together, attends = self.kernel.edges_together, self.kernel.takes_whole_rows
        if attends and together == 2 and self.width * self.itemsize % LANE_BYTES:
            together = 1  # without alignment every number has its own address, in two registers
        return Shape(rows, columns, together, warps_for(rows * columns * itemsize))


class Choices:
    """The shapes measured so far, kept in the file at ``path``, or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._shapes = {} if path is None else _read(path)
        self._asked: dict[Case, Shape] = {}

    def shape(self, case: Case) -> Shape:
        """Return the fastest shape measured, or the table's if there is none. Called for every launch."""
        known = self._asked.get(case)
        if known is None:
            known = self._asked[case] = self._shapes.get(case.key, case.usual)
        return known

    def use(self, case: Case, shape: Shape) -> None:
        """Use a shape from now on."""
        self._shapes[case.key] = self._asked[case] = shape

    def keep(self, case: Case, fastest: Shape) -> None:
        """Use a shape from now on, and keep it on disk."""
        self.use(case, fastest)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            data = {key: asdict(shape) for key, shape in sorted(self._shapes.items())}
            replace_file(self._path, (json.dumps(data, indent=2) + "\n").encode())


def shape_for(kernel: Kernel, source_NW: Tensor, width: int | None = None) -> Shape:
    """Return the shape for rows of ``source_NW``, or for ``width`` of their columns, on the GPU they are on."""
    case = Case(kernel, source_NW.shape[1] if width is None else width, source_NW.itemsize)
    return choices(str(source_NW.device)).shape(case)


@functools.cache
def choices(device: str) -> Choices:
    """Return the shapes of a device. For the CPU, where programs are only interpreted, none are kept."""
    return Choices(location(torch.cuda.get_device_name(device)) if device.startswith("cuda") else None)


def location(gpu: str) -> Path:
    """Return the path of the file of shapes measured on a GPU of this name, whether it exists or not."""
    import triton

    text = json.dumps([gpu, triton.__version__, __version__])
    return cache_folder() / f"shapes-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, Shape]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: Shape(**{name: int(number) for name, number in shape.items()}) for key, shape in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
