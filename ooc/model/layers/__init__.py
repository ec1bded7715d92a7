# SPDX-License-Identifier: Apache-2.0
"""PyG's layers as values: what each pulls from neighbours, and how its gradient is computed.

Reading order: ``per_edge`` (aggregations that compute something for every edge), ``convolutions`` (layers that are
sums), ``attention`` and ``edge_functions`` (layers that weight edges), ``propagation`` (what any other layer computes
of edges), ``layer`` and ``opaque`` (how that, or a whole layer, runs as it is on some rows and their neighbours),
``conformance`` (whether it may).
"""
