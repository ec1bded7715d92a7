# SPDX-License-Identifier: Apache-2.0
"""Running a plan: instructions on blocks, tiles on worker threads, sums in order. Decides nothing.

Reading order: ``session`` (a prepared training brought to life), ``executor`` (a program's passes, one after the
other, and what a step of each kind computes), ``program_run`` (the loop over the steps of a pass), ``pull_run`` (whole
matrices, slabs and buckets that are pulled), ``operands`` (what a tile reads and writes), ``workers`` (tiles side by
side), ``runtime`` (the memory, files and threads they use).
"""
