# SPDX-License-Identifier: Apache-2.0
"""What an aggregation computes for a tile of rows, given the neighbours' matrices in memory.

Every kernel is a pull: the rows of a tile read the rows of their neighbours, forward over in-edges and backward
over out-edges, and nothing is ever scattered. A row's result depends on the order of its own list of neighbours
alone, so it is the same to the bit whatever rows are computed with it and on whichever thread.

    edges            a tile's edges in bounded pieces; self-loops; repeated edges; softmaxes, piece after piece
    dropout          masks of rows, of edges (both ends draw alike), and inside layers that are run as they are
    gat              GAT's attention: scores from one scalar at each end
    edge_function    any message and score per edge, and gradients of what is made of them
    functions        GATv2, TransformerConv, GINE and ResGatedGraphConv as edge functions, and their gradients
    maximum          the largest of the neighbours' rows, gradients shared among ties
    pulls            which of these, or of those of a GPU (``cuda``), compute where a tensor is
    memory           what pulls take for a tile, wherever they run, for admission
    neighbourhood    the graph around some rows, for layers that are run as they are
    deferred_checks  what is wrong with neighbour lists, found on a device that nobody waits for
"""
