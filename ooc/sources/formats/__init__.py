# SPDX-License-Identifier: Apache-2.0
"""The formats of graphs, one per module: each recognises its files and opens them as a ``Source``."""
