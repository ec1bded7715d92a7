# SPDX-License-Identifier: Apache-2.0
"""Training by mini-batches, sampled or of whole graphs."""
