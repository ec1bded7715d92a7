# SPDX-License-Identifier: Apache-2.0
"""What the features of edges add, computed edge by edge where it is needed, and the gradient of the map that makes it.

A term is never stored: it is FEATURES products, of numbers that all segments of a program share, against a fetch of as
many columns. Features of stored edges and of added self-loops lie in matrices of their own, which may be of different
types.
"""

import triton
import triton.language as tl


@triton.jit
def edge_terms(
    features, loops, weight, bias, place, row, is_stored, is_added, column, is_column,
    FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr, TERMS: tl.constexpr,
    HAS_LOOPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """f W + b of one edge a segment, in columns ``column`` of ``weight`` [FEATURES, TERMS], feature after feature.

    ``place``: the edges among the tile's, where ``is_stored``; ``row``: those of the tile, where a self-loop
    ``is_added``.
    """
    term = tl.full([ROWS, COLUMNS], 0.0, ACCUMULATOR)
    for k in range(FEATURES):
        feature = tl.load(features + place * FEATURE_STRIDE + k, mask=is_stored, other=0.0).to(ACCUMULATOR)
        if HAS_LOOPS:
            feature += tl.load(loops + row * LOOP_STRIDE + k, mask=is_added, other=0.0).to(ACCUMULATOR)
        term += feature * tl.load(weight + k * TERMS + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    if HAS_BIAS:
        term += tl.load(bias + column, mask=is_column, other=0.0).to(ACCUMULATOR)
    return term


@triton.jit
def some_features(
    features, loops, place, row, is_stored, is_added, number,
    FEATURES: tl.constexpr, FEATURE_STRIDE: tl.constexpr, LOOP_STRIDE: tl.constexpr,
    HAS_LOOPS: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Features ``number`` [1, ·] of one edge a segment. Behind the last one comes 1, by which a bias is multiplied."""
    is_feature = number < FEATURES
    found = tl.load(features + place * FEATURE_STRIDE + number, mask=is_stored & is_feature, other=0.0).to(ACCUMULATOR)
    if HAS_LOOPS:
        found += tl.load(loops + row * LOOP_STRIDE + number, mask=is_added & is_feature, other=0.0).to(ACCUMULATOR)
    return tl.where(number == FEATURES, 1.0, found)
