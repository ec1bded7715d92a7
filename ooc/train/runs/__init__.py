# SPDX-License-Identifier: Apache-2.0
"""Training runs on disk: folders, locks, checkpoints, weights, runs of several seeds."""
