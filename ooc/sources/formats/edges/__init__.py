# SPDX-License-Identifier: Apache-2.0
"""Graphs that come as edges alone."""
