# SPDX-License-Identifier: Apache-2.0
"""The parts of ``tools/bench_roofline``.

rates     what the machine can do at best: memory, gathered rows, dense products, disk
kernels   the kernels of training, timed where the executor calls them, and what they move and compute at least
epochs    whole epochs beside the limit of their products, pulls and disk traffic
chart     the roofline
"""
