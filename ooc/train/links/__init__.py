# SPDX-License-Identifier: Apache-2.0
"""Links instead of nodes: the trainer of a model of links, and what goes by pairs of nodes."""
