# SPDX-License-Identifier: Apache-2.0
"""How passes cut and hold their matrices.

Reading order: ``grid`` (blocks of a matrix on disk), ``passes`` (row and column passes), ``matrices`` (how each matrix
of a plan is cut), ``layout`` (from choices to all of these), ``temporaries`` (memory of tiles beside them), ``shuffle``
and ``bucketing`` (what is spilled by its receivers where a matrix is not in memory).
"""
