# SPDX-License-Identifier: Apache-2.0
"""Training: the loop, and what it needs around it.

Reading order: ``trainer`` (epochs of forward, loss, backward and step), ``setup`` (what a model and a graph are to
run), ``job`` (how that is planned, of several processes in ``sharing``), ``resources`` (memory, disk, device),
``objective`` (loss and scores), ``runs`` (what a run keeps on disk, and how it goes on), ``prediction`` (inference on
the whole graph).
"""
