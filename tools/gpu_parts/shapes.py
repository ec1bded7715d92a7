# SPDX-License-Identifier: Apache-2.0
"""Which shape of a program is fastest on this GPU: all candidates by a timer; ``ooc.kernels.cuda.choice`` keeps it."""

import statistics
from collections.abc import Callable
from dataclasses import replace

from ooc.kernels.cuda.choice import LANE_BYTES, WARP_BYTES, Case, Choices, Kernel, Shape, warps_for

ROUNDS = 5
"""How often every candidate is timed, each in turn, so that what disturbs one disturbs all."""


def candidates(case: Case) -> list[Shape]:
    """Shapes worth trying, the usual one first: fewer columns, other numbers of rows, edges together and warps.

    Only those that change no bit: where a program adds up columns, their order is that of threads and warps.
    """
    first, whole_rows = case.usual, case.kernel.takes_whole_rows
    unrolled = first.unroll, max(1, first.unroll // 2), 2 * first.unroll
    tried = [replace(first, unroll=unroll) for unroll in unrolled]
    for columns in (first.columns,) if whole_rows else (first.columns, first.columns // 2):
        for rows in (1, 2, 4, 8, 16):
            row_bytes = columns * case.summed_bytes
            if row_bytes >= LANE_BYTES and WARP_BYTES // 2 <= rows * row_bytes <= 4 * WARP_BYTES:
                tried.append(Shape(rows, columns, first.unroll, warps_for(rows * row_bytes)))
    if whole_rows and case.kernel is not Kernel.ATTEND:
        tried = [shape for shape in tried if (shape.rows, shape.warps) == (first.rows, first.warps)]
    return list(dict.fromkeys(tried))


def measure(choices: Choices, case: Case, seconds: Callable[[Shape], float], *, rounds: int = ROUNDS) -> Shape:
    """The candidate whose median of ``seconds`` is least, the earlier one of equals; kept from now on.

    A candidate for which ``seconds`` raises, as one too large for this GPU does, is left out: errors of Triton and
    torch have no class in common. Raises the last such error where none ran.
    """
    taken: dict[Shape, list[float]] = {shape: [] for shape in candidates(case)}
    refused: Exception | None = None
    for _ in range(rounds):
        for shape in list(taken):
            try:
                choices.use(case, shape)
                taken[shape].append(seconds(shape))
            except Exception as error:
                refused = error
                del taken[shape]
    if not taken:
        assert refused is not None
        raise refused
    fastest = min(taken, key=lambda shape: statistics.median(taken[shape]))
    choices.keep(case, fastest)
    return fastest
