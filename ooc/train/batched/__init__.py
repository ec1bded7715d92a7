# SPDX-License-Identifier: Apache-2.0
"""Training by batches, sampled or of whole graphs."""
