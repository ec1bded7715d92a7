# SPDX-License-Identifier: Apache-2.0
"""What the GPU path is to show, as ratios of what was measured, each with its bar. What was not measured has no line.

1  sums over neighbours: 0.7 of the rate of a copy in the GPU's memory, every edge's row counted once whether a cache
   had it or not, or 1.5 times as fast as torch's CSR product; and faster than PyG's
2  epochs with everything in the GPU's memory: 0.6 of the seconds of PyG's fastest form, torch.compile included where
   it was tried, and half of that form's peak memory
3  an eighth of it there, the rest in host memory: 1.15 times the longest of computing alone and the wire, each way's
   bytes over its rate from pinned memory; 0.9 of the seconds of copies under computing, by single kernels where
   torch's profiler sees them, else by events, which show at most so much
4  an eighth in host memory as well: 1.25 times the longest of these and the disk: bytes read and written over their
   rates, and both together over that of both ways at once

Computing alone is the epoch of the same model and graph with everything in the GPU's memory, by its own plan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """``measured`` is to be at most ``bound``, or at least. ``instead``: met in another way, said in ``what``.
    ``at_best``: it is more than the true value."""

    point: int
    what: str
    measured: float
    bound: float
    at_most: bool = False
    instead: bool = False
    at_best: bool = False

    @property
    def met(self) -> bool:
        return self.instead or (self.measured <= self.bound if self.at_most else self.measured >= self.bound)

    def as_dict(self) -> dict[str, Any]:
        """With ``bar`` and ``met`` in words."""
        sign = "≤" if self.at_most else "≥"
        met = "NO" if not self.met else "perhaps" if self.at_best else "yes"
        return asdict(self) | {"bar": f"{sign} {self.bound:g}", "met": met}


Values = Mapping[str, Any]
"""Of a report, by part."""


def bars(values: Values) -> Iterator[Bar]:
    """Of all points that ``values`` tell of."""
    for name in values:
        if name.startswith("sum "):
            for direction in ("forward", "backward"):
                yield from _of_sums(values, name, direction)
    for name in ("epochs gcn", "epochs sage", "epochs gat"):
        yield from _of_epochs(values, name)
    for point, name, factor in ((3, "eighth on the GPU", 1.15), (4, "eighth on GPU and host", 1.25)):
        for model in ("", ", gcn", ", gat"):
            yield from _of_eighths(values, point, name, model, factor)


def _of_sums(values: Values, name: str, direction: str) -> Iterator[Bar]:
    seconds = values[name][direction]["seconds"]
    ours = seconds.get("ooc")
    if ours is None:
        return
    copied = values.get("device copy", {}).get("bytes_per_s")
    csr = seconds.get("torch.sparse CSR")
    faster = csr is not None and csr >= 1.5 * ours
    if copied:
        beside = "" if csr is None else f", or 1.5 × CSR: {csr / ours:.3g}"
        rate = values[name]["counted_bytes"]["a_row_an_edge"] / ours
        yield Bar(1, f"{name} {direction}: of a copy's rate{beside}", rate / copied, 0.7, instead=faster)
    elif csr is not None:
        yield Bar(1, f"{name} {direction}: times as fast as CSR", csr / ours, 1.5)
    if "PyG" in seconds:
        yield Bar(1, f"{name} {direction}: times as fast as PyG", seconds["PyG"] / ours, 1.0)


def forms_of_pyg(values: Values, name: str) -> dict[str, Any]:
    """Seconds and peak memory of PyG's epochs by form, as far as they ran; ``name``: of the part of ours."""
    compiled = values.get(name.replace("epochs", "compiled")) if name.startswith("epochs ") else None
    return {**values.get(name, {}).get("PyG", {}), **({"torch.compile": compiled} if compiled else {})}


def _of_epochs(values: Values, name: str) -> Iterator[Bar]:
    forms = forms_of_pyg(values, name)
    if name not in values or not forms:
        return
    fastest = min(forms, key=lambda form: forms[form]["seconds"])
    ours, theirs = values[name]["ooc"], forms[fastest]
    told = f"{name}: of PyG's seconds, by {fastest}"
    yield Bar(2, told, ours["seconds"] / theirs["seconds"], 0.6, at_most=True)
    if ours["peak_bytes"] and theirs["peak_bytes"]:
        yield Bar(2, f"{name}: of its peak memory", ours["peak_bytes"] / theirs["peak_bytes"], 0.5, at_most=True)


def _of_eighths(values: Values, point: int, part: str, model: str, factor: float) -> Iterator[Bar]:
    name = part + model
    value = values.get(name)
    if value is None:
        return
    floors = _floors_s(values, value, model, with_disk=point == 4)
    if floors is not None:
        longest = max(floors, key=lambda what: floors[what])
        told = ", ".join(f"{what} {seconds:.3g} s" for what, seconds in floors.items())
        measured = value["ooc"]["seconds"] / floors[longest]
        yield Bar(point, f"{name}: of the longest of {told}", measured, factor, at_most=True)
    kernels, events = value["watched"]["by_kernels"], value["watched"]["by_events"]
    overlap = (kernels or events)["both"]
    if overlap["hidden"] is not None:
        gaps = "" if kernels else ", gaps between kernels too"
        what = f"{name}: of copies' seconds under computing{gaps} ({overlap['of_the_possible']:.3g} of the possible)"
        yield Bar(point, what, overlap["hidden"], 0.9, at_best=not kernels)


def _floors_s(values: Values, value: Values, model: str, *, with_disk: bool) -> dict[str, float] | None:
    """Seconds of what an epoch cannot be shorter than; None where one of them was not measured."""
    alone, wire, disk = (values.get(part) for part in (f"whole on the GPU{model}", "pcie", "disk"))
    if alone is None or wire is None or (with_disk and disk is None):
        return None
    up, down = (wire["bytes_per_s"][way] for way in ("up", "down"))
    floors = {
        "computing": alone["ooc"]["seconds"],
        "the wire": max(value["to_device_bytes"] / up, value["to_host_bytes"] / down),
    }
    if with_disk and disk is not None:
        read, written = value["ssd_read_bytes"], value["ssd_write_bytes"]
        one_way = max(read / disk["read_bytes_per_s"], written / disk["write_bytes_per_s"])
        floors["the disk"] = max(one_way, (read + written) / disk["both_ways_bytes_per_s"])
    return floors
