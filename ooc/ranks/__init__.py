# SPDX-License-Identifier: Apache-2.0
"""The processes of one training: ``group`` (their communication, and whether they are alive), ``steps`` (what they add
up after each batch)."""

from ooc.ranks.group import ALONE, Ranks
from ooc.ranks.steps import RunningStatistics, StepSum

__all__ = ["ALONE", "Ranks", "RunningStatistics", "StepSum"]
