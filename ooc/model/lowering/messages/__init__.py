# SPDX-License-Identifier: Apache-2.0
"""The ``propagate`` of users' own layers, taken apart into values of rows and sums over edges."""
