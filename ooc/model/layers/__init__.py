# SPDX-License-Identifier: Apache-2.0
"""PyG's layers as values: what each pulls from neighbours, and how its gradient comes back.

Reading order: ``per_edge`` (aggregations that compute something for every edge), ``convolutions`` (the layers that are
sums), ``attention`` and ``edge_functions`` (those that weigh edges), ``propagation`` (what any other layer computes of
edges), ``layer`` and ``opaque`` (how that, or a whole layer, is run as it is on some rows and their neighbours),
``conformance`` (whether it may be).
"""
