# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks depend neither on how rows are cut nor on the thread: for rows, for edges, and inside opaque
layers."""
