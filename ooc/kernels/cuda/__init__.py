# SPDX-License-Identifier: Apache-2.0
"""The same pulls on a GPU, as Triton programs, with the signatures of those on the CPU.

    segments         rows cut into stretches of bounded length, so that a row with many edges is many programs' work
    shapes           how many rows and columns a program takes, and how many edges at a time
    choice           which of those shapes is fastest on this GPU: measured once, kept on disk
    launch           what all launches have in common, and how segments are gone through
    memory           what a pull takes of the GPU's memory, for admission
    sums             the plain sum
    maximum          the largest, gradients shared among ties
    gat              GAT's attention, forward and backward
    edge_terms       what features of edges add, as the programs below take it
    edge_sum         GINE's sum, forward and backward
    edge_function    GATv2's and TransformerConv's attention, GAT's with features of edges, and that sum
    dropout          masks of dropout on rows

A program holds the sums of a few segments and adds one edge of each after the other, in the order of the list. So
neither the shape of a program nor the tile it belongs to changes a bit of any row, there are no atomics, and
nothing is scattered. Only where a row is cut, every ``EDGES_PER_SEGMENT`` edges, does the order of additions differ
from that on the CPU: its parts are summed one by one, then added up in order.

Sums are float32 (float64 where the source is) whatever the source's type, and rounded once. ``programs`` holds
what runs on the GPU, or without one in Triton's interpreter; it needs the package ``triton``.
"""
