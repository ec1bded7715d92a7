# SPDX-License-Identifier: Apache-2.0
"""The same pulls on a GPU, as Triton programs, with the signatures of those on the CPU.

    carried          what a row has come to where its edges come in several pieces
    segments         rows cut into stretches of bounded length, so that a row with many edges is many programs' work
    choice           how many rows and columns a program takes: a table, or what was measured and kept on disk
    launch           what all launches have in common, and how segments are gone through
    sums             the plain sum
    maximum          the largest, gradients shared among ties
    gat              GAT's attention, forward and backward
    edge_terms       what features of edges add, as the programs below take it
    edge_function    GATv2's and TransformerConv's attention, GAT's with features of edges, GINE's sum
    dropout          masks of dropout on rows and edges

A program holds the sums of a few segments and adds one edge of each after the other, in the order of the list. So
neither the shape of a program nor the tile it belongs to changes a bit of any row, there are no atomics, and
nothing is scattered. Only where a row is cut, every ``EDGES_PER_SEGMENT`` edges, does the order of additions differ
from that on the CPU: its parts are summed one by one, then added up in order.

Sums are float32 (float64 where the source is) whatever the source's type, and rounded once. ``programs`` holds
what runs on the GPU, or without one in Triton's interpreter; it needs the package ``triton``.
"""
