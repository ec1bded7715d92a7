# SPDX-License-Identifier: Apache-2.0
"""What a training epoch does stage by stage, and how long each matrix is needed: for people to read.

Stages up to and with the loss are the forward pass, those after it the backward pass.
"""

from dataclasses import dataclass

from ooc.plan.workload import Stage, Workload


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """What one stage computes and moves, wherever its matrices lie. ``multiplies``: multiply-adds of its dense
    products. ``edges`` are those summed over, ``edge_bytes`` what they take."""

    stage: str
    rows: int
    edges: int
    edge_bytes: int
    loaded_bytes: int
    pulled_bytes: int
    stored_bytes: int
    multiplies: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The stages that one matrix lives through. ``produced`` is None for what is there before the epoch;
    ``last_forward`` and ``backward`` are the stages of both passes that read it, None or none where none does."""

    matrix: str
    nbytes: int
    produced: str | None
    last_forward: str | None
    backward: tuple[str, ...]


def stage_statistics(workload: Workload, program: str = "train") -> list[StageStatistics]:
    """One entry a stage of ``program``, in order."""
    return [_statistics(stage, workload) for stage in workload.programs[program]]


def lifetimes(workload: Workload, program: str = "train") -> list[Lifetime]:
    """One entry a matrix that a stage of ``program`` reads or writes, in order of its first stage."""
    stages = workload.programs[program]
    loss = next((i for i, stage in enumerate(stages) if stage.reverse), len(stages))
    names = dict.fromkeys(name for stage in stages for name in (*_reads(stage), *stage.writes))
    found = []
    for name in names:
        readers = [i for i, stage in enumerate(stages) if name in _reads(stage)]
        forward = [stages[i].name for i in readers if i <= loss]
        found.append(
            Lifetime(
                matrix=name,
                nbytes=workload.matrices[name].nbytes,
                produced=next((stage.name for stage in stages if name in stage.writes), None),
                last_forward=forward[-1] if forward else None,
                backward=tuple(stages[i].name for i in readers if i > loss),
            )
        )
    return found


def _reads(stage: Stage) -> tuple[str, ...]:
    return (*stage.loads, stage.pull.source) if stage.pull else stage.loads


def _statistics(stage: Stage, workload: Workload) -> StageStatistics:
    def nbytes(name: str) -> int:
        matrix = workload.matrices[name]
        return min(stage.rows, matrix.rows) * matrix.columns * matrix.itemsize

    topology = workload.topologies[stage.pull.direction] if stage.pull else None
    edges = topology.edges_of(stage.rows, workload.tile_rows) if topology else 0
    return StageStatistics(
        stage=stage.name,
        rows=stage.rows,
        edges=edges,
        edge_bytes=edges * topology.edge_bytes(stage.pull.edge_data) if topology and stage.pull else 0,
        loaded_bytes=sum(nbytes(name) for name in stage.loads),
        pulled_bytes=workload.matrices[stage.pull.source].nbytes if stage.pull else 0,
        stored_bytes=sum(nbytes(name) for name in stage.stores),
        multiplies=stage.rows * stage.multiplies_per_row,
    )
