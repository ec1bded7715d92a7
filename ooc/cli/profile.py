# SPDX-License-Identifier: Apache-2.0
"""``ooc profile``: measure this machine, for the planner and for people."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ooc.cli import print_json
from ooc.cli.arguments.options import JSON, choice_option
from ooc.errors import OptionError
from ooc.progress.reporter import Reporter, Verbosity
from ooc.sizes import format_size

if TYPE_CHECKING:
    from ooc.profile import Profile, Reading

_BUSY_SHARE = 0.1
"""The fraction of processor time used by other programs above which a profile is doubtful."""


@click.command(short_help="Measure this machine, for plans and forecasts that fit it.")
@click.option(
    "--spill-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Measure the disk of this folder, where training is to spill.  [default: here]",
)
@choice_option("--device", "auto", "cpu", "cuda", help="What computes.")
@click.option("--refresh", is_flag=True, help="Measure again, though there is a profile.")
@JSON
def command(spill_dir: Path, device: str, refresh: bool, as_json: bool) -> None:
    """Measure the disk, memory and processors of this machine, in about fifteen seconds.

    What is found is kept in ~/.cache/ooc (or XDG_CACHE_HOME) by machine and disk, and ooc train plans by it. It changes
    which plan is chosen and how long it is expected to take, never what is computed.
    """
    from ooc.profile import cached, keep, measure

    if not spill_dir.is_dir():
        raise OptionError(f"--spill-dir: {spill_dir} is no folder")
    device = _resolve_device(device)
    profile = None if refresh else cached(spill_dir, device=device)
    measured = profile is None
    if profile is None:
        with Reporter(verbosity=Verbosity.ERROR if as_json else Verbosity.INFO) as reporter:
            profile = measure(spill_dir, reporter, device=device)
        keep(profile, spill_dir, device=device)
    if as_json:
        print_json(profile.as_dict())
        return
    _print_profile(profile, measured=measured)


def _resolve_device(name: str) -> str:
    """Return the device to measure for the option ``name``; ``auto`` is the GPU where torch can use one."""
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise OptionError("--device cuda: torch finds no usable CUDA device")
    return "cpu"


def _print_profile(profile: "Profile", *, measured: bool) -> None:
    from ooc.report.console import output, print_table, say

    rows, before = [], ""
    for reading in profile.readings:
        rows.append((reading.what if reading.what != before else "", reading.setting, _format_reading(reading)))
        before = reading.what
    hardware, console = profile.hardware, output()
    print_table(("what", "setting", "measured"), rows, console)
    when = f"measured {profile.date}" if measured else f"measured {profile.date}; --refresh measures again"
    memory = f"{format_size(hardware.host_memory_bytes)} of memory"
    say(console, f"{hardware.name}, {hardware.threads} threads, {memory}; {when}")
    if profile.others > _BUSY_SHARE:
        busy = f"other programs had {100 * profile.others:.0f} % of the processors meanwhile"
        say(console, f"{busy}: measure again with --refresh when the machine is idle")


def _format_reading(reading: "Reading") -> str:
    """Return the reading with a unit of suitable scale."""
    match reading.unit:
        case "B/s":
            return f"{format_size(reading.value)}/s"
        case "B":
            return format_size(reading.value)
        case "s":
            return f"{1e6 * reading.value:,.1f} µs"
        case unit:
            scale, letter = (1e9, "G") if reading.value >= 1e9 else (1e6, "M")
            return f"{reading.value / scale:,.3g} {letter} {unit}"
