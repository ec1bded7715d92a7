# SPDX-License-Identifier: Apache-2.0
"""``ooc.kernels.gat``'s pulls as compiled loops, for scores of a softmax; signed coefficients are left to that.

A row's edges are weighted as they come, some dozens at a time, by the exponential of their score above the highest so
far ("online softmax"; Milakov and Gimelshein, 2018). Shapes as there.
"""

import numpy as np
import torch
from torch import Tensor

from ooc.kernels import gat
from ooc.kernels.compiled.lanes import NBYTES, exp, fma, larger, largest, load, spread, store, total, where_positive
from ooc.kernels.compiled.loops import (
    AHEAD,
    EDGES,
    array,
    check_order,
    compiled,
    draw,
    fetch,
    gather,
    lists_of,
    masks_of,
    scratch,
)
from ooc.kernels.edges import TileEdges
from ooc.kernels.gat import SOURCE_SCALARS, GatHeads, result_columns
from ooc.plan.workload import Direction


def attend(heads: GatHeads, tile: TileEdges, *, source_NS: Tensor, a_dst_RG: Tensor, keep: bool) -> Tensor:
    """As ``gat.attend``."""
    if heads.negative_slope is None or source_NS.dtype == torch.bfloat16:
        return gat.attend(heads, tile, source_NS=source_NS, a_dst_RG=a_dst_RG, keep=keep)
    groups, slices = len(heads.groups), heads.together
    channels = source_NS.shape[1] // groups - SOURCE_SCALARS
    out = source_NS.new_empty(len(a_dst_RG), groups * result_columns(channels, keep=keep))
    first_head = heads.groups.start // heads.slices
    lists, masks = lists_of(tile, len(source_NS)), masks_of(heads.dropout, Direction.IN)
    numbers = groups, slices, channels, first_head, heads.negative_slope, keep
    source, own = array(source_NS), array(a_dst_RG)
    given = scratch(groups // slices, 5, own.dtype)
    check_order(_attend(lists, masks, source, own, numbers, given, array(out)))
    return out


def pull_sources(heads: GatHeads, tile: TileEdges, *, target_NS: Tensor, source_RS: Tensor) -> Tensor:
    """As ``gat.pull_sources``."""
    if heads.negative_slope is None or target_NS.dtype == torch.bfloat16:
        return gat.pull_sources(heads, tile, target_NS=target_NS, source_RS=source_RS)
    groups, slices = len(heads.groups), heads.together
    out = torch.empty_like(source_RS, memory_format=torch.contiguous_format)
    lists, masks = lists_of(tile, len(target_NS)), masks_of(heads.dropout, Direction.OUT)
    numbers = groups, slices, heads.groups.start // heads.slices, heads.negative_slope
    target, source = array(target_NS), array(source_RS)
    given = scratch(groups // slices, 4, source.dtype), np.empty((groups, EDGES), source.dtype)
    check_order(_pull_sources(lists, masks, target, source, numbers, given, array(out)))
    return out


upstream = gat.upstream


@compiled
def _attend(lists, masks, source_NS, a_dst_RG, numbers, given, out_RW):
    groups, slices, channels, first_head, given_slope, keep = numbers
    dtype, lanes, width = a_dst_RG.dtype, NBYTES // a_dst_RG.itemsize, out_RW.shape[1] // groups
    heads, brought, slope = groups // slices, channels + 1, dtype.type(given_slope)
    (near_E, places_E, before), (score_HE, weight_HE, sloped_HE, scale_HE, softmax_H3) = given
    for row in range(len(a_dst_RG)):
        for column in range(out_RW.shape[1]):
            out_RW[row, column] = 0
        for head in range(heads):
            softmax_H3[head, 0], softmax_H3[head, 1], softmax_H3[head, 2] = -np.inf, 0, 0
        before[0] = -1
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            if count == 0:
                continue
            for edge in range(count):
                fetch(lists, source_NS, begun + edge + AHEAD)
                for head in range(heads):
                    place = (head * slices + 1) * brought - 1
                    score_HE[head, edge] = source_NS[near_E[edge], place] + a_dst_RG[row, head * slices]
            for head in range(heads):
                shrink = weigh(score_HE, weight_HE, sloped_HE, head, count, slope, softmax_H3)
                if masks.drops:
                    for edge in range(0, count, lanes):
                        scale = load(scale_HE, head, edge, count)
                        store(weight_HE, head, edge, count, load(weight_HE, head, edge, count) * scale)
                        store(sloped_HE, head, edge, count, load(sloped_HE, head, edge, count) * scale)
                for group in range(head * slices, (head + 1) * slices):
                    begin = group * brought
                    for channel in range(0, channels, lanes):
                        at, end = group * width + channel, group * width + channels
                        sums = load(out_RW, row, at, end) * shrink
                        if keep:
                            sloped_at, sloped_end = at + channels + 1, end + channels + 1
                            sloped_sums = load(out_RW, row, sloped_at, sloped_end) * shrink
                            for edge in range(count):
                                z = load(source_NS, near_E[edge], begin + channel, begin + channels)
                                sums = fma(spread(weight_HE[head, edge]), z, sums)
                                sloped_sums = fma(spread(sloped_HE[head, edge]), z, sloped_sums)
                            store(out_RW, row, sloped_at, sloped_end, sloped_sums)
                        else:
                            for edge in range(count):
                                z = load(source_NS, near_E[edge], begin + channel, begin + channels)
                                sums = fma(spread(weight_HE[head, edge]), z, sums)
                        store(out_RW, row, at, end, sums)
        for group in range(groups):
            head, begin = group // slices, group * width
            weights = softmax_H3[head, 1]
            if weights == 0:
                continue
            inverse = 1 / weights
            for channel in range(0, width, lanes):
                sums = load(out_RW, row, begin + channel, begin + width)
                store(out_RW, row, begin + channel, begin + width, sums * inverse)
            if keep:
                out_RW[row, begin + channels] = softmax_H3[head, 0] + np.log(weights)
                out_RW[row, begin + width - 1] = softmax_H3[head, 2] / weights
    return True


@compiled
def _pull_sources(lists, masks, target_NS, source_RS, numbers, given, out_RS):
    groups, slices, first_head, given_slope = numbers
    dtype, lanes, width = source_RS.dtype, NBYTES // source_RS.itemsize, source_RS.shape[1] // groups
    heads, channels, pulled, slope = groups // slices, width - 1, width + 2, dtype.type(given_slope)
    ((near_E, places_E, before), (score_HE, weight_HE, sloped_HE, scale_HE)), d_GE = given
    for row in range(len(source_RS)):
        for column in range(out_RS.shape[1]):
            out_RS[row, column] = 0
        before[0] = -1
        cursor, stop = lists.offsets_R1[row], lists.offsets_R1[row + 1] + lists.adds_loops
        while cursor < stop:
            begun = cursor
            count, cursor = gather(lists, row, cursor, near_E, places_E)
            if masks.drops and not draw(masks, lists, row, near_E, count, first_head, scale_HE, before):
                return False
            for edge in range(count):
                fetch(lists, target_NS, begun + edge + AHEAD)
                for head in range(heads):
                    place = head * slices * pulled + channels
                    score_HE[head, edge] = (
                        target_NS[near_E[edge], place] + source_RS[row, head * slices * width + channels]
                    )
                    weight_HE[head, edge] = target_NS[near_E[edge], place + 1]
                for group in range(groups):
                    d_GE[group, edge] = target_NS[near_E[edge], (group + 1) * pulled - 1]
            for head in range(heads):
                for edge in range(0, count, lanes):
                    score = load(score_HE, head, edge, count)
                    leaky = where_positive(score, score, score * slope)
                    share = exp(leaky - load(weight_HE, head, edge, count))
                    sloped = where_positive(score, share, share * slope)
                    for group in range(head * slices, (head + 1) * slices):
                        of_d = total(load(d_GE, group, edge, count) * sloped)
                        out_RS[row, (group + 1) * width - 1] -= of_d
                    if masks.drops:
                        scale = load(scale_HE, head, edge, count)
                        share, sloped = share * scale, sloped * scale
                    store(weight_HE, head, edge, count, share)
                    store(sloped_HE, head, edge, count, sloped)
                for group in range(head * slices, (head + 1) * slices):
                    products = spread(dtype.type(0))
                    for channel in range(0, channels, lanes):
                        at, end = group * width + channel, group * width + channels
                        sums, sloped_sums = load(out_RS, row, at, end), spread(dtype.type(0))
                        for edge in range(count):
                            dz = load(target_NS, near_E[edge], group * pulled + channel, group * pulled + channels)
                            sums = fma(spread(weight_HE[head, edge]), dz, sums)
                            sloped_sums = fma(spread(sloped_HE[head, edge]), dz, sloped_sums)
                        store(out_RS, row, at, end, sums)
                        products = fma(sloped_sums, load(source_RS, row, at, end), products)
                    out_RS[row, (group + 1) * width - 1] += total(products)
    return True


@compiled
def weigh(score_HE, weight_HE, sloped_HE, head, count, slope, softmax_H3):
    """Weights of a head's next edges, those times the slope where scores are not positive, and what is known of all so
    far. → by what the sums so far shrink, as there is a higher score."""
    lanes = NBYTES // score_HE.itemsize
    before = softmax_H3[head, 0]
    highest = spread(before)
    for edge in range(count, EDGES):
        weight_HE[head, edge] = -np.inf
    for edge in range(0, count, lanes):
        score = load(score_HE, head, edge, count)
        store(weight_HE, head, edge, count, where_positive(score, score, score * slope))
        highest = larger(highest, load(weight_HE, head, edge, EDGES))
    softmax_H3[head, 0] = largest(highest)
    shrink = np.exp(before - softmax_H3[head, 0])
    highest = spread(softmax_H3[head, 0])
    sums, sloped_sums = spread(score_HE.dtype.type(0)), spread(score_HE.dtype.type(0))
    for edge in range(0, count, lanes):
        weight = exp(load(weight_HE, head, edge, EDGES) - highest)
        sloped = where_positive(load(score_HE, head, edge, count), weight, weight * slope)
        store(weight_HE, head, edge, EDGES, weight)
        store(sloped_HE, head, edge, EDGES, sloped)
        sums, sloped_sums = sums + weight, sloped_sums + sloped
    softmax_H3[head, 1] = softmax_H3[head, 1] * shrink + total(sums)
    softmax_H3[head, 2] = softmax_H3[head, 2] * shrink + total(sloped_sums)
    return shrink
