# SPDX-License-Identifier: Apache-2.0
"""Types of option values. Text becomes a number here and nowhere else."""

import math
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

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        label = param.opts[-1] if param is not None else "size"
        try:
            return parse_size(value, name=label)
        except OptionError as error:
            raise click.UsageError(str(error), ctx) from error


class RealType(click.FloatRange):
    """A finite number in a range; click itself lets ``nan`` pass any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


SIZE = SizeType()
PROBABILITY = RealType(min=0.0, max=1.0, max_open=True)
POSITIVE = RealType(min=0.0, min_open=True)
NON_NEGATIVE = RealType(min=0.0)
COUNT = click.IntRange(min=1)
WIDTH = click.IntRange(min=1, max=2**20)
COUNT_OR_ZERO = click.IntRange(min=0)
