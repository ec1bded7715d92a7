# SPDX-License-Identifier: Apache-2.0
"""The one error tree. The command line prints any of these as one line and exits with code 2.

Messages speak of Python's arguments: ``give host_budget='2.1G'``, ``force=True``, ``another spill_dir=``. ``ooc.cli``
writes those that are options of the command that runs as such: ``--host-budget 2.1G``, ``--force``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_MOST_CHARACTERS = 1200


class OocError(Exception):
    """Base of every error that is the user's to act upon. The message is one line, of a length that can be read."""

    def __init__(self, message: str) -> None:
        if len(message) > _MOST_CHARACTERS:  # a name or a value of a damaged file
            message = f"{message[: _MOST_CHARACTERS * 2 // 3]} […] {message[-_MOST_CHARACTERS // 3 :]}"
        super().__init__(message)


class OptionError(OocError):
    """An option's value makes no sense."""


class SourceError(OocError):
    """What is to be converted is missing, damaged or inconsistent."""


class StoreError(OocError):
    """A converted store, or a file of it, cannot be used."""


class BudgetError(OocError):
    """The work does not fit the memory or disk it is allowed."""


class ModelError(OocError):
    """A model, loss or optimizer that cannot be run exactly; the message names it and says why. ``place``: the line of
    the model's code that it is about, if the message names one."""

    place = ""


class HardwareError(OocError):
    """A description of a machine cannot be used; the message names the file and the entry."""


class SpillError(OocError):
    """Reading or writing scratch data failed; the message names matrix, file and offset. ``is_unanswered``: threads
    still wait for the disk, and the interpreter would wait for them at its end, unless that is ``os._exit``."""

    def __init__(self, message: str, *, is_unanswered: bool = False) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


class TrainingError(OocError):
    """The loss or the weights are no finite numbers any more (the message names the epoch), or a trainer is asked for
    something while it is at work, or has been closed."""


class RunError(OocError):
    """A run folder cannot be created, read or resumed."""


class RankError(OocError):
    """A process of a training has failed, gone or does not answer; the message names it, where it is known.
    ``is_told``: it has failed and says why itself."""

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told


@contextmanager
def as_error(kind: type[OocError], what: object) -> Iterator[None]:
    """Where the system refuses something within, an error of that ``kind`` says of ``what`` it does, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error
