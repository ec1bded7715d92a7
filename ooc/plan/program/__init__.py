# SPDX-License-Identifier: Apache-2.0
"""A layout unrolled: when each block is read, kept, moved and written, and the proof that it all fits.

Reading order: ``sequence`` (the order of all uses of blocks), ``replacement`` (Belady's rule: which blocks stay),
``program`` (instructions), ``staging`` (the same for the host's memory below a device), ``capacity`` (what the budgets
leave), ``plan`` (the result), ``verifier`` (the proof).
"""
