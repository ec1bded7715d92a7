# SPDX-License-Identifier: Apache-2.0
"""The engine is chosen by trying, and says why."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ooc.memory import filesystem_of
from ooc.prefetch.engine import Counters
from ooc.prefetch.engines import choice, kvikio
from ooc.prefetch.engines.choice import choose_engine, choose_gpudirect, probe_direct
from ooc.prefetch.engines.direct import DEPTH
from ooc.prefetch.engines.kvikio import probe
from tests.prefetch.fake_kvikio import fake_kvikio
from tests.prefetch.held import assert_no_more_held, held


def chosen(*folders: Path) -> tuple[str, str]:
    before = held()
    engine, reason = choose_engine(*folders)
    engine.close()
    assert_no_more_held(before)
    return engine.name, reason


def refuse_direct(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Have the system refuse O_DIRECT, as older tmpfs and some network filesystems do."""
    real = os.open

    def refuse(path: Path | str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT and wanted(os.path.realpath(path)):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)


def test_a_disk_that_takes_o_direct_gets_the_direct_engine(tmp_path: Path) -> None:
    reason = f"{filesystem_of(tmp_path)} takes O_DIRECT; io_submit, up to {DEPTH} requests at once"
    assert chosen(tmp_path) == ("direct", reason)
    assert list(tmp_path.iterdir()) == []


def test_where_o_direct_is_refused_the_page_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    assert chosen(tmp_path) == ("buffered", f"{filesystem_of(tmp_path)} refuses O_DIRECT")


def test_requests_that_fail_are_found_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem may take the flag and refuse what follows."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    name, reason = chosen(tmp_path)
    assert name == "buffered" and "takes O_DIRECT files but not their requests (Invalid argument)" in reason


def test_other_bytes_than_were_written_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: choice._PROBE_BYTES)
    name, reason = chosen(tmp_path)
    assert name == "buffered" and "returns other bytes with O_DIRECT than were written" in reason


def test_one_folder_that_takes_o_direct_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store on a disk must not go through the page cache because the scratch files have to."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "store").mkdir()
    refuse_direct(monkeypatch, lambda path: "scratch" in path)
    assert chosen(tmp_path / "scratch")[0] == "buffered"
    assert chosen(tmp_path / "scratch", tmp_path / "store")[0] == "direct"


def test_a_folder_that_cannot_be_tried_is_no_error(tmp_path: Path) -> None:
    name, reason = chosen(tmp_path / "missing")
    assert name == "direct" and "missing cannot be written to (No such file or directory)" in reason
    assert probe_direct(tmp_path / "missing").works is None


def test_the_kernels_queue_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All given away, as fs.aio-max-nr has it."""

    def refuse(self: object, depth: int) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("ooc.prefetch.engines.kernel_queue.KernelQueue.__init__", refuse)
    name, reason = chosen(tmp_path)
    assert name == "direct"
    assert reason.endswith("threads, since io_submit is not to be had: Resource temporarily unavailable")


# ---- kvikio ------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``installed(source)`` puts a module ``kvikio`` of that source where this process and its children find it."""

    def install(source: str) -> Path:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "kvikio.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{Path.cwd()}")
        monkeypatch.delitem(sys.modules, "kvikio", raising=False)
        return tmp_path

    return install


WORKING = """
from concurrent.futures import ThreadPoolExecutor
from tests.prefetch.fake_kvikio import fake_kvikio
from types import SimpleNamespace
made = fake_kvikio(ThreadPoolExecutor(1))
CuFile, __version__ = made.CuFile, "26.10"
defaults = SimpleNamespace(set=made.defaults.set, is_compat_mode_preferred=lambda: COMPATIBLE)
"""


def test_kvikio_with_gpudirect_says_so(installed: Callable[[str], Path]) -> None:
    """And whether it reaches a GPU: the probe reads into one's memory, too."""
    folder = installed(WORKING.replace("COMPATIBLE", "False"))
    found = probe(folder, timeout_s=120)  # a busy machine is slow to import torch
    assert (found.works, found.gpudirect, found.version) == (True, True, "26.10")
    assert found.reason.startswith("kvikio 26.10 with cuFile")
    if not found.reaches_gpu:  # as where there is none
        assert "which does not reach a GPU (" in found.reason


def test_kvikio_without_gpudirect_says_so(installed: Callable[[str], Path]) -> None:
    found = probe(installed(WORKING.replace("COMPATIBLE", "True")), timeout_s=120)
    assert (found.works, found.gpudirect) == (True, False)
    assert found.reason == "kvikio 26.10 with its own threads, without GPUDirect"


@pytest.mark.parametrize(
    ("found", "device", "is_straight"),
    [
        (kvikio.Probe(True, "with cuFile", "26.10", True, True), "cuda", True),
        (kvikio.Probe(True, "with cuFile", "26.10", True, True), "cpu", False),
        (kvikio.Probe(True, "with its own threads", "26.10", False), "cuda", False),
        (kvikio.Probe(False, "hung"), "cuda", False),
    ],
)
def test_blocks_come_straight_only_where_gpudirect_has_brought_some(
    found: kvikio.Probe, device: str, is_straight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise by way of host memory, which reads ahead. Both ways count together."""
    counters = Counters()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setitem(sys.modules, "kvikio", fake_kvikio(pool))
        monkeypatch.setattr(kvikio, "probe", lambda folder: found)
        engine = choose_gpudirect(tmp_path, device=device, counters=counters)
        assert (engine is not None) == is_straight
        if engine is not None:
            assert engine.name == "kvikio" and engine.counters is counters
            engine.close()


GPU = """
uint8 = None
class Memory(bytearray):
    cpu = numpy = lambda self: self
    tobytes = lambda self: bytes(self)
zeros = lambda nbytes, dtype, device: Memory(nbytes)
"""
"""A torch whose GPU has its memory on the host."""
LOSING = """
write = CuFile.pwrite
CuFile.pwrite = lambda self, buf, *rest: write(self, bytes(len(buf)) if type(buf).__name__ == "Memory" else buf, *rest)
"""


@pytest.mark.parametrize(("loses", "reaches"), [("", True), (LOSING, False)])
def test_gpudirect_has_to_bring_bytes_both_ways(
    loses: str, reaches: bool, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    """Into the GPU's memory, and out of it into the file."""
    folder = installed(WORKING.replace("COMPATIBLE", "False") + loses)
    (tmp_path / "site" / "torch.py").write_text(GPU)
    found = probe(folder)
    assert (found.works, found.gpudirect, found.reaches_gpu) == (True, True, reaches)
    told = "which does not reach a GPU (other bytes than were written)"
    assert found.reason.endswith(told) is not reaches


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import time; time.sleep(60)", "kvikio hung for 1 s: the driver misbehaves"),
        (
            "raise RuntimeError('no libcuda.so.1')",
            "kvikio cannot move bytes: RuntimeError: no libcuda.so.1",
        ),
        ("import os; os.abort()", "kvikio cannot move bytes: exit code -6"),
    ],
)
def test_a_kvikio_that_hangs_or_crashes_is_left_alone(
    installed: Callable[[str], Path], source: str, reason: str
) -> None:
    folder = installed(source)
    assert probe(folder, timeout_s=1.0).reason == reason


def test_kvikio_not_installed_is_said_without_starting_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    assert probe(tmp_path).reason == "kvikio is not installed (pip install kvikio-cu13)"
