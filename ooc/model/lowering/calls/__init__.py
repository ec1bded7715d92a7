# SPDX-License-Identifier: Apache-2.0
"""What the calls of a trace give: of modules and edges (``interpreter``), and of functions of rows (``functions``)."""
