# SPDX-License-Identifier: Apache-2.0
"""The short form of tools/fault_campaign: a few faults, and that a wrong result would be noticed."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.loaded import load_tool

SEED = 5


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "crash_campaign", None)  # which the tool loads itself
        tool = load_tool("fault_campaign", patch)
        yield tool.Faults(tmp_path_factory.mktemp("faults"), SEED, twice=False)


def test_faults_are_survived_or_named(campaign: Any) -> None:
    for trial in ("threads:convert:1", "disk:train-gcn:2"):
        fault, name, number = trial.split(":")
        campaign.try_one(fault, name, int(number))
    assert campaign.failures == []
    assert sum(counts["survived"] + counts["named"] for counts in campaign.counts.values()) == 2


def test_another_result_is_noticed(campaign: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "failures", [])
    campaign.works._undisturbed(campaign.works.works["convert"])
    expected = campaign.works._expected["convert"]
    monkeypatch.setitem(expected, "h.ooc/y/c/0", b"other labels")
    campaign.try_one("pieces", "convert", 0)
    assert len(campaign.failures) == 1 and "differs in h.ooc/y/c/0" in campaign.failures[0]
