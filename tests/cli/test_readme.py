# SPDX-License-Identifier: Apache-2.0
"""What README.md shows can be run as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from ooc import cli

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (ooc .*)$", README.replace("\\\n", " "), re.MULTILINE)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_understood(words: list[str]) -> None:
    command = cli.cli.get_command(cli.cli.make_context("ooc", ["--help"], resilient_parsing=True), words[1])
    assert command is not None
    command.make_context(words[1], words[2:])


def test_the_python_example_runs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    out = capfd.readouterr().out
    assert out.count("\n") == 6 and "valid_acc" in out
    assert (here / "model.pt").exists()
