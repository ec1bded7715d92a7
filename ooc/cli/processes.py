# SPDX-License-Identifier: Apache-2.0
"""``ooc train --nproc``: the same command by several processes, as ``torchrun`` starts them."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from ooc.cli import EXIT_ERROR, EXIT_INTERRUPTED, describe_os_error
from ooc.errors import OocError, RankError, TrainingError

if TYPE_CHECKING:
    from ooc.ranks import Ranks

_STARTING = timedelta(minutes=2)
"""How long all processes may take to start."""


def ranks_of_environment() -> "Ranks | None":
    """The processes that this one belongs to; None where it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # who has gone is said in a line of our own
    from ooc.ranks import Ranks

    return Ranks.of_environment(_STARTING)


def is_first(ranks: "Ranks | None") -> bool:
    """Whether this process is the one that prints and writes."""
    return ranks is None or ranks.rank == 0


@contextmanager
def silent_where_told(context: click.Context, ranks: "Ranks | None") -> Iterator[None]:
    """Where another process has failed and says why, this one ends as it does and says nothing; so do all but the first
    where all find the same, as a loss that is no number. Others than the first say who they are."""
    try:
        yield
    except (RankError, TrainingError) as error:
        is_told = error.is_told if isinstance(error, RankError) else not is_first(ranks)
        if not is_told:
            raise
        context.exit(EXIT_ERROR)
    except BaseException as error:
        if ranks is not None:
            ranks.failed()
            if ranks.rank and isinstance(error, OocError | OSError):
                why = describe_os_error(error) if isinstance(error, OSError) else str(error)
                raise OocError(f"rank {ranks.rank}: {why}") from error
        raise


def is_restarted() -> bool:
    """Whether ``torchrun --max-restarts`` has started this process because an earlier one failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def start_processes(count: int, arguments: Sequence[str]) -> int:
    """Run ``ooc`` with these arguments by ``count`` processes; the exit code that theirs come to."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # torch's lines about processes that end
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="ooc",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "ooc", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)  # it has said why
        name = signal.Signals(-failure.exitcode).name
        hint = "a run that has finished an epoch goes on with --resume"
        click.echo(f"ooc: error: rank {rank} was ended by {name}; {hint}", err=True)
        return EXIT_ERROR
    except (SignalException, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return 0
