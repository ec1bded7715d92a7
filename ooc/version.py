# SPDX-License-Identifier: Apache-2.0
"""The version, in a module that everything may import: ``ooc`` itself imports all layers."""

__version__ = "0.1.0"
