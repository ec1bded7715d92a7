# SPDX-License-Identifier: Apache-2.0
"""Types of option values: the only place where text becomes numbers, and options shared by several commands."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ooc.errors import OptionError
from ooc.progress.reporter import Verbosity
from ooc.sizes import parse_size
from ooc.suggestions import did_you_mean

if TYPE_CHECKING:
    _AnyType = click.ParamType[Any]
    _TextChoice = click.Choice[str]
else:  # generic only in newer versions of click
    _AnyType, _TextChoice = click.ParamType, click.Choice

HIGHEST_SEED = 2**63 - 1
_MOST_SEEDS = 1000
"""The most seeds that ``--seeds N`` starts; a larger N is taken for a mistyped ``--seed``."""
_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class SizeType(_AnyType):
    """An option value in bytes: ``800M``, ``40G``, ``512GiB``."""

    name = "size"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        label = param.opts[-1] if param is not None else "size"
        try:
            return parse_size(value, name=label, zero=self._zero)
        except OptionError as error:
            raise _SizeError(str(error), ctx, param) from error


class _SizeError(click.BadParameter):
    """A usage error whose message already names the option."""

    def format_message(self) -> str:
        return self.message


_NONE: Mapping[str, str] = {}
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class ChoiceType(_TextChoice):
    """An option value that is one of several names, in any case; number types may be abbreviated, as ``bf16``.

    For an unknown name the error proposes the most similar one. ``also`` returns the value for any other accepted text,
    else None. ``refused`` maps names that cannot be chosen to the reasons.
    """

    def __init__(
        self, *names: str, also: Callable[[str], str | None] = lambda text: None, refused: Mapping[str, str] = _NONE
    ) -> None:
        super().__init__(names, case_sensitive=False)
        self._also = also
        self._refused = {name.casefold(): f"{name} {reason}" for name, reason in refused.items()}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).casefold() in self._refused:
            self.fail(self._refused[str(value).casefold()], param, ctx)
        if isinstance(value, str) and (found := self._also(value)) is not None:
            return found
        try:
            return str(super().convert(_DTYPE_ALIASES.get(str(value).lower(), value), param, ctx))
        except click.BadParameter as error:
            message = error.message.removesuffix(".") + did_you_mean(str(value), self.choices)
            raise click.BadParameter(message, ctx, param) from error


def hits(text: str) -> str | None:
    """Return ``text`` in standard form if it is ``hits@K`` with a whole K above 0, else None."""
    kind, _, number = text.lower().partition("@")
    return f"hits@{int(number)}" if kind == "hits" and number.isdecimal() and int(number) else None


def class_weights(text: str) -> str | None:
    """Return ``text`` if it lists one weight for each class, as ``1,2.5``, else None."""
    for part in text.split(",") if "," in text else ():
        NON_NEGATIVE.convert(part, None, None)
    return text if "," in text else None


class ReadType(_AnyType):
    """An option value converted by ``read``, which raises ValueError with the reason for a wrong value."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_edge_type(value: Any) -> str:
    if len(parts := str(value).split(",")) != 3 or not all(parts):
        raise ValueError(f"{str(value)!r} is not of the form SOURCE,RELATION,TARGET")
    return str(value)


def _parse_assignment(value: Any) -> str:
    """Return ``value``, checked to be KEY=VALUE, as text; the code that has such a key checks its value."""
    key, equals, content = value.partition("=")
    if not (key.isidentifier() and equals and content):
        raise ValueError(f"{value!r} is not of the form KEY=VALUE")
    return str(value)


def _parse_columns(value: Any) -> int | str:
    """Return a number of columns, or text such as ``author=64,topic=32``, with one for each node type, unchanged."""
    if not isinstance(value, str) or "=" not in value:
        return COUNT_OR_ZERO.convert(value, None, None)  # type: ignore[arg-type]  # a text, too
    parts = [part.rpartition("=") for part in value.split(",")]
    if len({name for name, _, _ in parts if name}) < len(parts):
        raise ValueError(f"{value!r} is not of the form TYPE=COLUMNS,…, each type once")
    for _, _, columns in parts:
        COUNT.convert(columns, None, None)  # type: ignore[arg-type]
    return value


def _parse_path_edges(value: Any) -> int:
    """Return the number of edges in a path, or of hops: 0, 2 or 3."""
    edges = COUNT_OR_ZERO.convert(value, None, None)
    if edges not in (0, 2, 3):
        raise ValueError(f"{value} is none of 2, 3, and 0 for none")
    return edges


def _parse_fanouts(value: Any) -> str:
    """Return ``value``, a list of fanouts such as ``15,10,-1``, one for each hop, as checked text."""
    try:
        numbers = [int(part) for part in str(value).split(",")]
    except ValueError:
        raise ValueError(f"{value!r} is no list of whole numbers, such as 15,10,5") from None
    if any(number < -1 or number == 0 for number in numbers):
        raise ValueError(f"{value!r}: a hop draws at least 1 neighbour, or -1, which is all")
    return ",".join(map(str, numbers))


def _parse_seeds(value: Any) -> tuple[int, ...]:
    """Return the seeds that ``value`` means: 0 to 4 for ``5``, those listed for ``0,3,7``, and 3 alone for ``3,``."""
    listed = "," in value
    try:
        numbers = [int(part) for part in value.split(",") if part.strip() or not listed]
    except ValueError:
        raise ValueError(f"{value!r} is neither how many, such as 5, nor seeds, such as 0,3,7") from None
    if not listed and not 1 <= numbers[0] <= _MOST_SEEDS:
        hint = f"; for one training by that seed give --seed {value}" if numbers[0] > _MOST_SEEDS else ""
        raise ValueError(f"{value} is not in the range 1 to {_MOST_SEEDS}{hint}")
    if not numbers or not all(0 <= number <= HIGHEST_SEED for number in numbers):
        raise ValueError(f"{value!r}: seeds are whole numbers from 0 on")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{value!r} has a seed twice")
    return tuple(numbers) if listed else tuple(range(numbers[0]))


class WholeType(click.IntRange):
    """An option value that is a whole number in a range."""

    name = "whole number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N"


class RealType(click.FloatRange):
    """An option value that is a finite number in a range; click itself lets ``nan`` pass any range."""

    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_OTHER_GROUP = "Other options"


def option_names(option: click.Option) -> list[str]:
    """Return the option's long names without dashes, such as ``gpu-budget``."""
    return [name.removeprefix("--") for name in option.opts if name.startswith("--")]


class Option(click.Option):
    """An option listed under the heading ``group`` in its command's help."""

    def __init__(self, *arguments: Any, group: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return click's notes on the default, but not on the range, which the error for a number outside it states."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class GroupedCommand(click.Command):
    """A command whose help lists options under their headings, in the order in which the headings occur."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                groups.setdefault(option.group if isinstance(option, Option) else _OTHER_GROUP, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def choice_option(flag: str, *names: str, help: str) -> Callable[[_Callback], _Callback]:
    """Return an option whose value is one of ``names``, by default the first."""
    return click.option(flag, type=ChoiceType(*names), default=names[0], show_default=True, help=help)


SIZE = SizeType()
SIZE_OR_ZERO = SizeType(zero=True)
PROBABILITY = RealType(min=0.0, max=1.0, max_open=True)
FRACTION = RealType(min=0.0, max=1.0)
PROPER_FRACTION = RealType(min=0.0, max=1.0, min_open=True, max_open=True)
POSITIVE = RealType(min=0.0, min_open=True)
NON_NEGATIVE = RealType(min=0.0)
COUNT = WholeType(min=1)
WIDTH = WholeType(min=1, max=2**20)
COUNT_OR_ZERO = WholeType(min=0)
EDGE_TYPE = ReadType("edge type", _parse_edge_type)
ASSIGNMENT = ReadType("KEY=VALUE", _parse_assignment)
COLUMNS = ReadType("columns", _parse_columns)
FANOUTS = ReadType("fanouts", _parse_fanouts)
PATHS = ReadType("N", _parse_path_edges)
SEEDS = ReadType("seeds", _parse_seeds)

HOST_BUDGET = click.option(
    "--memory",
    "--host-budget",
    "host_budget",
    type=SIZE,
    metavar="SIZE",
    help="RAM to work in. [default: half of what is free]",
)
FORCE = click.option("--force", is_flag=True, help="Replace OUT when it exists.")
ON_CANCEL = choice_option(
    "--on-cancel", "keep", "remove", help="What Ctrl-C does with the work so far. Kept, the same command goes on."
)
WEIGHTS = choice_option("--weights", "best", "last", help="Which of the run's weights.")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines for people.")


# ---- how much is shown -------------------------------------------------------------------------------------------


def _resolve_verbosity(context: click.Context, parameter: click.Parameter, level: str | None) -> Verbosity:
    """Return the verbosity that the options ask for, the flags being read already; UsageError where they disagree."""
    short = {"quiet": Verbosity.ERROR, "verbose": Verbosity.DEBUG}
    asked = {f"--{name}": of_flag for name, of_flag in short.items() if context.params.pop(name)}
    asked |= {} if level is None else {f"{parameter.opts[0]} {level}": Verbosity[level.upper()]}
    if len({*asked.values()}) > 1:
        raise click.UsageError(f"{' and '.join(asked)}: give one of them", context)
    return next(iter(asked.values()), Verbosity.INFO)


_FLAG: dict[str, Any] = {"is_flag": True, "is_eager": True}
_VERBOSITY: tuple[tuple[list[str], dict[str, Any]], ...] = (
    (["--quiet", "-q"], {"help": "Print results and errors only.", **_FLAG}),
    (["--verbose", "-v"], {"help": "Print all there is to know.", **_FLAG}),
    (
        ["--log-level", "verbosity"],
        {
            "type": ChoiceType(*(level.name.lower() for level in Verbosity)),
            "callback": _resolve_verbosity,
            "help": "How much to print: as --quiet, notes too, progress too, as --verbose. [default: info]",
        },
    ),
)


def verbosity_options(group: str) -> list[Option]:
    """Return ``--quiet``, ``--verbose`` and ``--log-level``, which set the command's one parameter ``verbosity``."""
    return [Option(names, group=group, **attributes) for names, attributes in _VERBOSITY]


def with_verbosity(command: _Callback) -> _Callback:
    """Add ``--quiet``, ``--verbose`` and ``--log-level`` to a command."""
    for names, attributes in reversed(_VERBOSITY):
        command = click.option(*names, **attributes)(command)
    return command
