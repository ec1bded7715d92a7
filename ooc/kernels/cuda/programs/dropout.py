# SPDX-License-Identifier: Apache-2.0
"""The programs that draw masks of dropout: on rows, and on edges and rows inside opaque layers."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["draws", "first", "key_low", "key_high", "threshold"])
def draw_masks(out, draws, first, key_low, key_high, threshold, DRAWS: tl.constexpr):
    """Write eight bytes of ``out`` for each of ``draws`` counts from ``first`` on: 1 where the number is at least
    ``threshold``.

    Philox4x64-10 gives four 64-bit numbers a count, low half before high half. The first of a row's bytes is the lowest
    of the eight, as both GPUs and CPUs order bytes.
    """
    draw = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    count = (first + draw).to(tl.uint64)
    zero = tl.zeros([DRAWS], tl.uint64)
    low, high = zero + key_low.to(tl.uint64), zero + key_high.to(tl.uint64)
    n0, n1, n2, n3 = tl.philox_impl(count, zero, zero, zero, low, high)
    kept = zero.to(tl.int64)
    kept |= halves_kept(n0, threshold)
    kept |= halves_kept(n1, threshold) << 16
    kept |= halves_kept(n2, threshold) << 32
    kept |= halves_kept(n3, threshold) << 48
    tl.store(out + draw, kept, mask=draw < draws)


@triton.jit
def halves_kept(number, threshold):
    """Return two bytes, for the low and the high half of 64-bit numbers."""
    low = (number & 0xFFFFFFFF).to(tl.int64) >= threshold
    high = (number >> 32).to(tl.int64) >= threshold
    return low.to(tl.int64) | (high.to(tl.int64) << 8)


@triton.jit(do_not_specialize=["entries", "columns", "seed", "threshold"])
def draw_edge_masks(out, targets, sources, repeats, entries, columns, seed, threshold, DRAWS: tl.constexpr):
    """Write a byte of ``out`` for each of ``entries``, ``columns`` an edge: 1 where it is kept."""
    entry = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    is_entry = entry < entries
    edge = entry // columns
    target = tl.load(targets + edge, mask=is_entry, other=0)
    source = tl.load(sources + edge, mask=is_entry, other=0)
    repeat = tl.load(repeats + edge, mask=is_entry, other=0)
    kept = is_kept(target, source, repeat, entry % columns, seed, threshold)
    tl.store(out + entry, kept.to(tl.int8), mask=is_entry)


@triton.jit
def is_kept(target, source, repeats, head, seed, threshold):
    """Return whether dropout keeps the coefficients of edges: the masks of ``ooc.kernels.dropout.edges``."""
    high = (((target >> 32) << 8) | (source >> 32)) << 16
    last = (high | (head // 4)).to(tl.uint32)
    words = tl.philox(seed, target.to(tl.uint32), source.to(tl.uint32), repeats.to(tl.uint32), last)
    lane = head % 4
    low = tl.where(lane == 0, words[0], words[1])
    word = tl.where(lane < 2, low, tl.where(lane == 2, words[2], words[3]))
    return word.to(tl.int64) >= threshold
