# SPDX-License-Identifier: Apache-2.0
"""A machine's description comes back from a file as it was, and a wrong one is refused by the entry's name."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ooc.errors import HardwareError
from ooc.plan.cost import pull_seconds
from ooc.plan.hardware import UNMEASURED, Curve, Hardware, Wire
from ooc.plan.program.capacity import ExchangeWay, Limits


def _described() -> dict[str, Any]:
    described: dict[str, Any] = json.loads(json.dumps(UNMEASURED.as_dict()))
    return described


def test_a_description_comes_back_as_it_was() -> None:
    assert Hardware.from_dict(_described()) == UNMEASURED


def test_what_goes_to_another_device_goes_over_both_wires_unless_it_goes_there_directly() -> None:
    """While some goes over the link, others go over the wires."""
    device = replace(UNMEASURED, wire=Wire(to_device_bytes_per_s=2e10, to_host_bytes_per_s=1e10))
    fast, slow = (Limits(1, 1, link_bytes_per_s=rate) for rate in (4 * 10**10, 10**9))
    wires = pytest.approx(1 / (1 / 2e10 + 1 / 1e10))
    assert (fast.received_bytes_per_s(device), slow.received_bytes_per_s(device)) == (wires, 10**9)
    directly = replace(fast, exchange_by=ExchangeWay.DEVICE)
    assert directly.received_bytes_per_s(device) == fast.received_bytes_per_s(UNMEASURED) == 4 * 10**10


def test_a_machine_with_a_wire_has_memory_of_its_own() -> None:
    described = _described() | {"wire": {"to_device_bytes_per_s": 2e10, "to_host_bytes_per_s": 1e10}}
    assert Hardware.from_dict(described).has_device_memory
    assert not UNMEASURED.has_device_memory


@pytest.mark.parametrize(
    ("part", "name", "value", "line"),
    [
        (None, "threads", 0, "threads must be a whole number from 1 on, not 0"),
        (None, "overlap", 1.5, "overlap must be from 0 to 1, not 1.5"),
        (None, "colour", "red", "colour is nothing that a machine has"),
        ("disk", "latency_s", "fast", "latency_s must be a positive number, not 'fast'"),
        ("disk", "read_bytes_per_s", [[2, 1], [1, 1]], "read_bytes_per_s must be a list of [x, y] with x ascending"),
        ("disk", "both_ways_bytes_per_s", 0, "both_ways_bytes_per_s must be a positive number, not 0"),
        (None, "disk", 5, "disk must be an object, not 5"),
        ("disk", "read_bytes_per_s", [[1, 2], "ab"], "read_bytes_per_s must be a list of [x, y], not 'ab'"),
        ("processor", "multiplies_per_s", 5, "multiplies_per_s must be an object, not 5"),
        ("processor", "multiplies_per_s", {"bfloat16": 1e9}, "multiplies_per_s lacks float32"),
    ],
)
def test_what_is_wrong_is_named(part: str | None, name: str, value: object, line: str) -> None:
    described = _described()
    (described if part is None else described[part])[name] = value
    with pytest.raises(HardwareError) as raised:
        Hardware.from_dict(described, where="m.json")
    assert str(raised.value) == f"m.json: {line}"


def test_what_is_missing_is_named() -> None:
    described = _described()
    del described["disk"]
    with pytest.raises(HardwareError, match=r"^hardware: disk is missing$"):
        Hardware.from_dict(described)


def test_a_curve_is_linear_between_its_points() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 3.0)))
    assert [curve.at(x) for x in (5, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert Curve(curve.points, proportional=True).at(40) == 6.0


def test_what_older_descriptions_lack_may_be_left_out() -> None:
    described = _described()
    for name in ("seconds_per_tile", "seconds_per_operator", "pull_seconds_per_row", "cached_pull_seconds_per_edge"):
        del described["processor"][name]
    del described["processor"]["cache_bytes"]
    found = Hardware.from_dict(described).processor
    assert found.cache_bytes == 0 and found.seconds_per_tile == 0
    assert found.cached_pull_seconds_per_edge is None


@pytest.mark.parametrize("part", ["disk", "processor"])
def test_unknown_entries_are_named_wherever_they_are(part: str) -> None:
    described = _described()
    described[part]["colour"] = "red"
    with pytest.raises(HardwareError, match=r"^hardware: colour is nothing that a machine has$"):
        Hardware.from_dict(described)


def test_pulls_out_of_the_cache_are_cheaper_the_more_of_the_slab_it_holds() -> None:
    times = [pull_seconds(UNMEASURED, 10**6, 64, 64, 4, rows=10**4, source_rows=10**n) for n in range(3, 8)]
    assert times == sorted(times) and times[0] < times[-1]
    far = pull_seconds(UNMEASURED, 10**6, 64, 64, 4, rows=10**4)
    assert times[-1] <= far == pytest.approx(times[-1], rel=0.02)


def test_narrower_slabs_visit_every_row_more_often() -> None:
    whole, halves = (pull_seconds(UNMEASURED, 0, 64, columns, 4, rows=10**6) for columns in (64, 32))
    assert halves == pytest.approx(2 * whole)
