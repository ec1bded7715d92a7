# SPDX-License-Identifier: Apache-2.0
"""The processes of one training: group (what they tell each other, and whether they are alive), steps (what is added
up after each of their batches)."""

from ooc.ranks.group import ALONE, Ranks
from ooc.ranks.steps import RunningStatistics, StepSum

__all__ = ["ALONE", "Ranks", "RunningStatistics", "StepSum"]
