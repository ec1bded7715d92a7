# SPDX-License-Identifier: Apache-2.0
"""A download ends in the published file, whatever happens on the way, or says in one line why not."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ooc.errors import BudgetError, SourceError
from ooc.events import Event, TaskAdvanced, ignore
from ooc.sources.files import download as downloading
from ooc.sources.files.download import download, probe
from tests.prefetch.held import assert_no_more_held, held
from tests.sources.web import Web, serving

_DATA = np.random.default_rng(0).bytes(1_000_003)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges and pieces of a size at which a megabyte takes many of them."""
    monkeypatch.setattr(downloading, "_RANGE_BYTES", 100_000)
    monkeypatch.setattr(downloading, "_PIECE_BYTES", 7_000)
    monkeypatch.setattr(downloading, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(downloading, "_TIMEOUT_S", 5.0)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web(files={"a.zip": _DATA})) as running:
        yield running


def _fetch(web: Web, folder: Path, *, md5: str | None = None, name: str = "a.zip") -> Path:
    url = f"{web.url}/{name}"
    download(url, folder / name, md5=md5, served=probe(url), listener=ignore)
    return folder / name


def test_a_file_arrives_in_parallel_ranges(web: Web, tmp_path: Path) -> None:
    before = held()
    events: list[Event] = []
    served = probe(f"{web.url}/a.zip")
    assert (served.size, served.ranges) == (len(_DATA), True)
    md5 = hashlib.md5(_DATA).hexdigest()
    download(f"{web.url}/a.zip", tmp_path / "data" / "a.zip", md5=md5, served=served, listener=events.append)
    assert (tmp_path / "data" / "a.zip").read_bytes() == _DATA
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a.zip"]
    assert len(web.requests) == 1 + 11 and web.bytes_asked == 1 + len(_DATA)
    progress = [event.done for event in events if isinstance(event, TaskAdvanced) and "downloading" in event.task]
    assert progress == sorted(progress) and progress[-1] == len(_DATA)
    assert_no_more_held(before)  # the server, a thread of this process, may be the last to let go
    assert not [thread for thread in threading.enumerate() if thread.name == "ooc-download"]


def test_dropped_connections_and_busy_servers_are_tried_again(web: Web, tmp_path: Path) -> None:
    """Wherever a request begins, the first fails, by a status or after some bytes: what did arrive is not asked for
    again."""
    tried: set[int] = set()

    def mishap(number: int, start: int) -> int | None:
        if start in tried:
            return None
        tried.add(start)
        return (503, 500, 429, 30_000, 0)[number % 5]

    web.mishap = mishap
    assert _fetch(web, tmp_path).read_bytes() == _DATA
    assert len(web.requests) > 12


def test_a_connection_that_drops_again_and_again_is_tried_while_it_gets_on(web: Web, tmp_path: Path) -> None:
    """Each range takes more tries than are made without any progress; no byte of a whole piece is asked for twice."""
    web.mishap = lambda number, start: 8_000 if number else None
    assert _fetch(web, tmp_path).read_bytes() == _DATA
    assert len(web.requests) > 10 * downloading._TRIES
    starts = [start for _, start, _ in web.requests]
    assert len(starts) == len({*starts}) + 1, "the first byte is asked for before, to know the size"


def test_an_interrupted_download_goes_on_where_it_was(web: Web, tmp_path: Path) -> None:
    web.mishap = lambda number, start: 404 if start >= 700_000 else None
    with pytest.raises(SourceError, match="404"):
        _fetch(web, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.zip.part", "a.zip.part.json"}
    web.mishap, web.requests = lambda number, start: None, []
    assert _fetch(web, tmp_path).read_bytes() == _DATA
    assert web.bytes_asked < 700_000
    assert {path.name for path in tmp_path.iterdir()} == {"a.zip"}


def test_another_file_on_the_server_is_not_mixed_with_what_is_there(web: Web, tmp_path: Path) -> None:
    """Neither between two calls nor within one."""
    web.mishap = lambda number, start: 404 if start >= 500_000 else None
    with pytest.raises(SourceError):
        _fetch(web, tmp_path)
    web.mishap, web.etag, web.files["a.zip"] = lambda number, start: None, '"2"', _DATA[::-1]
    assert _fetch(web, tmp_path).read_bytes() == _DATA[::-1]
    served = probe(f"{web.url}/a.zip")
    web.etag = '"3"'
    with pytest.raises(SourceError, match="has changed on the server"):
        download(f"{web.url}/a.zip", tmp_path / "b.zip", md5=None, served=served, listener=ignore)
    assert {path.name for path in tmp_path.iterdir()} == {"a.zip"}


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"file": 1', b"\xff\xfe"])
def test_a_damaged_record_starts_over(web: Web, tmp_path: Path, damage: bytes) -> None:
    web.mishap = lambda number, start: 404 if start >= 500_000 else None
    with pytest.raises(SourceError):
        _fetch(web, tmp_path)
    (tmp_path / "a.zip.part.json").write_bytes(damage)
    web.mishap = lambda number, start: None
    assert _fetch(web, tmp_path).read_bytes() == _DATA


def test_a_server_without_ranges_is_read_from_the_beginning(web: Web, tmp_path: Path) -> None:
    web.ranges = False
    web.mishap = lambda number, start: 300_000 if number in (1, 2) else None
    assert not probe(f"{web.url}/a.zip").ranges
    web.requests = []
    assert _fetch(web, tmp_path).read_bytes() == _DATA
    assert len(web.requests) == 4


def test_two_downloads_do_not_write_one_file(web: Web, tmp_path: Path) -> None:
    """The second is refused while the first goes on, which it leaves alone."""
    url = f"{web.url}/a.zip"
    served, refused = probe(url), []

    def meanwhile(event: Event) -> None:
        if isinstance(event, TaskAdvanced) and not refused:
            with pytest.raises(SourceError, match=r"another download to .* is under way"):
                download(url, tmp_path / "a.zip", md5=None, served=served, listener=ignore)
            refused.append(event)

    download(url, tmp_path / "a.zip", md5=None, served=served, listener=meanwhile)
    assert refused and (tmp_path / "a.zip").read_bytes() == _DATA


def test_a_wrong_checksum_leaves_nothing(web: Web, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="MD5 checksum") as caught:
        _fetch(web, tmp_path, md5="0" * 32)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_what_stays_wrong_is_given_up_in_one_line(web: Web, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the server says 404"):
        _fetch(web, tmp_path, name="b.zip")
    web.mishap = lambda number, start: 503
    with pytest.raises(SourceError, match="the server says 503"):
        _fetch(web, tmp_path)
    assert len(web.requests) == 6, "a missing file is asked for once, a busy server some times"
    with pytest.raises(SourceError, match="no address on the web"):
        probe("file:///etc/passwd")


def test_no_network_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be downloaded: Connection refused") as caught:
        probe("http://127.0.0.1:9/a.zip")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said_before_anything_is_fetched(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(downloading.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(BudgetError, match=r"needs 1.00 MB more of disk, 1.00 KB are free"):
        _fetch(web, tmp_path)
    assert len(web.requests) == 1
