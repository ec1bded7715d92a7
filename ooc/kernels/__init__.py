# SPDX-License-Identifier: Apache-2.0
"""Kernels: what an aggregation computes for a tile of rows, given the neighbours' matrices in memory.

Every kernel is a pull: the rows of a tile read the rows of their neighbours, over in-edges forward and over out-edges
backward, and nothing is scattered. A row's result depends only on the order of its own list of neighbours. So it has
the same bits whatever rows are computed with it, on any thread.

    edges            a tile's edges in bounded pieces; self-loops; repeated edges; softmaxes, piece after piece
    dropout          masks of rows, of edges (both ends draw alike), and inside layers that are run as they are
    gat              GAT's attention: scores from one scalar at each end
    edge_function    any message and score per edge, and the gradients of what is made of them
    functions        GATv2, TransformerConv, GINE and ResGatedGraphConv as edge functions, and their gradients
    maximum          the largest of the neighbours' rows, gradients shared among ties
    pulls            which of these, or of the GPU's kernels (``cuda``), run where a tensor is
    memory           the memory that pulls take for a tile, on any device, for admission
    neighbourhood    the graph around some rows, for layers that are run as they are
    deferred_checks  faults in neighbour lists, found on a device without waiting for it
"""
