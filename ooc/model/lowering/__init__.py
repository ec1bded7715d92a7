# SPDX-License-Identifier: Apache-2.0
"""Taking a user's model apart into values that can be computed by row passes and column passes.

Reading order: values (what there is), network (the two networks of a model), tracing (how a module becomes values),
norms (``ooc.model.layers`` has the convolutions), rowwise (what is known to work row by row), model_shape (models that
are only planned).
"""
