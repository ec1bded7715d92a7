# SPDX-License-Identifier: Apache-2.0
"""``ooc convert``, ``ooc info``, ``ooc verify`` as a user meets them."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ooc import cli
from ooc.plan import UNMEASURED
from ooc.report import conversion_tables
from ooc.report.what_if import faster_disk
from ooc.storage.store import open_store
from ooc.storage.traversal import nearest
from tests.cli.conftest import RunCommand, exit_code, forked

SOURCE = "synthetic:nodes=3000,edges=20000,features=8,classes=4"


@pytest.fixture(name="arrays")
def _arrays(here: Path) -> Path:
    """A folder of npy files: three nodes, two edges, one node in each split."""
    folder = here / "tiny"
    folder.mkdir()
    contents = {
        "edge_index": np.array([[0, 1], [1, 2]]),
        "x": np.arange(6, dtype=np.float32).reshape(3, 2),
        "y": np.array([0, 1, 0]),
        "train_idx": np.array([0]),
        "valid_idx": np.array([1]),
        "test_idx": np.array([2]),
    }
    for name, content in contents.items():
        np.save(folder / f"{name}.npy", content)
    return folder


def test_convert_info_verify(run: RunCommand, here: Path) -> None:
    code, out, err = run("convert", SOURCE, "a.ooc")
    assert (code, err) == (0, "")
    assert "a.ooc: 3.00k nodes, 20.0k edges, " in out
    code, out, err = run("info", "a.ooc", "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["num_nodes"], facts["num_features"], facts["num_classes"]) == (3000, 8, 4)
    assert (facts["num_edges"], facts["undirected"]) == (20000, False)
    assert sum(facts["split_sizes"].values()) == 3000
    assert facts["bytes"] == sum(path.stat().st_size for path in (here / "a.ooc").rglob("*") if path.is_file())
    assert facts["source"]
    code, out, _ = run("info", "a.ooc")
    assert code == 0 and "num_nodes        3,000\n" in out and "undirected       no\n" in out
    assert run("verify", "a.ooc") == (0, "a.ooc: all is well\n", "")
    assert run("verify", "a.ooc", "--quiet") == (0, "", "")


def test_what_edges_carry_is_told(run: RunCommand, here: Path, arrays: Path) -> None:
    np.save(arrays / "edge_weight.npy", np.array([1.0, 2.0]))
    np.save(arrays / "edge_attr.npy", np.ones((2, 3)))
    assert run("convert", arrays, "--dtype", "float16", "--quiet")[0] == 0
    facts = json.loads(run("info", "tiny.ooc", "--json")[1])
    assert [facts[name] for name in ("edge_weight", "edge_features", "edge_dtype", "ids")] == [
        "float32", 3, "float16", "row numbers"
    ]  # fmt: skip


def test_options_reach_the_store(run: RunCommand, here: Path, arrays: Path) -> None:
    assert run("convert", arrays, "--quiet") == (0, "", "")
    facts = json.loads(run("info", "tiny.ooc", "--json")[1])
    assert (facts["num_edges"], facts["undirected"], facts["dtype"]) == (2, False, "float32")
    options = [
        "--symmetrize",
        "--self-loops",
        "--row-normalize",
        "--dtype",
        "float64",
        "--host-budget",
        "64M",
    ]
    assert run("convert", arrays, *options, "--force", "--quiet") == (0, "", "")
    facts = json.loads(run("info", "tiny.ooc", "--json")[1])
    assert (facts["num_edges"], facts["undirected"], facts["dtype"]) == (7, True, "float64")
    assert facts["num_self_loops"] == 3


def test_one_of_several_splits_is_chosen_by_its_number(run: RunCommand, here: Path, arrays: Path) -> None:
    for name in ("train", "valid", "test"):
        (arrays / f"{name}_idx.npy").unlink()
    np.save(arrays / "train_mask.npy", np.array([[1, 0], [0, 1], [0, 0]], dtype=np.bool_))
    assert run("convert", arrays, "--split", "1", "--quiet")[0] == 0
    assert open_store(here / "tiny.ooc").array("split/train").read().tolist() == [False, True, False]
    code, _, err = run("convert", arrays, "other.ooc", "--split", "2", "--quiet")
    assert code == 2 and "there is no split 2" in err


def test_an_existing_store_is_kept_unless_forced(run: RunCommand, here: Path, arrays: Path) -> None:
    assert run("convert", arrays, "--quiet")[0] == 0
    code, out, err = run("convert", arrays)
    assert (code, out) == (2, "") and "tiny.ooc" in err and "--force" in err and err.count("\n") == 1
    assert run("verify", "tiny.ooc")[0] == 0


def test_a_damaged_store_is_found(run: RunCommand, here: Path, arrays: Path) -> None:
    assert run("convert", arrays, "--quiet")[0] == 0

    def damage(name: str) -> tuple[int, str, str]:
        chunk = next(path for path in (here / "tiny.ooc" / name / "c").rglob("*") if path.is_file())
        content = bytearray(chunk.read_bytes())
        content[1] ^= 1
        chunk.write_bytes(content)
        return run("verify", "tiny.ooc")

    code, out, err = damage("x")
    assert (code, out) == (2, "") and err.startswith("ooc: error: tiny.ooc: ") and err.count("\n") == 1
    code, out, err = damage("split/test")
    assert (code, err) == (2, f"ooc: error: tiny.ooc: {out.count(chr(10))} problems found\n") and "split/test" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["synthetic:nodes=10"],
        ["synthetic:nodes=ten,edges=20,features=2,classes=2"],
        ["synthetic:nodes=10,edges=20,features=2,classes=2,colour=red"],
        [SOURCE, "--host-budget", "1K"],
        [SOURCE, "--host-budget", "1Q"],
        [SOURCE, "--dtype", "int8"],
        [SOURCE, "--format", "cuneiform"],
        [SOURCE, "no/such/folder/a.ooc"],
        [SOURCE, "/proc/a.ooc"],
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run: RunCommand, here: Path, arguments: list[str]) -> None:
    code, out, err = run("convert", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ooc: error: ") and err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_memory_is_the_host_budget_by_another_name(run: RunCommand, here: Path) -> None:
    for name in "--memory", "--host-budget":
        code, _, err = run("convert", SOURCE, name, "1K")
        assert code == 2 and "the memory is 1.00 KB; give --memory 34M" in err


def test_what_each_layer_works_on(run: RunCommand, here: Path) -> None:
    """Nodes, edges and bytes by layer: all of them, or what can reach the scored rows where these come first."""
    source = "synthetic:nodes=3000,edges=9000,features=8,classes=4,labelled=0.02,directed=1"
    assert run("convert", source, "a.ooc", "--quiet")[0] == 0
    layers = json.loads(run("info", "a.ooc", "--layers", "2", "--json")[1])["layers"]
    everything = {"nodes": 3000, "edges": 9000}
    assert [layer["layer"] for layer in layers] == [1, 2]
    for layer, width in zip(layers, (8, 128), strict=True):
        expected = {**everything, "bytes": 4 * 9000 + 4 * 3000 * width}
        assert layer["train"] == layer["evaluate"] == expected
    assert run("reorder", "a.ooc", "b.ooc", "--quiet")[0] == 0
    store = open_store(here / "b.ooc")
    indptr = store.array("in/indptr").read()
    layers = json.loads(run("info", "b.ooc", "--layers", "3", "--hidden", "16", "--json")[1])["layers"]
    for use, splits in (("train", ["train"]), ("evaluate", ["train", "valid", "test"])):
        seeds = np.logical_or.reduce([store.array(f"split/{split}").read() for split in splits])
        hops = nearest(store, [seeds], 3)
        reached = [int(np.flatnonzero(hops <= hop)[-1]) + 1 for hop in range(4)]
        for layer in layers:
            nodes, sources = reached[3 - layer["layer"]], reached[4 - layer["layer"]]
            width = 8 if layer["layer"] == 1 else 16
            edges = int(indptr[nodes])
            assert layer[use] == {"nodes": nodes, "edges": edges, "bytes": 4 * edges + 4 * sources * width}
    out = run("info", "b.ooc", "--layers", "3")[1]
    assert out.count("evaluate") == 3 and f"{layers[2]['train']['nodes']:,}" in out


def test_a_dry_run_says_what_it_would_take_and_leaves_nothing(run: RunCommand, here: Path) -> None:
    """Of a source that is here, and of a dataset whose files are not."""
    code, out, err = run("convert", SOURCE, "a.ooc", "--dry-run", "--host-budget", "50M")
    assert (code, err) == (0, "")
    assert "writing in-edges" in out and "synthetic: 3,000 nodes, 20,000 edges, 8 features" in out
    assert "memory: at least 33.6 MB; it would keep to 50.0 MB\n" in out and " of at most" not in out
    code, out, err = run("convert", "ogbn-papers100M", "--dry-run", "--root", "none", "--host-budget", "100M")
    assert (code, err) == (0, "")
    assert "as published; its files are not here" in " ".join(out.split()) and "writing out-edges" in out
    assert "memory: at least 145 MB; it would keep to 100 MB: too little\n" in out
    assert run("convert", "none", "--dry-run")[0] == 2
    assert run("convert", SOURCE, "--dry-run", "--hold-out-links", "0.1,0.1")[0] == 0
    assert "no two shares below 1" in run("convert", SOURCE, "--dry-run", "--hold-out-links", "1,0.1")[2]
    assert not list(here.iterdir())
    assert run("convert", SOURCE, "a.ooc", "--quiet")[0] == 0
    code, out, err = run("convert", SOURCE, "a.ooc", "--dry-run")
    assert (code, out, err.count("\n")) == (2, "", 1) and "a.ooc exists; give --force" in err
    assert run("convert", SOURCE, "a.ooc", "--dry-run", "--force")[0] == 0


def test_a_dry_run_goes_by_the_disk_as_it_was_measured(
    run: RunCommand, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody has measured it, it says what does."""
    command = "convert", SOURCE, "a.ooc", "--dry-run"
    assert "times are estimates; ooc profile measures this disk" in run(*command)[1]
    before = json.loads(run(*command, "--json")[1])["seconds"]
    slow = replace(UNMEASURED, disk=faster_disk(UNMEASURED.disk, 1e-4))
    monkeypatch.setattr(conversion_tables, "known_hardware", lambda folder: slow)
    assert run(*command)[1].endswith("times are estimates\n")
    assert json.loads(run(*command, "--json")[1])["seconds"] > 100 * before
    assert not list(here.iterdir())


def test_duplicates_are_kept_or_dropped_as_asked(run: RunCommand, here: Path, arrays: Path) -> None:
    np.save(arrays / "edge_index.npy", np.array([[0, 0, 1, 1], [1, 1, 2, 0]]))
    counts = {}
    for options in ([], ["--duplicates", "drop"], ["--symmetrize"], ["--symmetrize", "--duplicates", "keep"]):
        assert run("convert", arrays, "a.ooc", "--quiet", "--force", *options)[0] == 0
        counts[" ".join(options)] = json.loads(run("info", "a.ooc", "--json")[1])["num_edges"]
    assert list(counts.values()) == [4, 3, 4, 8]


def test_a_terminated_conversion_is_kept_and_goes_on_or_is_removed(
    run: RunCommand, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", "synthetic:nodes=100000,edges=1000000,features=50,classes=4", "a.ooc"]
    for options, left in (["--on-cancel", "remove"], []), ([], ["a.ooc.partial"]):
        process = forked(partial(cli.main, [*command, *options]))
        while not (here / "a.ooc.partial" / "store" / "in").exists():
            assert os.waitpid(process, os.WNOHANG) == (0, 0)
            time.sleep(0.002)
        os.kill(process, signal.SIGTERM)
        assert exit_code(process) == cli.EXIT_INTERRUPTED
        err = capfd.readouterr().err
        assert "ooc: interrupted" in err
        assert [path.name for path in here.iterdir()] == left
    assert "the same conversion goes on" in err
    code, out, err = run(*command)
    assert code == 0 and "going on with the conversion in" in out + err
    assert [path.name for path in here.iterdir()] == ["a.ooc"]
