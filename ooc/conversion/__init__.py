# SPDX-License-Identifier: Apache-2.0
"""Sources → stores. The entry point is ``ooc.convert``, which is ``ooc.conversion.conversion.convert``.

Reading order: ``source`` (what a format hands over), ``formats`` (which one it is), ``conversion`` (the stages),
``journal`` and ``output`` (how they survive being killed), ``topology`` and ``edge_sort`` (both directions of the edges
under a budget), ``reorder`` (a store's rows in hop order), ``forecast`` (what all that will take).
"""
