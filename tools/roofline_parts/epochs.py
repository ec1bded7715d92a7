# SPDX-License-Identifier: Apache-2.0
"""Whole epochs beside the least that their work takes at the machine's measured rates.

What is multiplied, pulled, read and written is what the plan counts. Products and pulls share the processors, so their
times add up; the disk works beside them, and so does the memory that rows are loaded from and stored to: the limit is
the longest of the three.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from full_batch import Job, build_model

import ooc
from ooc.engine.record import EpochRecord
from ooc.plan.layout.passes import Pass, RowPass, pulled_columns
from ooc.plan.program.plan import Plan
from ooc.profile.bench import Round, waited_s
from ooc.storage.store import Store
from roofline_parts.rates import Rates

FRACTION = 1 / 8
IN_MEMORY, AT_AN_EIGHTH = "in memory", "1/8 of the data"
BARS = {IN_MEMORY: 1.2, AT_AN_EIGHTH: 1.3}


class Least(NamedTuple):
    """Seconds at the measured rates."""

    products_s: float
    pulls_s: float
    rows_s: float = 0.0
    disk_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """What all of it takes at least."""
        return max(self.products_s + self.pulls_s, self.rows_s, self.disk_s)


class PassOfEpoch(NamedTuple):
    """Of one pass the processors' time, and what it takes at least, the disk aside."""

    title: str
    cpu_s: float
    least: Least


@dataclass(frozen=True)
class Epoch:
    """One that was trained: what it took without what other programs did, by the clock, and at least."""

    own_s: float
    clock_s: float
    least: Least
    passes: list[PassOfEpoch]
    loss: float

    @property
    def ratio(self) -> float:
        return self.own_s / self.least.limit_s


class Training:
    """A model on a graph within budgets, an epoch at a time. A context manager."""

    def __init__(self, store: Store, name: str, memory: int | None, options: Mapping[str, Any]) -> None:
        model, _, dtype = name.partition(":")
        job = Job(str(store.path), model, "ooc", **{key: options[key] for key in ("layers", "hidden", "heads")})
        self.trainer = ooc.Trainer(
            build_model(job, store),
            store,
            memory=memory,
            device="cpu",
            threads=options["threads"],
            spill_dir=options["folder"],
            compute_dtype=dtype or "float32",
        )
        self.dtype = getattr(torch, dtype or "float32")

    @property
    def data_bytes(self) -> int:
        """All matrices and edges of an epoch."""
        plan = self.trainer.plan
        edges = sum(topology.edges * topology.edge_bytes(topology.data) for topology in plan.topologies.values())
        return edges + sum(planned.matrix.nbytes for planned in plan.matrices.values())

    def epoch(self, rates: Rates) -> Epoch:
        """One more, and what it takes at least."""
        cores = rates.bench.cores
        clock, cpu, waited = perf_counter(), process_time(), waited_s()
        (record,) = self.trainer.fit(1, eval_every=0, progress=False)
        of_epoch = record.time_s / (perf_counter() - clock)  # the rest is getting ready for it
        others_s = of_epoch * (waited_s() - waited) / cores
        taken = Round(record.time_s, of_epoch * (process_time() - cpu) / cores, others_s)
        passes = list(self._passes(record, rates))
        least = self._least([one.least for one in passes], rates)
        return Epoch(taken.own_s, record.time_s, least, passes, record.loss)

    def _passes(self, record: EpochRecord, rates: Rates) -> Iterator[PassOfEpoch]:
        plan = self.trainer.plan
        for item, taken in zip(plan.programs["train"], record.passes, strict=True):
            least = least_of_pass(item, plan, rates, self.dtype)
            yield PassOfEpoch(item.title, taken.cpu_s / rates.bench.cores, least)

    def _least(self, passes: list[Least], rates: Rates) -> Least:
        plan, disk = self.trainer.plan, rates.disk()
        products_s, pulls_s, rows_s, _ = map(sum, zip(*passes, strict=True))
        read, written = plan.ssd_read_bytes, plan.ssd_write_bytes
        one_way_s = max(
            read / disk.read_bytes_per_s.at(plan.frame_bytes), written / disk.write_bytes_per_s.at(plan.frame_bytes)
        )
        disk_s = max(one_way_s, (read + written) / disk.both_ways_bytes_per_s)
        return Least(products_s, pulls_s, rows_s, disk_s)

    def __enter__(self) -> "Training":
        self.trainer.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.trainer.__exit__(*raised)


def least_of_pass(item: Pass, plan: Plan, rates: Rates, dtype: torch.dtype) -> Least:
    """What one pass takes at least, the disk aside."""
    products_s = pulls_s = rows_s = 0.0
    if isinstance(item, RowPass):
        products_s = item.rows * item.stage.multiplies_per_row / rates.multiplies_per_s(dtype)
        matrices = [plan.matrices[name].matrix for name in (*item.stage.loads, *item.stage.stores)]
        moved = sum(min(item.rows, one.rows) * one.columns * one.itemsize for one in matrices)
        rows_s = moved / rates.stream_bytes_per_s(copying=True)
    if item.pull is not None:
        source, topology = plan.matrices[item.pull.source], plan.topologies[item.pull.direction]
        edges = topology.edges_of(range(item.rows), plan.tile_rows)
        columns = pulled_columns(item, source.grid)
        whole, rest = divmod(columns, min(columns, source.grid.slab_columns))
        for slabs, width in ((whole, min(columns, source.grid.slab_columns)), (1, rest)):
            if width:
                row_s = rates.row_seconds(width * source.region_itemsize, source.matrix.rows)
                index_s = topology.index_itemsize / rates.stream_bytes_per_s(copying=False)
                pulls_s += slabs * edges * (row_s + index_s)
    return Least(products_s, pulls_s, rows_s)


def trained(
    store: Store, names: list[str], rounds: int, rates: Rates, options: Mapping[str, Any]
) -> Iterator[tuple[str, str, list[Epoch]]]:
    """Epochs of every model, in memory and with an eighth of its data there, that take turns with one another and with
    measuring the rates; by model and way."""
    for name in names:
        with ExitStack() as stack:
            whole = stack.enter_context(Training(store, name, None, options))
            part = stack.enter_context(Training(store, name, int(whole.data_bytes * FRACTION), options))
            ways = {IN_MEMORY: whole, AT_AN_EIGHTH: part}
            found: dict[str, list[Epoch]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                rates.forget()
                for way, training in ways.items():
                    epoch = training.epoch(rates)
                    if number:  # the first fills the memory
                        found[way].append(epoch)
        yield from ((name, way, epochs) for way, epochs in found.items())
