# SPDX-License-Identifier: Apache-2.0
"""The stages of a network: when each value is computed, and the functions that compute it for a tile of rows.

Reading order: schedule (which value in which stage, what is kept), recomputation (what is computed again instead of
kept), program (descriptions of stages, and what they store for each other), forward and backward (the stages as
functions of tiles), places (where they compute rows), builder (the programs), panels (the order in which tiles are
added up), names (of matrices), context (what these share), workload (the resulting memory, for the planner), with
edge_counts (how edges are distributed over rows).
"""

from ooc.stages.builder import StageBuilder
from ooc.stages.context import Inputs, Kernel, RowStep, Sink, Step, Tensors, Tile, nowhere
from ooc.stages.names import embedding_name
from ooc.stages.panels import EXCHANGE_BYTES, PanelSums, panel_rows

__all__ = [
    "EXCHANGE_BYTES",
    "Inputs",
    "Kernel",
    "PanelSums",
    "RowStep",
    "Sink",
    "StageBuilder",
    "Step",
    "Tensors",
    "Tile",
    "embedding_name",
    "nowhere",
    "panel_rows",
]
