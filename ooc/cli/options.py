# SPDX-License-Identifier: Apache-2.0
"""Types of option values. Text becomes a number here and nowhere else."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ooc.errors import OptionError
from ooc.sizes import parse_size

if TYPE_CHECKING:
    _IntType = click.ParamType[int]
else:  # generic only in newer versions of click
    _IntType = click.ParamType


class SizeType(_IntType):
    """Bytes: ``800M``, ``40G``, ``512GiB``."""

    name = "size"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        label = param.opts[-1] if param is not None else "size"
        try:
            return parse_size(value, name=label, zero=self._zero)
        except OptionError as error:
            raise click.UsageError(str(error), ctx) from error


class RealType(click.FloatRange):
    """A finite number in a range; click itself lets ``nan`` pass any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings. ``groups`` gives each heading its options' names."""

    groups: Mapping[str, Sequence[str]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {option.name: option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        for heading, names in self.groups.items():
            self._format_group(heading, [left.pop(name) for name in names if name in left], ctx, formatter)
        self._format_group("Other options", list(left.values()), ctx, formatter)

    @staticmethod
    def _format_group(
        heading: str, parameters: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """One heading with what is under it; nothing where nothing is."""
        records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


SIZE = SizeType()
SIZE_OR_ZERO = SizeType(zero=True)
PROBABILITY = RealType(min=0.0, max=1.0, max_open=True)
FRACTION = RealType(min=0.0, max=1.0)
PROPER_FRACTION = RealType(min=0.0, max=1.0, min_open=True, max_open=True)
POSITIVE = RealType(min=0.0, min_open=True)
NON_NEGATIVE = RealType(min=0.0)
COUNT = click.IntRange(min=1)
WIDTH = click.IntRange(min=1, max=2**20)
COUNT_OR_ZERO = click.IntRange(min=0)
