# SPDX-License-Identifier: Apache-2.0
"""Conversion of a source to a store. ``ooc.convert`` is ``ooc.conversion.conversion.convert``.

Reading order: ``conversion`` (the stages), ``output`` (how they survive being killed), ``topology``, ``edges`` and
``edge_sort`` (both directions of the edges within a budget), ``node_arrays``, ``order`` and ``reorder`` (rows in hop
order), ``budget`` and ``forecast`` (the memory, disk and time required).

The package is not called convert, since ``ooc.convert`` is the function.
"""
