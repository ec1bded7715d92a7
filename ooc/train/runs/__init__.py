# SPDX-License-Identifier: Apache-2.0
"""Runs on disk: folders, locks, checkpoints, weights, several seeds."""
