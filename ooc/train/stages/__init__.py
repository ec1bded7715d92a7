# SPDX-License-Identifier: Apache-2.0
"""The stages of a network: when each value is computed, and what is computed for a tile of rows.

Reading order: schedule (which value in which stage, what is kept), flow (a schedule's stages as functions of tiles),
drawing and taking_back (what such a function does forward and backward), gradients (what stages hand to each other),
builder (the programs), names (what matrices are called), tile and ground (what these share).
"""

from ooc.train.stages.builder import StageBuilder
from ooc.train.stages.tile import Kernel, Sink, Step, Tensors, Tile

__all__ = ["Kernel", "Sink", "StageBuilder", "Step", "Tensors", "Tile"]
