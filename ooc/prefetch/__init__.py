# SPDX-License-Identifier: Apache-2.0
"""Moving blocks between SSD and memory: arenas, I/O engines, spill files, and streams that run ahead.

Reading order: ``engine`` (bytes in, bytes out), ``arena`` (where they land), ``spill`` (scratch matrices),
``stream`` (what is read before it is asked for and written after it is computed).
"""
