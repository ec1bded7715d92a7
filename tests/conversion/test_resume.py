# SPDX-License-Identifier: Apache-2.0
"""Whenever a conversion is killed, the same one goes on and ends in the same bytes; another one starts over."""

import json
import os
import random
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.conversion.output import Journal
from ooc.errors import SourceError
from ooc.events import Event, Note, TaskFinished, TaskStarted
from ooc.sources.reading import READING_OPTIONS, Request
from ooc.sources.registry import open_source
from ooc.storage.verification import verify
from tests.conversion.arrays import files_of, random_arrays
from tests.conversion.killed import kills_until_the_end, run
from tests.examples import examples, thorough
from tests.sources.fixtures import FIXTURES, random_graph

_SMALL = "synthetic:nodes=3000,edges=4000,features=3,classes=3"
_PLAIN: dict[str, Any] = {"self_loops": True, "row_normalize": True}
_BOTH_WAYS = {**_PLAIN, "symmetrize": True}
_ORDERED = {**_PLAIN, "order": "hop"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of npy files, read in blocks of any size."""
    folder = tmp_path_factory.mktemp("source")
    for name, array in random_arrays(nodes=3000, edges=4000, features=3).items():
        np.save(folder / f"{name}.npy", array)
    return str(folder)


def _same(store: Path, whole: Path) -> bool:
    """The same files with the same bytes but for the time at which the conversion began."""
    attributes = []
    for path in (store, whole):
        metadata = json.loads((path / "zarr.json").read_text())
        metadata["attributes"]["name"] = metadata["attributes"]["created"] = ""
        attributes.append(metadata)
    return attributes[0] == attributes[1] and files_of(store) == files_of(whole)


@pytest.mark.parametrize("options", [_PLAIN, _BOTH_WAYS, _ORDERED], ids=["plain", "both ways", "hop order"])
def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    """At random places between any two things done to the files, several times in one conversion."""
    (tmp_path / "whole").mkdir()
    steps = run(source, tmp_path / "whole" / "g.ooc", 0, options)
    assert steps is not None and steps > 100
    rng = random.Random(0)
    for case in range(examples(1)):
        folder = tmp_path / str(case)
        folder.mkdir()
        assert kills_until_the_end(source, folder / "g.ooc", lambda: rng.randint(1, int(0.6 * steps)), options) > 0
        assert _same(folder / "g.ooc", tmp_path / "whole" / "g.ooc")
        assert [path.name for path in folder.iterdir()] == ["g.ooc"]
        assert verify(ooc.open(folder / "g.ooc")) == []


def test_killed_anywhere_it_goes_on_with_types(tmp_path: Path) -> None:
    """Every type of nodes and of edges is a stage of its own."""
    source = "synthetic:nodes=2400,edges=4000,features=4,classes=3,types=3"
    (tmp_path / "whole").mkdir()
    steps = run(source, tmp_path / "whole" / "g.ooc", 0, {})
    assert steps is not None and steps > 100
    rng = random.Random(0)
    kills_until_the_end(source, tmp_path / "g.ooc", lambda: rng.randint(1, steps), {})
    assert _same(tmp_path / "g.ooc", tmp_path / "whole" / "g.ooc")
    assert verify(ooc.open(tmp_path / "g.ooc")) == []


def test_killed_anywhere_with_a_source_whose_nodes_are_numbered_first(tmp_path: Path) -> None:
    """Which nodes edges are between is put on the disk before all else; killed then too."""
    (tmp_path / "source").mkdir()
    rng = np.random.default_rng(0)
    graph = random_graph(rng, nodes=300, edges=4000, features=3)
    made = FIXTURES["csv-texts"](graph, tmp_path / "source", rng)
    (tmp_path / "whole").mkdir()
    steps = run(str(made.source), tmp_path / "whole" / "g.ooc", 0, made.options)
    assert steps is not None
    for at in np.linspace(1, 0.9 * steps, 2 + examples(2), dtype=int):
        (folder := tmp_path / str(at)).mkdir()
        assert run(str(made.source), folder / "g.ooc", int(at), made.options) is None
        assert run(str(made.source), folder / "g.ooc", 0, made.options) is not None
        assert _same(folder / "g.ooc", tmp_path / "whole" / "g.ooc")


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_every_format_can_be_recognised_again(tmp_path: Path, name: str) -> None:
    """A file that was touched is another source; the same file is the same."""
    rng = np.random.default_rng(0)
    made = FIXTURES[name](random_graph(rng, nodes=40, edges=90, features=3), tmp_path, rng)
    request = Request(
        split=made.options.get("split"),
        budget_bytes=10**9,
        drop_edge_data=made.options.get("drop_edge_data", False),
        options={name: str(value) for name, value in made.options.items() if name in READING_OPTIONS},
        columns=made.options.get("columns", {}),
    )
    found = [open_source(made.source, format=made.options.get("format"), request=request).fingerprint]
    for file in sorted(file for file in tmp_path.rglob("*") if file.is_file()):
        os.utime(file, ns=(1, 1))
    for _ in range(2):
        found.append(open_source(made.source, format=made.options.get("format"), request=request).fingerprint)
    assert found[0] and found[0] != found[1] == found[2]
    assert json.loads(json.dumps(found[1])) == found[1]


@pytest.mark.parametrize("force", thorough([False, True], False))
def test_killed_while_the_store_gets_its_name(tmp_path: Path, force: bool) -> None:
    """At the last steps: the rename, and the removal of what is left. Once that is removed too, it has ended."""
    (tmp_path / "whole").mkdir()
    out, options = tmp_path / "whole" / "g.ooc", {"force": force}
    steps = run(_SMALL, out, 0, options)
    assert steps is not None
    for back in range(0, 40, 8):
        folder = tmp_path / str(back)
        folder.mkdir()
        if force:
            copytree(out, folder / "g.ooc")
        run(_SMALL, folder / "g.ooc", steps - back, options)
        try:
            run(_SMALL, folder / "g.ooc", 0, options)
        except RuntimeError as error:
            assert "exists; give force=True" in str(error)
        assert _same(folder / "g.ooc", out)
        assert [path.name for path in folder.iterdir()] == ["g.ooc"]


def _cancelled(source: Any, out: Path, task: str, **options: Any) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, TaskFinished) and event.task == task:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ooc.convert(source, out, listener=interrupt, **options)
    assert out.with_name(out.name + ".partial").is_dir()


def _events(source: Any, out: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Notes and started tasks of a conversion."""
    events: list[Event] = []
    ooc.convert(source, out, listener=events.append, **options)
    notes = [event.text for event in events if isinstance(event, Note)]
    return notes, [event.task for event in events if isinstance(event, TaskStarted)]


def test_other_options_another_source_or_another_version_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, **random_arrays())
    out = tmp_path / "g.ooc"
    _cancelled(path, out, "writing in-edges")
    notes, tasks = _events(path, out, self_loops=True)
    assert "another conversion (other options): starting over" in notes[-1] and "reading edges" in tasks
    _cancelled(path, out, "writing in-edges", force=True)
    np.savez(path, **random_arrays(seed=1))
    notes, tasks = _events(path, out, force=True)
    assert "another conversion (other input): starting over" in notes[-1] and "reading edges" in tasks
    _cancelled(path, out, "writing in-edges", force=True)
    monkeypatch.setattr("ooc.conversion.conversion.__version__", "99")
    notes, tasks = _events(path, out, force=True)
    assert "another conversion (other ooc): starting over" in notes[-1] and "reading edges" in tasks
    assert files_of(out) == files_of(ooc.convert(random_arrays(seed=1), tmp_path / "h.ooc").path)


def test_a_budget_may_change_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, **random_arrays())
    _cancelled(path, tmp_path / "g.ooc", "reading edges", host_budget="100M")
    notes, tasks = _events(path, tmp_path / "g.ooc", host_budget="200M")
    assert notes == [f"going on with the conversion in {tmp_path / 'g.ooc.partial'} (done so far: labels, edges)"]
    assert "reading edges" not in tasks


def test_a_damaged_journal_starts_over(tmp_path: Path) -> None:
    _cancelled(_SMALL, tmp_path / "g.ooc", "writing in-edges")
    (tmp_path / "g.ooc.partial" / "journal.json").write_text("{")
    notes, tasks = _events(_SMALL, tmp_path / "g.ooc")
    assert "starting over" in notes[0] and "reading edges" in tasks


def test_refusals_before_the_work_leave_what_is_kept(tmp_path: Path) -> None:
    """A forgotten --force, a source that is gone and a budget that is too small cost nothing."""
    out = tmp_path / "g.ooc"
    ooc.convert(random_arrays(), out)
    _cancelled(_SMALL, out, "writing in-edges", force=True)
    with pytest.raises(SourceError, match="exists; give force=True"):
        ooc.convert(_SMALL, out)
    notes, tasks = _events(_SMALL, out, force=True)
    assert notes[0].startswith("going on") and "writing in-edges" not in tasks


def test_marks_are_whole_or_absent(tmp_path: Path) -> None:
    """Those of quick stages are written with the next one that has to be, after all that they speak of."""
    (folder := tmp_path / "g.ooc.partial").mkdir()
    path = folder / "journal.json"
    journal = Journal.begin(path, {"input": "a"})
    journal.finish("labels", {"num_classes": 3})
    found = Journal.read(path)
    assert found is not None and found.stages() == []
    journal.finish("edges", {}, now=True)
    path.with_name("journal.json.ooc-tmp").write_text('{"results": fal')
    again = Journal.read(path)
    assert again is not None and again.created == journal.created and again.stages() == ["labels", "edges"]
    assert again.result("labels") == {"num_classes": 3} and again.result("x") is None
