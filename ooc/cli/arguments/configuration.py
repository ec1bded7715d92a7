# SPDX-License-Identifier: Apache-2.0
"""``--config FILE``: options of commands from a TOML file with one table for each command.

    [train]
    store = "big.ooc"
    model = "sage"
    gpu-budget = "8G"

Keys are the names of options and arguments; values are written as on the command line. They replace defaults: the
command line and the environment take precedence. Paths are relative to the file's folder.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ooc.cli import COMMANDS, load_command
from ooc.cli.arguments.options import Option, option_names
from ooc.cli.arguments.settings import user_model_of
from ooc.errors import OptionError
from ooc.suggestions import did_you_mean, did_you_mean_path

_ALSO_READ = {"plan": "train"}
"""By command, another command whose table it also reads, for the options that both have."""
_NOT_IN_FILES = frozenset(("config", "help", "list", "resume"))


def as_toml(command: str, values: Mapping[str, Any], *, heading: str) -> str:
    """Return the TOML text of a configuration with the parameter values of ``command`` that are not None."""
    import tomli_w

    table = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return f"# {heading}\n{tomli_w.dumps({command: table})}"


def read_configuration(path: Path, command: str) -> dict[str, Any]:
    """Return the values that the file at ``path`` sets for ``command``, by parameter name, as click takes defaults.

    OptionError names the file and the mistake. Of other commands' tables only the names are checked.
    """
    tables = _read_tables(path)
    names = {key: str(parameter.name) for key, parameter in _parameters(command).items()}
    found: dict[str, Any] = {}
    for section in (_ALSO_READ.get(command), command):
        if section in tables:
            entries = dict(_checked_entries(path, section, tables[section]))
            found |= {names[key]: value for key, value in entries.items() if key in names}
    return found


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror or error}{did_you_mean_path(path)}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise OptionError(f"--config {path}: {error}") from error
    for name, table in tables.items():
        if name not in COMMANDS:
            if not isinstance(table, dict):
                raise OptionError(f"{path}: {name} stands in no table; write it below the command's, such as [train]")
            raise OptionError(f"{path}: there is no command {name}{did_you_mean(name, COMMANDS)}")
        if not isinstance(table, dict):
            raise OptionError(f"{path}: {name} is a command, whose options stand below [{name}]")
    return tables


def _checked_entries(path: Path, section: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the table's entries, checked, as pairs of option name and value."""
    parameters = _parameters(section)
    known = [key for key in parameters if key not in _NOT_IN_FILES]
    for written, value in table.items():
        key = written.replace("_", "-")
        if key not in known:
            raise OptionError(f"{path}, [{section}]: there is no option {written}{did_you_mean(key, known)}")
        yield key, _check_entry(parameters[key], value, path, f"{path}, [{section}]: {written}")


def _check_entry(parameter: click.Parameter, value: Any, path: Path, where: str) -> Any:
    """Return ``value`` checked, as the text that the command line would have; so 2.7 and true are no valid counts."""
    if isinstance(value, bool) and parameter.type is click.BOOL:
        return value
    several = parameter.multiple or parameter.nargs != 1
    if isinstance(value, list) != several and not (several and isinstance(value, str)):
        raise OptionError(f"{where} is {'a list of values' if several else 'one value'}, not {value!r}")
    texts = [_entry_text(parameter, item, path, where) for item in (value if isinstance(value, list) else [value])]
    try:
        for text in texts:
            parameter.type.convert(text, parameter, None)
    except click.UsageError as error:
        raise OptionError(f"{where}: {error.message}") from error
    return texts if several else texts[0]


def _entry_text(parameter: click.Parameter, value: Any, path: Path, where: str) -> str:
    if isinstance(value, dict | list):
        raise OptionError(f"{where} cannot be {value!r}")
    text = str(value)
    is_path = isinstance(parameter.type, click.Path)
    may_be_path = parameter.name == "source" or (isinstance(parameter.metavar, str) and "FILE" in parameter.metavar)
    own = user_model_of(text) if parameter.name == "model" else None
    if own is not None:
        return f"{path.parent / own[0].expanduser()}:{own[1]}"
    beside = path.parent / Path(text).expanduser()
    return str(beside) if is_path or (may_be_path and beside.exists()) else text


def _parameters(command: str) -> dict[str, click.Parameter]:
    """Return the command's options, by each of their names, and its arguments."""
    found: dict[str, click.Parameter] = {}
    for parameter in load_command(command).params:
        names = option_names(parameter) if isinstance(parameter, click.Option) else [str(parameter.name)]
        found |= dict.fromkeys(names, parameter)
    return found


def _apply_configuration(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is not None and not context.resilient_parsing:
        context.default_map = read_configuration(path, str(context.info_name))


def config_option(group: str = "") -> Option:
    """Return the ``--config`` option, listed under the heading ``group`` in the help of a command with headings."""
    return Option(
        ["--config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_apply_configuration,
        help="Take options from this TOML file, but for those that are given otherwise.",
        group=group,
    )
