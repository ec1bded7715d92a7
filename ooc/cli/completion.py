# SPDX-License-Identifier: Apache-2.0
"""``ooc completion``: print the script with which a shell completes commands, options and values."""

import click
from click.shell_completion import get_completion_class

from ooc.cli.arguments.options import ChoiceType


@click.command(short_help="Print what makes a shell complete ooc's commands.")
@click.argument("shell", type=ChoiceType("bash", "zsh", "fish"))
def command(shell: str) -> None:
    """Print the script by which SHELL completes commands, options and their values with the tab key.

    \b
    bash:  ooc completion bash >> ~/.bashrc
    zsh:   ooc completion zsh >> ~/.zshrc
    fish:  ooc completion fish > ~/.config/fish/completions/ooc.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(click.get_current_context().find_root().command, {}, "ooc", "_OOC_COMPLETE").source())
