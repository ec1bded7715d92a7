# SPDX-License-Identifier: Apache-2.0
"""A PyG model on a graph, taken apart into values; ``ooc.stages`` decides when each value is computed.

Reading order: ``lowering`` (the model as values, most of them rows computed from rows), ``layers`` (PyG's convolutions
as such values, and opaque layers, which run as they are), ``graph`` (the constants that an aggregation needs for every
row).
"""
