# SPDX-License-Identifier: Apache-2.0
"""Arenas give nothing outside themselves; spill files have no name and leave nothing."""

import errno
import os
from pathlib import Path

import pytest

from ooc.errors import BudgetError, SpillError
from ooc.prefetch.arena import Arena
from ooc.prefetch.spill import create_spill, open_nameless
from tests.prefetch.held import held

MIB = 1 << 20


def test_spill_files_have_no_name_and_leave_nothing(tmp_path: Path) -> None:
    before = held()
    file = create_spill(tmp_path, "m", 4 * MIB)
    assert list(tmp_path.iterdir()) == []
    file.close()
    assert held() == before


def test_where_nameless_files_are_refused_the_name_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network filesystems have no O_TMPFILE."""
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    descriptor = open_nameless(tmp_path)
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_a_disk_too_small_says_so_at_once(tmp_path: Path) -> None:
    before = held()
    with pytest.raises(SpillError, match=r"no room for the .* of z1"):
        create_spill(tmp_path, "z1", 1 << 60)
    assert held() == before


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(SpillError, match="cannot create spill files"):
        create_spill(Path("/proc"), "z1", 4096)


def test_an_arena_gives_nothing_outside_itself() -> None:
    arena = Arena(8192)
    assert len(arena.view(4096, 4096)) == 4096
    with pytest.raises(BudgetError):
        arena.view(4096, 4097)
