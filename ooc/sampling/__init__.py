# SPDX-License-Identifier: Apache-2.0
"""Sampled mini-batches of a store: neighbours sampled hop by hop, rows read from the SSD ahead of their use."""
