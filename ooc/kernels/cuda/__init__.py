# SPDX-License-Identifier: Apache-2.0
"""The pulls of a GPU, as Triton programs, with the signatures of those of the CPU.

    carried          the state of a row whose edges come in several pieces
    segments         rows cut into stretches of bounded length, so that many programs share a row with many edges
    choice           how many rows and columns a program takes: a table, or what was measured and kept on disk
    launch           what all launches have in common, and how segments are gone through
    sums             the plain sum
    maximum          the largest, gradients shared among ties
    gat              GAT's attention, forward and backward
    edge_terms       terms of edges' features, as the programs below take them
    edge_function    GATv2's and TransformerConv's attention, GAT's with features of edges, GINE's sum
    dropout          masks of dropout on rows and edges

A program holds the sums of a few segments, and adds one edge of each after the other, in the order of the list. So
neither the shape of a program nor the tile it belongs to changes a bit of any row; there are no atomics, and nothing is
scattered. Only where a row is cut, every ``EDGES_PER_SEGMENT`` edges, does the order of additions differ from the
CPU's: its parts are summed one by one, then added up in order.

Sums are float32 (float64 if the source is), whatever the source's type, and rounded once. ``programs`` holds the code
for the GPU, or for Triton's interpreter without one; it needs the package ``triton``.
"""
