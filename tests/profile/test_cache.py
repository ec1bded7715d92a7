# SPDX-License-Identifier: Apache-2.0
"""A profile is found again for the same machine, disk and version, and for nothing else."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ooc.errors import HardwareError
from ooc.plan import UNMEASURED
from ooc.profile import Profile, cached, keep, profile

PROFILE = Profile(UNMEASURED, "2026-01-02T03:04:05+00:00")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    assert cached(tmp_path) is None
    path = keep(PROFILE, tmp_path)
    assert cached(tmp_path) == PROFILE
    assert path.parent == tmp_path / "cache" / "ooc" and list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_yet_to_be_made_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    keep(PROFILE, tmp_path)
    assert cached(tmp_path / "not" / "there") == PROFILE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__version__", "0.0.0"),
        ("processor_name", lambda: "another processor"),
        ("platform", SimpleNamespace(node=lambda: "another machine")),
        ("mount_of", lambda folder: ("ext4", "another disk", "/")),
    ],
)
def test_anything_else_has_a_profile_of_its_own(
    name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(PROFILE, tmp_path)
    assert cached(tmp_path, device="another") is None
    monkeypatch.setattr(profile, name, value)
    assert cached(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"date": "x", "hardware": {"name": 1}}', "\xff"])
def test_a_damaged_profile_counts_as_none(text: str, tmp_path: Path) -> None:
    keep(PROFILE, tmp_path).write_bytes(text.encode("latin-1"))
    assert cached(tmp_path) is None


def test_without_the_variable_it_is_under_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert profile.location(tmp_path).parent == tmp_path / ".cache" / "ooc"


def test_what_is_no_profile_is_named() -> None:
    with pytest.raises(HardwareError, match=r"^p\.json: this is no profile of a machine: 'hardware'$"):
        Profile.from_dict({}, where="p.json")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(PROFILE, tmp_path)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no"):
        keep(PROFILE, tmp_path)
    assert list(path.parent.iterdir()) == [path]
