# SPDX-License-Identifier: Apache-2.0
"""The engine that runs a plan: instructions on blocks, tiles on worker threads, sums in order. It decides nothing.

Reading order: ``session`` (starts a prepared training and runs its programs), ``executor`` (a program's passes one
after another, and what a step of each kind computes), ``program_run`` (the loop over the steps of a pass), ``pull_run``
(pulls from whole matrices, slabs and buckets), ``operands`` (what a tile reads and writes), ``workers`` (tiles in
parallel), ``runtime`` (the memory, files and threads they use).
"""
