# SPDX-License-Identifier: Apache-2.0
"""What somebody probably meant who wrote a name that there is none of."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_CANDIDATES = 5
_LIKE = 0.6
"""How like the name must be, from 0 to 1: difflib's measure and its own default."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name in ``known`` that is most like ``word``, whatever the case; None where none is."""
    folded = {name.casefold(): name for name in known}
    wanted = word.casefold()
    found = get_close_matches(wanted, folded, n=_CANDIDATES, cutoff=_LIKE)
    # Letters in the wrong order are the commonest slip, and difflib has it no nearer than a letter that is wrong.
    found.sort(key=lambda name: sorted(name) != sorted(wanted))
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean NAME?"`` to end a message with, or nothing."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"


def did_you_mean_path(path: Path) -> str:
    """As `did_you_mean`, among what lies beside ``path``; where its folder is not there, among those beside that."""
    existing, missing = path.parent, path.name
    while not existing.exists() and existing != existing.parent:
        existing, missing = existing.parent, existing.name
    if not existing.is_dir():
        return ""
    try:
        names = [entry.name for entry in existing.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    found = closest(missing, (name for name in names if name != missing))
    return "" if found is None else f"; did you mean {existing / found}?"
