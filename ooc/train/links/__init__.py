# SPDX-License-Identifier: Apache-2.0
"""Link prediction: the trainer of a model of links, and scores of pairs of nodes."""
