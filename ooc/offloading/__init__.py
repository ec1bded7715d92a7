# SPDX-License-Identifier: Apache-2.0
"""What autograd saves between the forward and the backward pass of any module, kept within budgets.

Reading order: ``saved`` (each saved tensor is stored or recomputed by its layer's fate), ``tiers`` (storage outside the
device), ``measure`` (sizes, found on the meta device, and the plan), ``offload`` (all of it around a module).
"""
