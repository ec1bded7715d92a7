# SPDX-License-Identifier: Apache-2.0
"""Where the real graphs are: ``OOC_TEST_DATA``, or ``shared/data`` beside the checkout."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_graphs() -> Path:
    folder = Path(os.environ.get("OOC_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real graphs at {folder}; set OOC_TEST_DATA")
    return folder
