# SPDX-License-Identifier: Apache-2.0
"""What somebody probably meant who wrote a name that there is none of."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path

from ooc.errors import OptionError

_CANDIDATES = 5
_LIKE = 0.6
"""How like the name must be, from 0 to 1: difflib's measure and its own default."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name in ``known`` that begins with ``word``, or is most like it, whatever the case; None where none is."""
    folded = {name.casefold(): name for name in known}
    wanted = word.casefold()
    begun = [name for name in folded if wanted and name.startswith(wanted)]
    found = begun or get_close_matches(wanted, folded, n=_CANDIDATES, cutoff=_LIKE)
    # Letters in the wrong order are the commonest slip, and difflib has it no nearer than a letter that is wrong.
    found.sort(key=lambda name: sorted(name) != sorted(wanted))
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean NAME?"`` to end a message with, or nothing."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"


def check_choice(what: str, name: str, known: Collection[str]) -> None:
    """OptionError where the ``name`` of ``what`` is not one of ``known``."""
    if name not in known:
        raise OptionError(f"{what} {name!r} is not one of {', '.join(known)}{did_you_mean(str(name), known)}")


def did_you_mean_path(path: Path) -> str:
    """As `did_you_mean`, among what lies beside ``path``. Where its folder is not there, that is looked for first, and
    in it the rest."""
    existing, rest = path, []
    while not existing.exists() and existing != existing.parent:
        rest.append(existing.name)
        existing = existing.parent
    found = existing
    for name in reversed(rest):
        if not (found / name).exists():
            likely = closest(name, _entries(found))
            if likely is None:
                break
            name = likely
        found = found / name
    return "" if found == existing else f"; did you mean {found}?"


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if not entry.name.startswith(".") and entry.exists()]
    except OSError:  # no folder, or none of ours
        return []
