# SPDX-License-Identifier: Apache-2.0
"""Suggestions for misspelt names, and checks of arguments."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral, Number
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, get_origin

from ooc.errors import OptionError

_CANDIDATES = 5
_LIKE = 0.6
"""How similar a name must be, from 0 to 1, in difflib's measure (its own default)."""
_OF_OPTIMIZERS = ("lr", "learning_rate", "weight_decay", "betas", "momentum")
_PLAIN = {str, Path, NoneType, Callable, Mapping, Sequence}
_P = ParamSpec("_P")
_R = TypeVar("_R")


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that begins with ``word``, or is most similar, ignoring case; None if none is."""
    folded = {name.casefold(): name for name in known}
    wanted = word.casefold()
    begun = [name for name in folded if wanted and name.startswith(wanted)]
    found = begun or get_close_matches(wanted, folded, n=_CANDIDATES, cutoff=_LIKE)
    # Letters in the wrong order are the commonest slip, and difflib has it no nearer than a letter that is wrong.
    found.sort(key=lambda name: sorted(name) != sorted(wanted))
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean NAME?"`` to end a message with, or ""."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"


def check_choice(what: str, name: str, known: Collection[str]) -> None:
    """Raise OptionError if the ``name`` of ``what`` is not one of ``known``."""
    if name not in known:
        raise OptionError(f"{what} {name!r} is not one of {', '.join(known)}{did_you_mean(str(name), known)}")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a constructor or method to refuse, by name, unknown arguments, and arguments of another type than text,
    path, list, mapping or function if it takes one; it checks anything else itself. It gets NumPy's whole numbers as
    Python's."""
    takes = signature(function)
    kinds = {name: _kinds(one.annotation) for name, one in takes.parameters.items()}
    plain = {name: of for name, of in kinds.items() if {*of} <= _PLAIN}

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        owner = args[0] if args else None
        name = type(owner).__name__ if function.__name__ == "__init__" else function.__name__
        try:
            given = takes.bind(*args, **kwargs).arguments
        except TypeError as error:
            passes_on = any(one.kind is one.VAR_KEYWORD for one in takes.parameters.values())
            unknown = "" if passes_on else next((one for one in kwargs if one not in kinds), "")
            raise OptionError(
                f"{name} takes no {unknown}={_instead(unknown, owner, kinds)}" if unknown else f"{name}: {error}"
            ) from None
        for argument, value in given.items():
            of = plain.get(argument, (object,))
            if isinstance(value, str) and {Callable, NoneType} <= {*of}:
                continue  # an optional argument is missing, and the message needs more
            if not isinstance(value, of) or (isinstance(value, str) and Sequence in of and str not in of):
                types = " or ".join(kind.__name__ for kind in of).replace("NoneType", "None")
                said = repr(value) if isinstance(value, str | Number) else type(value).__name__
                raise OptionError(f"{argument} must be {types}, not {said}")
        whole: Any = [*map(_whole, args)], {argument: _whole(value) for argument, value in kwargs.items()}
        return function(*whole[0], **whole[1])

    return called


def _whole(value: Any) -> Any:
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    of = annotation.__args__ if isinstance(annotation, UnionType) else [annotation]
    return tuple(get_origin(one) or one for one in of)


def _instead(name: str, owner: object, known: Iterable[str]) -> str:
    """Return where an unknown argument of a method of ``owner`` belongs."""
    if name in _OF_OPTIMIZERS:
        return f"; it is the optimizer's: optimizer=torch.optim.Adam(model.parameters(), {name}=…)"
    of: Any = type(owner)
    methods = (getattr(of, method, None) for method in ("fit", "predict"))
    takes = [method.__name__ for method in methods if method is not None and name in signature(method).parameters]
    return f"; {takes[0]}({name}=…) does" if takes else did_you_mean(name, (one for one in known if one[0] != "_"))


def did_you_mean_path(path: Path) -> str:
    """As `did_you_mean`, for names beside ``path``. If its folder does not exist, suggest a folder first, and the rest
    within it."""
    found = existing = next((part for part in (path, *path.parents) if part.exists()), path)
    for name in path.relative_to(existing).parts:
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
    except OSError:  # not a folder of ours
        return []
