# SPDX-License-Identifier: Apache-2.0
"""The CPU's pulls as loops over edges that numba compiles: nothing is made for every edge, and no thread waits for the
interpreter.

Each takes one row after the other: ``loops`` says which of its neighbours count and what dropout leaves of them, some
dozens of edges at a time, so that their rows are in the cache when they are computed with; ``lanes`` are what is
computed side by side. Where numba is not there, and for what is not written here, torch's operators serve, as
everywhere in ``ooc.kernels``.
"""
