# SPDX-License-Identifier: Apache-2.0
"""A layout unrolled: which block is read, kept, moved and written when, and the proof that it fits.

Reading order: ``sequence`` (the order of all uses), ``replacement`` (Belady: which blocks stay), ``program``
(instructions), ``staging`` (the same below a device's memory), ``capacity`` (what the budgets leave), ``plan`` (the
result), ``verifier`` (the proof).
"""
