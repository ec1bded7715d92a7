# SPDX-License-Identifier: Apache-2.0
"""How passes cut and hold their matrices.

Reading order: ``grid`` (blocks of a matrix on disk), ``passes`` (how each matrix of a plan is cut; row and column
passes), ``layout`` (from choices to all of these), ``temporaries`` (memory of tiles beside them), ``shuffle`` and
``bucketing`` (what is spilled by its receivers where a matrix is not in memory).
"""
