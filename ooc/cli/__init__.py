# SPDX-License-Identifier: Apache-2.0
"""The ``ooc`` command: entry point, subcommand lookup, and the reporting of errors.

Each subcommand has a module of its own, imported only when it is called, because ``ooc --help`` must be quick. Every
error that the user can act upon ends here as one line and exit code 2.
"""

import errno
import gc
import importlib
import io
import json
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ooc import __version__
from ooc.cli.arguments.options import option_names
from ooc.cli.imports import import_lazily
from ooc.errors import OocError, OptionError, SpillError
from ooc.interruption import interruptible
from ooc.suggestions import did_you_mean

COMMANDS = (
    "convert",
    "reorder",
    "info",
    "verify",
    "plan",
    "train",
    "report",
    "predict",
    "export",
    "runs",
    "profile",
    "doctor",
    "completion",
)
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""The exit code when the reader of our output has gone: what a shell reports for a program that SIGPIPE ends."""
_ARGUMENT = re.compile(r"\b([a-z]+(?:_[a-z]+)*)=('[^']*'|[\w.]+)?")
_COLUMN = re.compile(r"columns=\{(['\"])(.*?)\1: '(.+?)'\}")
_RENAMED_ARGUMENTS = {"download=True": "--yes", "drop_duplicates=False": "--duplicates keep"}
_VARIABLE_PREFIX = "OOC"
"""The prefix of the environment variables that set options."""
_STARTUP_GC_THRESHOLD = 100_000
_DEFAULT_GC_THRESHOLD = 700
_NULL_HANDLER = logging.NullHandler()


class _Commands(click.Group):
    """The command group that finds each subcommand by its name, as ``command`` in the module ``ooc.cli.NAME``."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return load_command(name) if name in COMMANDS else None

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        command = self.get_command(context, name)
        if command is None:
            raise click.UsageError(f"there is no command {name}{did_you_mean(name, COMMANDS)}", context)
        _check_environment(name, command)
        return name, command, arguments[1:]

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except OocError as error:
            name = context.invoked_subcommand
            command = None if name is None else self.get_command(context, name)
            raise click.ClickException(as_command_options(str(error), command)) from error
        except BrokenPipeError:
            # The reader of our output has gone, as in `ooc info STORE | head -1`. Flushing at exit must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            context.exit(EXIT_BROKEN_PIPE)


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ooc")
@click.pass_context
def cli(context: click.Context, /) -> None:
    """Train graph neural networks exactly, on the whole graph, beyond the size of memory.

    Sizes are written as 800M, 40G (10⁶, 10⁹ bytes) or 512GiB (2³⁰). Options that are not on the command line come
    from the environment (OOC_TRAIN_MEMORY=8G), then from the file that --config names.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def print_json(value: dict[str, Any]) -> None:
    """Print ``value`` as one JSON object, for programs to read."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def load_command(name: str) -> click.Command:
    """Return the subcommand ``name``, with environment variables ``OOC_NAME_OPTION`` accepted for its options."""
    command = importlib.import_module(f"ooc.cli.{name}").command
    assert isinstance(command, click.Command)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.envvar is None:
            parameter.envvar = [_variable_name(name, option) for option in option_names(parameter)]
    return command


def _variable_name(command: str, option: str) -> str:
    return f"{_VARIABLE_PREFIX}_{command}_{option}".upper().replace("-", "_")


def _check_environment(name: str, command: click.Command) -> None:
    """Raise OptionError for an ``OOC_NAME_…`` environment variable that names no option of the command ``name``."""
    known = {variable for parameter in command.params for variable in parameter.envvar or ()}
    for variable in sorted(os.environ.keys() - known):
        if variable.startswith(_variable_name(name, "")):
            hint = did_you_mean(variable, known)
            raise OptionError(f"{variable} is set in the environment, but ooc {name} has no such option{hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ooc`` with ``arguments`` (by default those of this process) and return the exit code."""
    _prepare_streams()
    import_lazily()
    given, often = sys.argv[1:] if arguments is None else list(arguments), gc.get_threshold()
    try:
        # Imports and a plan make hundreds of thousands of objects, none of them garbage: collect rarely.
        gc.set_threshold(_STARTUP_GC_THRESHOLD, *often[1:])
        with interruptible(), _warnings_as_lines():
            code = cli.main(args=given, prog_name="ooc", standalone_mode=False, obj=given)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "ooc"
        return _fail(f"{error.format_message()}{_source_clause(error)} (see {where} --help)")
    except click.ClickException as error:
        code = _fail(error.format_message())
        if _is_unanswered(error):
            sys.stdout.flush()
            os._exit(code)  # otherwise the interpreter waits for threads that wait for the disk
        return code
    except (click.Abort, KeyboardInterrupt):
        click.echo("ooc: interrupted", err=True)
        return EXIT_INTERRUPTED
    except OSError as error:
        return _fail(describe_os_error(error))
    except MemoryError:
        return _fail("out of memory; give a smaller --memory")
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        warnings.filterwarnings("ignore", message=r"coroutine .* was never awaited")  # from zarr
        return _fail("the system allows no more threads (ulimit -u, or a limit of its container)")
    finally:
        gc.set_threshold(*often)
    return code if isinstance(code, int) else 0


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each distinct Python warning once, as one line without its source location, and only in the first rank."""
    told, is_first = set[str](), os.environ.get("RANK", "0") == "0"

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in told and is_first:
            told.add(text)
            click.echo(f"ooc: warning: {text}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def restore_garbage_collection() -> None:
    """Restore usual garbage collection before a model runs: budgets do not count tensors left in reference cycles."""
    gc.set_threshold(_DEFAULT_GC_THRESHOLD)


def _is_unanswered(error: BaseException | None) -> bool:
    """Whether ``error``, or an error that caused it, says that a disk does not answer."""
    while error is not None and not (isinstance(error, SpillError) and error.is_unanswered):
        error = None if error.__cause__ is error else error.__cause__
    return error is not None


def _source_clause(error: click.UsageError) -> str:
    """Return a clause that names the environment variable a bad value came from; empty for the command line."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    if error.ctx.get_parameter_source(str(error.param.name)) is not ParameterSource.ENVIRONMENT:
        return ""
    variable = next(name for name in error.param.envvar or () if os.environ.get(name))
    return f", as {variable} in the environment says"


def as_command_options(message: str, command: click.Command | None) -> str:
    """Rewrite the Python arguments in an error message as the matching options of ``command``."""
    parameters = [] if command is None else command.params
    names = {one.name: one.opts[0] for one in parameters if isinstance(one, click.Option)}
    if names.get("host_budget") == "--memory":  # the command has only one kind of memory
        message = message.replace("host budget", "memory")

    def option(found: re.Match[str]) -> str:
        if found[0] in _RENAMED_ARGUMENTS:
            return _RENAMED_ARGUMENTS[found[0]]
        name, value = found[1], found[2]
        if name not in names:
            return found[0]
        return names[name] + ("" if value in (None, "True") else " " + value.strip("'"))

    message = _COLUMN.sub(lambda found: f"--column {shlex.quote(f'{found[2]}={found[3]}')}", message)
    return _ARGUMENT.sub(option, message)


def describe_os_error(error: OSError) -> str:
    """Return a one-line description of ``error``, with the file's name where the system gave one."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        reason = "the disk is full"
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([" → ".join(names), reason]) if names else reason


def _fail(message: str) -> int:
    click.echo("ooc: error: " + " ".join(message.split()), err=True)
    return EXIT_ERROR


# ---- standard streams --------------------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Replace closed standard streams, and let a stream that is not UTF-8 print characters it lacks as ``\\uXXXX``."""
    # Otherwise the next opened file gets the number of a closed stream, and libraries print into that file.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number is taken
        os.set_inheritable(opened, True)
    os.close(opened)
    logging.getLogger("concurrent.futures").addHandler(_NULL_HANDLER)  # threads' errors are reported by their waiters
    for name in ("stdout", "stderr"):
        # Python has None for a stream that was closed at its start; discard what is written to such a stream.
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (to the end)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)
