# SPDX-License-Identifier: Apache-2.0
"""Layouts: how passes cut their matrices into blocks, and which memory holds them.

Reading order: ``grid`` (blocks of a matrix in its file), ``passes`` (how each matrix of a plan is cut; row and column
passes), ``layout`` (from a choice to all of these), ``temporaries`` (memory for tiles beside them), ``shuffle`` and
``bucketing`` (what is spilled in buckets, by the rows that need it, if a matrix is not in memory).
"""
