# SPDX-License-Identifier: Apache-2.0
"""A PyG model on a graph, taken apart into values; ``ooc.stages`` says when each is computed.

Reading order: ``lowering`` (the model as values, most of them rows computed from rows), ``layers`` (PyG's convolutions
as such values, and layers that run as they are), ``graph`` (what an aggregation knows of every row).
"""
