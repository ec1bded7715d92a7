# SPDX-License-Identifier: Apache-2.0
"""The version, where everything may import it: ``ooc`` itself names all layers."""

__version__ = "0.1.0"
