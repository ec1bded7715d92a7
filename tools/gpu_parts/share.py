# SPDX-License-Identifier: Apache-2.0
"""A plugin for pytest that runs every n-th test, so that as many processes share the tests: ``GPU_CHECK_SHARE=0/4``."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other processes run; of what markers and ``-k`` have left."""
    number, count = map(int, os.environ["GPU_CHECK_SHARE"].split("/"))
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % count != number])
    items[:] = items[number::count]
