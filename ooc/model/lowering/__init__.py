# SPDX-License-Identifier: Apache-2.0
"""Lowering: take a user's model apart into values that row passes and column passes can compute.

Reading order: ``values`` (what there is), ``network`` (a model's two networks, for training and evaluation),
``tracing`` (what a model is called with, and what it calls), ``calls`` (how calls become values), ``norms``
(``ooc.model.layers`` has the convolutions), ``opened`` (convolutions without a formula), ``messages`` (their
``propagate`` as values), ``model_shape`` (models that are only planned).
"""
