# SPDX-License-Identifier: Apache-2.0
"""A PyG model on a graph: taken apart into values, put into stages, described to the planner.

Reading order: ``lowering`` (the model as values, most of them rows computed from rows), ``layers`` (PyG's convolutions
as such values, and layers that run as they are), ``stages`` (when each value is computed, forward and backward),
``graph`` (what an aggregation knows of every row), ``workload`` (what all that asks of memory, for the planner).
"""
