# SPDX-License-Identifier: Apache-2.0
"""The tree of errors that are the user's to act upon. The command line prints any of them as one line and exits with
code 2.

Messages name Python's arguments: ``give host_budget='2.1G'``, ``force=True``, ``another spill_dir=``. ``ooc.cli``
rewrites those that are options of the running command: ``--host-budget 2.1G``, ``--force``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_MOST_CHARACTERS = 1200


class OocError(Exception):
    """Base of every error that is the user's to act upon. The message is one readable line."""

    def __init__(self, message: str) -> None:
        if len(message) > _MOST_CHARACTERS:  # a name or a value of a damaged file
            message = f"{message[: _MOST_CHARACTERS * 2 // 3]} […] {message[-_MOST_CHARACTERS // 3 :]}"
        super().__init__(message)


class OptionError(OocError):
    """An option has an invalid value."""


class SourceError(OocError):
    """The input of a conversion is missing, damaged or inconsistent."""


class StoreError(OocError):
    """A converted store, or a file of it, cannot be used."""


class BudgetError(OocError):
    """The work does not fit the memory or disk it is allowed."""


class ModelError(OocError):
    """A model, loss or optimizer cannot be run exactly; the message names it and says why. ``place``: the line of the
    model's code that it is about, if the message names one."""

    place = ""


class HardwareError(OocError):
    """A description of a machine cannot be used; the message names the file and the entry."""


class SpillError(OocError):
    """Reading or writing scratch data failed; the message names matrix, file and offset. ``is_unanswered``: threads
    still wait for the disk, and the interpreter would wait for them at its end, unless it ends by ``os._exit``."""

    def __init__(self, message: str, *, is_unanswered: bool = False) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


class TrainingError(OocError):
    """The loss or the weights are not finite any more (the message names the epoch), or a trainer was used while at
    work or after it was closed."""


class RunError(OocError):
    """A run folder cannot be created, read or resumed."""


class RankError(OocError):
    """A process of a training has failed, is gone or does not answer; the message names it, if known. ``is_told``: it
    has failed and reports the reason itself."""

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told


@contextmanager
def as_error(kind: type[OocError], what: object) -> Iterator[None]:
    """A context that turns the system's refusal into an error of ``kind``, which says what was refused, of ``what``,
    and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error
