# SPDX-License-Identifier: Apache-2.0
"""What of the copies lies under computing, and which bars that meets: of made-up times, and of the tests' device."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from ooc.kernels.pulls import BY_DEVICE
from ooc.plan.hardware import UNMEASURED_DEVICE
from ooc.plan.simulate.timeline import Event, Resource
from ooc.prefetch.device import Device
from ooc.storage.store import Store
from ooc.train.trainer import Trainer
from tests.engine.fake_device import FakeDevice, FakeEvent
from tests.exactness.comparison import least_budgets, store_of, tuned_trainer
from tests.exactness.reference import ModelCase, smooth_adam
from tests.graphs import GraphCase, random_data

TOOLS = str(Path(__file__).resolve().parent.parent.parent / "tools")
sys.path.insert(0, TOOLS)
from gpu_parts.bars import bars  # noqa: E402
from gpu_parts.overlap import Watch, hidden, kernels_of, merged, write_trace  # noqa: E402

sys.path.remove(TOOLS)


def event(resource: Resource, start_s: float, end_s: float, *, at: int = 0, nbytes: int = 0) -> Event:
    return Event(resource, start_s, end_s, at, nbytes)


def test_the_share_of_copies_under_computing() -> None:
    """By way, of both together, and of what could be hidden."""
    found = hidden(
        [
            event(Resource.COMPUTE, 0, 2),
            event(Resource.COMPUTE, 3, 4),
            event(Resource.TO_DEVICE, 1, 4, nbytes=300),
            event(Resource.TO_DEVICE, 4, 6, nbytes=200),
            event(Resource.TO_HOST, 0.5, 1.5, nbytes=10),
        ]
    )
    assert found["computing_s"] == 3
    up = {"copies": 2, "bytes": 500, "seconds": 5, "under_computing_s": 2, "hidden": 0.4, "of_the_possible": 2 / 3}
    assert found["to device"] == up
    assert found["to host"]["hidden"] == 1
    assert found["both"]["hidden"] == 0.5


def test_without_copies_nothing_is_hidden_and_nothing_seen() -> None:
    assert hidden([event(Resource.COMPUTE, 0, 2)])["both"]["hidden"] is None


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda span: (span[0], span[0] + span[1])))


@given(computing=SPANS, copies=SPANS)
def test_seconds_are_those_of_counting_one_by_one(
    computing: list[tuple[int, int]], copies: list[tuple[int, int]]
) -> None:
    """Stretches and copies in any order, meeting one another or not."""
    events = [event(Resource.COMPUTE, *span) for span in computing] + [
        event(Resource.TO_HOST, *span) for span in copies
    ]
    computed = {second for span in computing for second in range(*span)}
    expected = sum(second in computed for span in copies for second in range(*span))
    found = hidden(events)
    assert found["to host"]["under_computing_s"] == expected
    assert found["computing_s"] == len(computed)
    assert all(one[1] < other[0] for one, other in pairwise(merged(computing)))


def seen(
    name: str, start_us: float, end_us: float, *, on: DeviceType = DeviceType.CUDA, annotates: bool = False
) -> Any:
    times = SimpleNamespace(start=start_us, end=end_us)
    return SimpleNamespace(name=name, time_range=times, device_type=on, is_user_annotation=annotates)


def test_kernels_as_the_profiler_sees_them() -> None:
    """Copies of the ring only; what the host did, and names that span others, are no kernels."""
    found = kernels_of(
        [
            seen("pull_kernel", 5e6, 6e6),
            seen("Memset (Device)", 6e6, 7e6),
            seen("gemm", 9e6, 10e6),
            seen("Memcpy HtoD (Pinned -> Device)", 4e6, 8e6),
            seen("Memcpy DtoH (Device -> Pinned)", 8e6, 9e6),
            seen("Memcpy HtoD (Pageable -> Device)", 1e6, 2e6),
            seen("aten::mm", 0, 90e6, on=DeviceType.CPU),
            seen("Optimizer.step#Adam.step", 0, 90e6, annotates=True),
        ]
    )
    assert found == [
        event(Resource.TO_DEVICE, 0, 4),
        event(Resource.COMPUTE, 1, 3),
        event(Resource.TO_HOST, 4, 5),
        event(Resource.COMPUTE, 5, 6),
    ]
    assert kernels_of([]) == []


def test_a_trace_has_every_stretch_in_its_pass(tmp_path: Path) -> None:
    events = [event(Resource.COMPUTE, 0, 1), event(Resource.TO_DEVICE, 0.5, 2, at=1, nbytes=8)]
    write_trace(events, ["forward"], tmp_path / "x.json")
    drawn = [one for one in json.loads((tmp_path / "x.json").read_text())["traceEvents"] if one["ph"] == "X"]
    named = [(one["name"], one["ts"], one["dur"]) for one in drawn]
    late = "after the last pass"
    assert sorted(named) == [(late, 5e5, 15e5), (late, 5e5, 15e5), ("forward", 0, 1e6), ("forward", 0, 1e6)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    data = random_data(GraphCase(nodes=400, edges=900, features=12), dtype=torch.float32)
    return store_of(data, tmp_path_factory.mktemp("overlap"))


def moments(earlier: FakeEvent, later: FakeEvent) -> float:
    """All that has happened in between, a second each: never less for what comes later."""
    return float(sum(later.clock) - sum(earlier.clock))


def test_a_watched_epoch_is_the_same_epoch(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Races or none, losses, and every copy once: the bytes are those of its record."""
    losses = {}
    for watching in (False, True):
        with FakeDevice(seed=3) as fake:
            pulls = fake.pulls(BY_DEVICE["cpu"]())
            monkeypatch.setitem(BY_DEVICE, fake.place.type, lambda pulls=pulls: pulls)
            device: Any = Watch(fake, moments) if watching else fake

            def build(gpu: int | str, host: int | str, device: Device = device) -> Trainer:
                case = ModelCase(kind="sage")
                model = case.build(store.num_features, store.num_classes, dtype=torch.float32)
                listener = {"listener": device.told} if isinstance(device, Watch) else {}
                given: dict[str, Any] = {"gpu_budget": gpu, "host_budget": host, "device": device, **listener}
                options: dict[str, Any] = {"optimizer": smooth_adam(model), "spill_dir": tmp_path, "tile_rows": 32}
                return tuned_trainer(model, store, hardware=UNMEASURED_DEVICE, **given, **options)

            with build(*least_budgets(build)) as trainer:
                first = trainer.fit(1, eval_every=0)
                if watching:
                    device.start()
                records = first + trainer.fit(1, eval_every=0)
                events = device.stop() if watching else []
                last = trainer.fit(1, eval_every=0)[0]
                losses[watching] = [record.loss for record in (*records, last)]
                passes = len(trainer.plan.programs["train"])
    assert losses[True] == losses[False]
    found = hidden(events)
    assert found["to device"]["bytes"] == records[-1].to_device_bytes > 0
    assert found["to host"]["bytes"] == records[-1].to_host_bytes > 0
    assert {one.at for one in events} == set(range(passes + 1))
    assert all(0 <= one.start_s <= one.end_s for one in events)


EIGHTH = {
    "ooc": {"seconds": 2.2},
    "to_device_bytes": 40,
    "to_host_bytes": 10,
    "ssd_read_bytes": 30,
    "ssd_write_bytes": 30,
    "watched": {"by_events": {"both": {"hidden": 0.95, "of_the_possible": 1.0}}, "by_kernels": None},
}
VALUES: dict[str, Any] = {
    "device copy": {"bytes_per_s": 100.0},
    "pcie": {"bytes_per_s": {"up": 20.0, "down": 20.0}},
    "disk": {"read_bytes_per_s": 30.0, "write_bytes_per_s": 30.0, "both_ways_bytes_per_s": 40.0},
    "sum 64 float32": {
        "counted_bytes": {"a_row_an_edge": 60.0},
        "forward": {"seconds": {"ooc": 1.0, "torch.sparse CSR": 1.6, "PyG": 0.9}},
        "backward": {"seconds": {"ooc": 0.8, "torch.sparse CSR": 0.9}},
    },
    "epochs sage": {
        "ooc": {"seconds": 1.0, "peak_bytes": 4},
        "PyG": {"edge_index": {"seconds": 2.5, "peak_bytes": 9}, "CSR": {"seconds": 2.2, "peak_bytes": 8}},
    },
    "compiled sage": {"seconds": 2.0, "peak_bytes": 7},
    "whole on the GPU": {"ooc": {"seconds": 1.5}},
    "eighth on the GPU": EIGHTH,
    "eighth on GPU and host": EIGHTH,
}


def test_bars_are_ratios_of_what_was_measured() -> None:
    """The wire takes 2 s, the disk 1.5; sums are fast enough by either way."""
    found = [(bar.point, bar.measured, bar.as_dict()["met"]) for bar in bars(VALUES)]
    assert found == [
        (1, 0.6, "yes"),
        (1, 0.9, "NO"),
        (1, pytest.approx(0.75), "yes"),
        (2, 0.5, "yes"),
        (2, 4 / 7, "NO"),
        (3, 1.1, "yes"),
        (3, 0.95, "perhaps"),
        (4, 1.1, "yes"),
        (4, 0.95, "perhaps"),
    ]


def test_what_was_not_measured_has_no_bar() -> None:
    """No floor without the rate below it; single kernels settle what events leave open."""
    sure = EIGHTH | {"watched": {"by_events": None, "by_kernels": {"both": {"hidden": 0.8, "of_the_possible": 0.9}}}}
    found = list(bars({"eighth on the GPU": sure, "epochs sage": VALUES["epochs sage"]}))
    assert [(bar.point, bar.as_dict()["met"]) for bar in found] == [(2, "yes"), (2, "yes"), (3, "NO")]
    assert "by CSR" in found[0].what, "the fastest that was measured"
    assert list(bars({})) == list(bars({"compiled sage": VALUES["compiled sage"]})) == []
