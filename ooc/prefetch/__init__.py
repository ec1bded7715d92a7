# SPDX-License-Identifier: Apache-2.0
"""Moving blocks between SSD and memory: arenas, I/O engines, spill files, and streams that run ahead.

Reading order: ``engine`` (bytes in, bytes out), ``arena`` (where they land), ``spill`` (scratch files), ``frames``
(read before it is asked for, written after it is computed), ``device`` and ``transfers`` (the same with a GPU's memory
above the host's).
"""
