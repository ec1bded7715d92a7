# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks depend on neither the cut of the rows nor the thread: of rows, of edges, inside opaque layers."""
