# SPDX-License-Identifier: Apache-2.0
"""Running a pass that shuffles a matrix: every row goes to all buckets of targets that gather it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.engine.edge_sweep import EdgeSweep
from ooc.engine.operands import Input
from ooc.engine.pass_run import PassRun
from ooc.engine.program_run import ProgramRun
from ooc.engine.shuffle import BucketsRows, RowsWriter
from ooc.kernels.edges import TileEdges, highest_row
from ooc.plan.layout.passes import ShufflePass
from ooc.plan.layout.shuffle import BucketedRows
from ooc.plan.program.sequence import Step


@dataclass(frozen=True, slots=True)
class _BucketedTile:
    """The source's rows ``start``…, and which of them each bucket gets."""

    start: int
    values_RC: Tensor
    found: list[BucketsRows]


class ShufflePassRun(PassRun):
    """One execution of a shuffle, from the first row to the last, so that every bucket gets its rows ascending."""

    def __init__(self, run: ProgramRun, item: ShufflePass) -> None:
        assert item.pull is not None
        super().__init__(run, item)
        self.file = file = self.runtime.bucketed_rows[item.pull.output]
        self.memory = run.streaming_memory(item.pull.output, item.index, file.plan.writing_nbytes)
        self.source = Input(self.runtime.matrices[item.pull.source], run.workspace, whole=None, dtype=file.dtype)
        self.edges = EdgeSweep(self.runtime, item.pull)

    def begin_sweep(self, step: Step) -> None:
        self.writer = RowsWriter(self.file, self.memory)

    def open(self, number: int, step: Step) -> Iterator[tuple[int, int]]:
        """The tiles of a step."""
        self.source.open(step.start, step.stop)
        self.edges.open(step.start, step.stop)
        height = self.runtime.plan.tile_rows
        for start in range(step.start, step.stop, height):
            yield start, min(step.stop, start + height)

    def compute(self, task: tuple[int, int]) -> _BucketedTile:
        """Who gets which rows of a tile."""
        edges = self.edges.take(*task)
        return _BucketedTile(task[0], self.source.tile(*task), rows_by_bucket(self.file.plan, edges))

    def reduce(self, result: _BucketedTile) -> None:
        self.writer.add(result.start, result.values_RC, result.found)

    def finish(self) -> None:
        self.writer.finish()


def rows_by_bucket(plan: BucketedRows, edges: TileEdges) -> list[BucketsRows]:
    """Which rows of a tile each bucket gets, ``edges`` being those out of them: the rows that some target of the bucket
    gathers, and those that are targets in it themselves."""
    targets_E = edges.indices_E.long()
    if len(targets_E):
        highest_row(edges, 0, targets_E)
    row_E = torch.repeat_interleave(torch.arange(edges.rows), edges.offsets_R1.diff().long())
    targets = torch.cat((targets_E, torch.arange(edges.start, edges.start + edges.rows)))
    rows = torch.cat((row_E, torch.arange(edges.rows)))
    is_target = targets < plan.targets
    places = torch.unique(targets[is_target] // plan.bucket_rows * edges.rows + rows[is_target])  # by bucket, then row
    buckets, counts = torch.unique_consecutive(places // edges.rows, return_counts=True)
    parts = (places % edges.rows).split(counts.tolist())
    return [BucketsRows(bucket, part) for bucket, part in zip(buckets.tolist(), parts, strict=True)]
