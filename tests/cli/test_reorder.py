# SPDX-License-Identifier: Apache-2.0
"""``ooc reorder``, ``ooc convert --order`` and what ``ooc info`` says of the order."""

import json
from pathlib import Path

from tests.cli.conftest import RunCommand

SOURCE = "synthetic:nodes=3000,edges=6000,features=8,classes=4,labelled=0.01"


def test_reorder_in_place_and_elsewhere(run: RunCommand, here: Path) -> None:
    assert run("convert", SOURCE, "a.ooc", "--quiet")[0] == 0
    facts = json.loads(run("info", "a.ooc", "--json")[1])
    assert facts["order"] == "none" and "hops" not in facts and "train_hops" not in facts
    code, out, err = run("reorder", "a.ooc", "b.ooc", "--host-budget", "64M")
    assert (code, err) == (0, "")
    assert "b.ooc: 3.00k nodes, 6.00k edges, " in out and ": 0.01, " in out
    assert run("reorder", "a.ooc", "--quiet") == (0, "", "")
    for name in ("a.ooc", "b.ooc"):
        facts = json.loads(run("info", name, "--json")[1])
        assert facts["order"] == "hop" and len(facts["hops"]) > 3
        assert (facts["hops"][0], facts["train_hops"][0]) == (30, 15)
        assert run("verify", name, "--quiet") == (0, "", "")
    out = run("info", "a.ooc")[1]
    assert "order            hop\n" in out and "hops             30  " in out and "train_hops       15  " in out
    code, _, err = run("reorder", "a.ooc", "b.ooc")
    assert code == 2 and "--force" in err and err.count("\n") == 1
    assert run("reorder", "a.ooc", "b.ooc", "--force", "--quiet") == (0, "", "")
    assert sorted(path.name for path in here.iterdir()) == ["a.ooc", "b.ooc"]


def test_convert_in_hop_order(run: RunCommand, here: Path) -> None:
    assert run("convert", SOURCE, "a.ooc", "--order", "hop", "--quiet") == (0, "", "")
    facts = json.loads(run("info", "a.ooc", "--json")[1])
    assert facts["order"] == facts["source"]["order"] == "hop"
    code, _, err = run("convert", SOURCE, "b.ooc", "--order", "degree")
    assert code == 2 and "--order" in err and err.count("\n") == 1
    code, _, err = run("reorder", "nowhere.ooc")
    assert code == 2 and "nowhere.ooc" in err and err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["a.ooc"]
