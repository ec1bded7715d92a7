# SPDX-License-Identifier: Apache-2.0
"""Names of ``ooc.progress`` where they were."""

from ooc.progress.figures import LINE_WIDTH as LINE_WIDTH
from ooc.progress.figures import format_count as format_count
from ooc.progress.figures import format_duration as format_duration
from ooc.progress.figures import format_epoch as format_epoch
from ooc.progress.figures import format_progress as format_progress
from ooc.progress.figures import format_rate as format_rate
from ooc.progress.figures import format_scores as format_scores
from ooc.progress.reporter import Reporter as Reporter
