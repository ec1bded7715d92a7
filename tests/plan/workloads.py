# SPDX-License-Identifier: Apache-2.0
"""Workloads and machines for tests of plans."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import overload

from ooc.plan import UNMEASURED, Direction, Hardware, Kind, Limits, Matrix, Plan, Pull, Stage, Topology, Workload
from ooc.plan.hardware import Wire
from ooc.plan.layout.layout import Choice, SlabChoice, lay_out, pulled_sources
from ooc.plan.program.build import build_plan
from ooc.plan.program.capacity import Capacity
from ooc.plan.program.verifier import verify_plan
from ooc.plan.workload import PerEdge

WITH_DEVICE_MEMORY = replace(
    UNMEASURED,
    name="with a wire",
    device_memory_bytes=1 << 30,
    wire=Wire(to_device_bytes_per_s=2e10, to_host_bytes_per_s=1e10),
)


def new_workload(rows: int = 40_000, width: int = 64, layers: int = 3, degree: int = 10) -> Workload:
    """A forward and backward chain like a GraphSAGE's: z kept, m and dp pulled."""
    tile = 1024
    edges = [min(rows, r) * degree for r in range(0, rows + tile, tile)]
    matrices = {"x": Matrix("x", rows, width, 4, Kind.STORE)}
    forward, backward = [], []
    for k in range(1, layers + 1):
        for name in (f"z{k}", f"m{k}", f"dp{k}"):
            matrices[name] = Matrix(name, rows, width, 4, Kind.SCRATCH)
    forward.append(Stage("first", rows, ("x",), None, ("z1", "m1"), 1000))
    for k in range(1, layers):
        pull = Pull(f"m{k}", f"p{k}", Direction.IN)
        forward.append(Stage(f"forward {k}", rows, (f"z{k}",), pull, (f"z{k + 1}", f"m{k + 1}"), 1000))
    loss = Stage(
        "loss", rows, (f"z{layers}",), Pull(f"m{layers}", f"p{layers}", Direction.IN), (f"dp{layers}",), 1000, True
    )
    for k in range(layers - 1, 0, -1):
        pull = Pull(f"dp{k + 1}", f"dm{k + 1}", Direction.OUT)
        backward.append(Stage(f"backward {k}", rows, (f"z{k}",), pull, (f"dp{k}",), 1000, True))
    return Workload(
        rows=rows,
        tile_rows=tile,
        matrices=matrices,
        programs={"prepare": (), "train": (*forward, loss, *backward), "evaluate": (*forward,)},
        topologies={d: Topology(d, 4, edges) for d in Direction},
        fixed_host_bytes=100_000,
        fixed_device_bytes=10_000,
        pulled_itemsize=4,
        threads=2,
    )


workload = cache(new_workload)
"""One and the same of a size, of which the least memory is looked for once for all budgets."""


def keeping(work: Workload) -> Workload:
    """The same with stages that keep what they pull as it is, as those of attentions do."""

    def kept(stage: Stage) -> Stage:
        name = next((name for name in stage.stores if name.startswith("z")), None)
        return stage if stage.pull is None else replace(stage, pull=replace(stage.pull, kept=name))

    return replace(work, programs={name: tuple(map(kept, stages)) for name, stages in work.programs.items()})


def in_groups(work: Workload, groups: int) -> Workload:
    """The same where all is pulled in groups of columns, as the heads of an attention are."""

    def grouped(stage: Stage) -> Stage:
        if stage.pull is None:
            return stage
        columns = work.matrices[stage.pull.source].columns
        return replace(stage, pull=replace(stage.pull, per_edge=PerEdge(groups, columns, None, 1024, 4, 4)))

    return replace(work, programs={name: tuple(map(grouped, stages)) for name, stages in work.programs.items()})


def held(work: Workload, machine: Hardware, device_bytes: int, cuts: dict[str, SlabChoice]) -> Plan:
    """The verified plan in which some pulled matrices are held like this, and all others whole."""
    whole = {name: SlabChoice(0, 0) for name in pulled_sources(work)}
    choice = Choice(1024, whole | cuts)
    layout = lay_out(work, choice)
    limits = Limits(device_bytes, 10**9 if machine.has_device_memory else work.fixed_host_bytes)
    capacity = Capacity(work, limits, machine)
    assert capacity.fits(layout)
    plan = build_plan(layout, capacity)
    verify_plan(plan)
    return plan


class EvenEdges(Sequence[int]):
    """``tile_edges`` of a graph whose rows all have the same degree; nothing is kept but three numbers."""

    def __init__(self, rows: int, edges: int, tile_rows: int) -> None:
        self.rows, self.edges, self.tile_rows = rows, edges, tile_rows

    def __len__(self) -> int:
        return -(-self.rows // self.tile_rows) + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return min(self.rows, at * self.tile_rows) * self.edges // self.rows


def large_gcn(nodes: int, edges: int, features: int, classes: int, *, hidden: int = 256) -> Workload:
    """Three layers of a GCN on a graph that is not here, its first aggregation kept, every row active, in float32."""
    tile = 1024
    columns = {"z1": hidden, "m2": hidden, "z2": hidden, "m3": classes, "dp3": classes, "dp2": hidden}
    matrices = {name: Matrix(name, nodes, width, 4, Kind.SCRATCH) for name, width in columns.items()}
    matrices["x"] = Matrix("x", nodes, features, 4, Kind.STORE)
    matrices["ax"] = Matrix("ax", nodes, features, 4, Kind.CONSTANT)
    inwards, outwards = Direction.IN, Direction.OUT
    train = (
        Stage("first", nodes, ("ax",), None, ("z1", "m2"), 8192),
        Stage("second", nodes, (), Pull("m2", "p2", inwards), ("z2", "m3"), 4096),
        Stage("loss", nodes, (), Pull("m3", "p3", inwards), ("dp3",), 1024, True),
        Stage("backward 2", nodes, ("z2",), Pull("dp3", "dm3", outwards), ("dp2",), 4096, True),
        Stage("backward 1", nodes, ("z1", "ax"), Pull("dp2", "dm2", outwards), (), 8192, True),
    )
    prepare = (Stage("aggregate", nodes, (), Pull("x", "px", inwards), ("ax",), 8192),)
    return Workload(
        rows=nodes,
        tile_rows=tile,
        matrices=matrices,
        programs={"prepare": prepare, "train": train, "evaluate": train[:2]},
        topologies={d: Topology(d, 4, EvenEdges(nodes, edges, tile)) for d in Direction},
        fixed_host_bytes=20 * nodes,
        fixed_device_bytes=10**9,
        pulled_itemsize=4,
        threads=1,
    )
