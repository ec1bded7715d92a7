# SPDX-License-Identifier: Apache-2.0
"""A dataset's name stands for its files under a root, or for where they are published."""

import io
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ooc
from ooc import cli
from ooc.errors import BudgetError, OptionError, SourceError
from ooc.events import ignore
from ooc.sources import names
from ooc.sources.files.download import unpack
from ooc.sources.names import DATASETS, named, obtain
from ooc.sources.registry import FORMATS
from ooc.storage.store import open_store
from tests.sources.fixtures import FIXTURES, Made, random_graph
from tests.sources.web import Web, serving


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as running:
        yield running


def _yes(question: str) -> bool:
    return True


def _no(question: str) -> bool:
    return False


def _never(question: str) -> bool:
    raise AssertionError(f"asked: {question}")


def test_names_are_found_in_any_case_but_not_before_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("OGBN-papers100m") is DATASETS["ogbn-papers100M"]
    assert named("igb-full") is DATASETS["igb260m"]
    assert named("ogbn-mug") is None
    with pytest.raises(SourceError, match="igbh-tiny has no files that are fetched by name; convert its folder"):
        named("igbh-tiny")
    (tmp_path / "cora").mkdir()
    assert named("cora") is None and named("pubmed") is not None


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("ogb-papers100m", "ogbn-papers100M"),
        ("ogb-papers100m-stored", "ogbn-papers100M"),
        ("ogb-papers100m-zip", "ogbn-papers100M"),
        ("ogb-products-zip", "ogbn-products"),
        ("ogb-arxiv", "ogbn-arxiv"),
        ("ogb-proteins", "ogbn-proteins"),
        ("mag240m", "mag240m"),
        ("mag240m-zip", "mag240m"),
        ("igb-tiny", "igb-tiny"),
        ("igb-large", "igb-large"),
        ("igb-full", "igb260m"),
    ],
)
def test_files_are_found_under_the_root_as_their_publishers_lay_them_out(
    tmp_path: Path, fixture: str, name: str
) -> None:
    rng = np.random.default_rng(0)
    made = FIXTURES[fixture](random_graph(rng), tmp_path, rng)
    found = obtain(DATASETS[name], tmp_path, confirm=_never, listener=ignore)
    assert found == made.source
    assert [
        form for form, reader in FORMATS.items() if reader.folder in (None, found.is_dir()) and reader.recognises(found)
    ]


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_the_real_ones_are_found_too(real_graphs: Path, name: str) -> None:
    found = obtain(DATASETS[name], real_graphs, confirm=_never, listener=ignore)
    assert found == real_graphs / name


def test_what_is_not_there_is_downloaded_after_a_question(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "DATASETS", {})
    dataset = names._ogb("ogbn-arxiv", "arxiv", nodes=1, edges=1, features=1)
    dataset = replace(dataset, files=(replace(dataset.files[0], url=f"{web.url}/arxiv.zip"),))
    web.files["arxiv.zip"] = b"PK" * 500
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(
        OptionError, match=r"takes a download of 1.00 KB from .*: give download=True, or put arxiv.zip into"
    ):
        obtain(dataset, tmp_path / "data", confirm=no, listener=ignore)
    assert asked == [f"download ogbn-arxiv, 1.00 KB, from {web.url[7:]} to {tmp_path / 'data'}"]
    assert not (tmp_path / "data").exists()
    found = obtain(dataset, tmp_path / "data", confirm=_yes, listener=ignore)
    assert found == tmp_path / "data" / "arxiv.zip" and found.read_bytes() == web.files["arxiv.zip"]
    assert obtain(dataset, tmp_path / "data", confirm=_never, listener=ignore) == found


def test_datasets_of_several_files_are_there_when_all_are(web: Web, tmp_path: Path) -> None:
    dataset = names._igb_files("igb-large", "large", "large", nodes=1, edges=1)
    dataset = replace(dataset, files=tuple(replace(file, url=f"{web.url}/{file.path}") for file in dataset.files))
    web.files = {file.path: file.path.encode() for file in dataset.files[:2]}
    with pytest.raises(SourceError, match=r"is not under .* 404"):
        obtain(dataset, tmp_path, confirm=_yes, listener=ignore)
    (tmp_path / "large" / "processed" / "paper").mkdir(parents=True)
    assert dataset.find(tmp_path) is None
    web.files = {file.path: file.path.encode() for file in dataset.files}
    assert obtain(dataset, tmp_path, confirm=_yes, listener=ignore) == tmp_path / "large"
    for file in dataset.files:
        assert (tmp_path / file.path).read_bytes() == file.path.encode()


def test_without_a_network_one_line_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = DATASETS["ogbn-papers100M"]
    nowhere = replace(dataset, files=(replace(dataset.files[0], url="http://127.0.0.1:9/papers100M-bin.zip"),))
    with pytest.raises(SourceError) as caught:
        obtain(nowhere, tmp_path, confirm=_no, listener=ignore)
    line = str(caught.value)
    assert "\n" not in line and "Connection refused" in line
    assert f"put papers100M-bin.zip into {tmp_path}, or give root=" in line


def _packed(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_archives_are_unpacked_below_their_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "2.npy").write_bytes(b"two" * 1000)
    (tmp_path / "tiny" / "x").mkdir()
    (tmp_path / "tiny" / "x" / "1.npy").write_bytes(b"one")
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:  # with the folders themselves
        packed.add(tmp_path / "tiny", "tiny")
    shutil.rmtree(tmp_path / "tiny")
    unpack(archive, tmp_path / "tiny", listener=ignore)
    assert (tmp_path / "tiny" / "x" / "1.npy").read_bytes() == b"one"
    assert (tmp_path / "tiny" / "2.npy").read_bytes() == b"two" * 1000
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", archive.name}


def test_a_downloaded_archive_goes_once_it_is_unpacked_another_stays(web: Web, tmp_path: Path) -> None:
    dataset = names._igb_archive("tiny", nodes=1, edges=1, md5="")
    packed = _packed(tmp_path / "igb.tar.gz", {"tiny/a.npy": b"one"})
    file = replace(dataset.files[0], url=f"{web.url}/igb.tar.gz", md5=None)
    dataset, web.files["igb.tar.gz"] = replace(dataset, files=(file,)), packed.read_bytes()
    downloaded, brought = tmp_path / "downloaded", tmp_path / "brought"
    brought.mkdir()
    packed.rename(brought / file.path)
    assert obtain(dataset, downloaded, confirm=_yes, listener=ignore) == downloaded / "tiny"
    assert [path.name for path in downloaded.iterdir()] == ["tiny"]
    assert obtain(dataset, brought, confirm=_never, listener=ignore) == brought / "tiny"
    assert {path.name for path in brought.iterdir()} == {"tiny", file.path}
    assert (brought / "tiny" / "a.npy").read_bytes() == b"one"


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a\\..\\..\\out"])
def test_no_path_in_an_archive_escapes(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    archive = _packed(tmp_path / "in" / "a.tar.gz", {"fine": b"", name: b"x"})
    with pytest.raises(SourceError, match="leads out of its folder"):
        unpack(archive, tmp_path / "in" / "tiny", listener=ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == [archive.name]


def test_links_and_damaged_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tarfile.TarInfo("tiny/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(link)
    with pytest.raises(SourceError, match="which is no plain file"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "tiny", listener=ignore)
    whole = _packed(tmp_path / "b.tar.gz", {"tiny/2.npy": np.random.default_rng(0).bytes(10_000)})
    whole.write_bytes(whole.read_bytes()[:5_000])
    with pytest.raises(SourceError, match="damaged or incomplete"):
        unpack(whole, tmp_path / "tiny", listener=ignore)
    below = _packed(tmp_path / "c.tar.gz", {"tiny/a": b"", "tiny/a/b": b""})
    with pytest.raises(SourceError, match=r"c\.tar\.gz cannot be unpacked: File exists"):
        unpack(below, tmp_path / "tiny", listener=ignore)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(BudgetError, match=r"2\.npy needs 12 B of disk, 10 B are free"):
        unpack(_packed(tmp_path / "d.tar.gz", {"tiny/2.npy": b"x" * 12}), tmp_path / "tiny", listener=ignore)
    assert not (tmp_path / "tiny").exists() and not (tmp_path / "tiny.unpacking").exists()


def test_a_disk_without_room_is_said_before_the_first_file(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = names._igb_files("igb-large", "large", "large", nodes=1, edges=1)
    dataset = replace(dataset, files=tuple(replace(file, url=f"{web.url}/{file.path}") for file in dataset.files))
    web.files = {file.path: b"x" * 400 for file in dataset.files}
    monkeypatch.setattr(names.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1500}))
    with pytest.raises(BudgetError, match=r"igb-large needs 1.60 KB of disk in .*, 1.50 KB are free"):
        obtain(dataset, tmp_path, confirm=_yes, listener=ignore)
    assert list(tmp_path.iterdir()) == []


def _served(web: Web, monkeypatch: pytest.MonkeyPatch, here: Path) -> Made:
    """ogbn-products, published on ``web``."""
    rng = np.random.default_rng(0)
    (here / "made").mkdir()
    made = FIXTURES["ogb-products-zip"](random_graph(rng), here / "made", rng)
    dataset = DATASETS["ogbn-products"]
    file = replace(dataset.files[0], url=f"{web.url}/products.zip")
    monkeypatch.setitem(DATASETS, dataset.name, replace(dataset, files=(file,)))
    web.files["products.zip"] = made.source.read_bytes()
    return made


def test_the_command_downloads_and_converts_a_name(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not without --yes where nobody can be asked; the second time from the disk."""
    monkeypatch.chdir(tmp_path)
    made = _served(web, monkeypatch, tmp_path)
    assert cli.main(["convert", "ogbn-products", "--quiet"]) == 2
    assert "give --yes, or put products.zip into data" in capfd.readouterr().err
    assert not (tmp_path / "data").exists()
    assert cli.main(["convert", "OGBN-Products", "--yes", "--root", "there", "--quiet"]) == 0
    store = open_store(tmp_path / "ogbn-products.ooc")
    np.testing.assert_array_equal(store.array("x").read(), made.graph.x)
    requests = len(web.requests)
    assert cli.main(["convert", "ogbn-products", "b.ooc", "--root", "there", "--quiet"]) == 0
    assert len(web.requests) == requests
    assert capfd.readouterr().err == ""


def test_a_name_stands_for_its_files_in_python_too(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _served(web, monkeypatch, tmp_path)
    with pytest.raises(OptionError, match="download=True"):
        ooc.dataset("ogbn-products", root=tmp_path / "data")
    with pytest.raises(OptionError, match=r"there is no dataset 'ogbn-mug'; known are ogbn-arxiv, "):
        ooc.dataset("ogbn-mug")
    path = ooc.dataset("ogbn-products", root=tmp_path / "data", download=True)
    assert path.read_bytes() == made.source.read_bytes()
    assert ooc.dataset("ogbn-products", root=tmp_path / "data") == path


def test_the_list_has_every_format_and_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "--list"]) == 0
    out = capfd.readouterr().out
    for name in (*DATASETS, *FORMATS):
        assert f" {name} " in out
