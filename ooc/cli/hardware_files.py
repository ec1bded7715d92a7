# SPDX-License-Identifier: Apache-2.0
"""Machines described in files: those that come with ooc, by name, and the user's own."""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ooc.errors import HardwareError, OptionError
from ooc.plan import Hardware
from ooc.sizes import format_size

_SUFFIX = ".json"
_BLOCK_BYTES = 1 << 20
"""Requests that the listing gives the disk's rates for."""
_ROW_BYTES = 512
"""Bytes of a gathered row that the listing gives the rate of pulls for: 128 columns of float32."""


def shipped_names() -> list[str]:
    """The machines that come with ooc."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _folder() if file.name.endswith(_SUFFIX))


def load_hardware(name: str) -> Hardware:
    """The machine called ``name``, or the one that the file ``name`` describes.

    OptionError where there is neither, HardwareError naming the file and the entry that is wrong.
    """
    for file in _folder():
        if file.name == name.lower() + _SUFFIX:
            return _described(file.read_text(encoding="utf-8"), file.name)
    path = Path(name)
    if not (path.suffix or path.exists()):
        known = ", ".join(shipped_names())
        raise OptionError(f"--hardware {name}: no such machine; there are {known}; or give a file, NAME.json")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        raise OptionError(f"--hardware {name}: {reason}") from error
    return _described(text, name)


def print_machines(console: Console) -> None:
    """A table of the machines that come with ooc, and where their figures are from."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("machine", "device", "host", "wire/s", "SSD read/s", "write/s", "float32 FLOP/s", "pulled/s"):
        table.add_column(column, justify="left" if column == "machine" else "right", no_wrap=True)
    machines = [load_hardware(name) for name in shipped_names()]
    for machine in machines:
        pulled = _ROW_BYTES / machine.processor.pull_seconds_per_edge.at(_ROW_BYTES)
        table.add_row(
            machine.name,
            format_size(machine.device_memory_bytes),
            format_size(machine.host_memory_bytes),
            format_size(machine.wire.to_device_bytes_per_s) if machine.wire is not None else "none",
            format_size(machine.disk.read_bytes_per_s.at(_BLOCK_BYTES)),
            format_size(machine.disk.write_bytes_per_s.at(_BLOCK_BYTES)),
            f"{2 * machine.processor.multiplies_per_s['float32']:.2g}",
            format_size(pulled),
        )
    console.print(table)
    for machine in machines:
        console.print(f"{machine.name}: {machine.source}", highlight=False, soft_wrap=True)


def _described(text: str, where: str) -> Hardware:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HardwareError(f"{where}: no JSON: {error}") from error
    if not isinstance(data, dict):
        raise HardwareError(f"{where}: it holds no JSON object")
    if isinstance(data.get("hardware"), dict):  # what ooc profile --json prints
        data = data["hardware"]
    return Hardware.from_dict(data, where=where)


def _folder() -> Iterator[Any]:
    return files("ooc").joinpath("hardware").iterdir()
