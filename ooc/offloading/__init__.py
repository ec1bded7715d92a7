# SPDX-License-Identifier: Apache-2.0
"""What autograd saves between the forward and the backward pass of any module, kept within budgets.

Reading order: ``saved`` (what becomes of each saved tensor, by the fate of its layer), ``tiers`` (where those wait that
leave the device), ``measure`` (sizes, found on the meta device, and the plan), ``offload`` (all of it around a module).
"""
