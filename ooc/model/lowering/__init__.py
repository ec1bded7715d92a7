# SPDX-License-Identifier: Apache-2.0
"""Taking a user's model apart into values that can be computed by row passes and column passes.

Reading order: values (what there is), network (the two networks of a model), tracing (what a model is called with, and
calls), interpreter (how calls become values), norms (``ooc.model.layers`` has the convolutions), opened (convolutions
without a formula), messages (what their propagate makes of rows), rowwise (what is known to work row by row),
model_shape (models that are only planned).
"""
