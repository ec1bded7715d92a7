# SPDX-License-Identifier: Apache-2.0
"""Training: the loop, and what it needs around it.

Reading order: ``trainer`` (epochs of forward, loss, backward and step), ``setup`` (a model, a graph and budgets become
a prepared run), ``resources`` (memory, disk, device), ``objective`` (loss and scores), ``state`` and ``run`` (what a
run keeps on disk, and how it goes on), ``prediction`` (inference on the whole graph).
"""
