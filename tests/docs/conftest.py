# SPDX-License-Identifier: Apache-2.0
"""An empty folder to run what the pages show in."""

from tests.cli.conftest import here

__all__ = ["here"]
