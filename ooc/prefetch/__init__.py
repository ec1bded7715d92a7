# SPDX-License-Identifier: Apache-2.0
"""Movement of blocks between SSD and memory: arenas, I/O engines, spill files, and frames that are read ahead.

Reading order: ``engine`` (reads and writes of byte ranges), ``arena`` (the memory for them), ``spill`` (scratch files),
``frames`` (blocks read before they are needed and written after they are computed), ``device`` and ``transfers`` (the
same with a GPU's memory above the host's).
"""
