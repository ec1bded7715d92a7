# SPDX-License-Identifier: Apache-2.0
"""What the layers above use of the engines: the seam, the choice among them, and the one that works everywhere."""

from ooc.prefetch.engines.choice import choose_engine
from ooc.prefetch.engines.direct import PIECE_BYTES, DirectEngine
from ooc.prefetch.engines.seam import ChunkFile, Counters, Engine, OpenFile, Span, Ticket, open_file

__all__ = [
    "PIECE_BYTES",
    "ChunkFile",
    "Counters",
    "DirectEngine",
    "Engine",
    "OpenFile",
    "Span",
    "Ticket",
    "choose_engine",
    "open_file",
]
