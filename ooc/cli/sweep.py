# SPDX-License-Identifier: Apache-2.0
"""``ooc plan --sweep``: the same training under many budgets, so that someone can choose a machine."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import click
from rich import box
from rich.table import Table

from ooc.cli import in_options
from ooc.cli.outlook import Outlook
from ooc.cli.progress import format_duration
from ooc.errors import BudgetError, OptionError
from ooc.sizes import format_size, parse_size

_AXES = ("gpu", "host")


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of budgets, and what an epoch would take; ``reason``: why there is no plan, otherwise None."""

    gpu_budget_bytes: int
    host_budget_bytes: int
    epoch_s: float | None = None
    ssd_read_bytes: int | None = None
    ssd_write_bytes: int | None = None
    bottleneck: str | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"feasible": self.reason is None}


def is_axis(text: str) -> bool:
    """Whether ``text`` is budgets to go through, as in ``host=64G,128G``."""
    return text.partition("=")[0] in _AXES and "=" in text


def parse_axes(texts: Iterable[str]) -> dict[str, list[int]]:
    """The budgets of ``gpu=8G,16G`` and ``host=64G,…``, in bytes, ascending; OptionError for anything else."""
    axes: dict[str, list[int]] = {}
    for text in texts:
        if not is_axis(text):
            raise OptionError(f"--sweep {text}: give gpu=8G,16G,… or host=64G,128G,…")
        axis, _, budgets = text.partition("=")
        if axis in axes:
            raise OptionError(f"--sweep: {axis}= is given twice")
        axes[axis] = sorted({parse_size(budget, name=f"--sweep {axis}") for budget in budgets.split(",")})
    return axes


def sweep(axes: dict[str, list[int]], *, gpu: int, host: int, plan: Callable[[int, int], Outlook]) -> list[Cell]:
    """Every pair of budgets, row by row; ``gpu`` and ``host`` hold where there is no axis."""
    pairs = product(axes.get("gpu", [gpu]), axes.get("host", [host]))
    return [_cell(on_device, on_host, plan) for on_device, on_host in pairs]


def sweep_table(cells: list[Cell]) -> Table:
    """Device budgets down, host budgets across: seconds an epoch, and bytes read and written."""
    hosts = list(dict.fromkeys(cell.host_budget_bytes for cell in cells))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("gpu budget", no_wrap=True)
    for host in hosts:
        table.add_column(f"host {format_size(host)}", justify="right", no_wrap=True)
    for start in range(0, len(cells), len(hosts)):
        row = cells[start : start + len(hosts)]
        table.add_row(format_size(row[0].gpu_budget_bytes), *(_shown(cell) for cell in row))
    return table


def _cell(gpu: int, host: int, plan: Callable[[int, int], Outlook]) -> Cell:
    try:
        outlook = plan(gpu, host)
    except BudgetError as error:
        return Cell(gpu, host, reason=in_options(str(error), click.get_current_context().command))
    bottleneck = outlook.timeline.bottleneck.value
    return Cell(gpu, host, outlook.epoch_s, outlook.ssd_read_bytes, outlook.ssd_write_bytes, bottleneck)


def _shown(cell: Cell) -> str:
    if cell.epoch_s is None or cell.ssd_read_bytes is None or cell.ssd_write_bytes is None:
        return "too small"
    moved = f"{format_size(cell.ssd_read_bytes)} read, {format_size(cell.ssd_write_bytes)} written"
    return f"{format_duration(cell.epoch_s)}\n{moved}"
