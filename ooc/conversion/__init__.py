# SPDX-License-Identifier: Apache-2.0
"""A source becomes a store. ``ooc.convert`` is ``ooc.conversion.conversion.convert``.

Reading order: ``conversion`` (the stages), ``output`` (how they survive being killed), ``topology``, ``edges`` and
``edge_sort`` (both directions of the edges under a budget), ``node_arrays``, ``order`` and
``reorder`` (rows in hop order), ``budget`` and ``forecast`` (what all that will take).

The package is not called convert: ``ooc.convert`` is the function.
"""
