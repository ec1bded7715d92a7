# SPDX-License-Identifier: Apache-2.0
"""The CPU's pulls as loops over edges that numba compiles: nothing is stored for an edge, and no thread waits for the
interpreter.

A loop takes one row after the other. ``loops`` selects which of its neighbours count and what dropout leaves of them,
some dozens of edges at a time, so that their rows are in the cache when they are used. ``lanes`` are numbers that are
computed side by side. Without numba, and for what is not written here, torch's operators are used, as everywhere in
``ooc.kernels``.
"""
