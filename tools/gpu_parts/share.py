# SPDX-License-Identifier: Apache-2.0
"""A plugin for pytest that runs every n-th test, so that as many processes share the tests: ``GPU_CHECK_SHARE=0/4``.

Files that import a package that the machine lacks are skipped, by the package's name.
"""

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest

OURS = ("ooc", "tests", "gpu_parts")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other processes run; of what markers and ``-k`` have left."""
    number, count = map(int, os.environ["GPU_CHECK_SHARE"].split("/"))
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % count != number])
    items[:] = items[number::count]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module of ours that is missing stays an error."""
    report = yield
    missing = re.findall(r"ModuleNotFoundError: No module named '([\w.]+)'", report.longreprtext)
    if report.failed and missing and missing[-1].partition(".")[0] not in OURS:
        report.outcome = "skipped"
        report.longrepr = (str(Path(collector.path)), 0, f"Skipped: {missing[-1]} cannot be imported")
    return report
