# SPDX-License-Identifier: Apache-2.0
"""The formats of graphs, one a module: each recognises its files and opens them as a ``Source``."""
