# SPDX-License-Identifier: Apache-2.0
"""Training: the loop, and what it needs around it.

Reading order: ``trainer`` (epochs of forward, loss, backward and step), ``setup`` (from a model and a graph to a job),
``job`` (the planning of it, with several processes in ``sharing``), ``resources`` (memory, disk, device), ``objective``
(loss and scores), ``runs`` (what a run keeps on disk, and how it is resumed), ``prediction`` (inference on the whole
graph).
"""
