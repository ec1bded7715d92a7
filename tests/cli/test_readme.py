# SPDX-License-Identifier: Apache-2.0
"""What README.md shows can be run as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from ooc import cli

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (ooc .*)$", README.replace("\\\n", " "), re.MULTILINE)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_understood(words: list[str]) -> None:
    command = cli.cli.get_command(cli.cli.make_context("ooc", ["--help"], resilient_parsing=True), words[1])
    assert command is not None
    command.make_context(words[1], words[2:])


def test_every_option_of_training_is_in_its_table() -> None:
    from ooc.cli.train import command

    listed = {
        name for row in re.findall(r"^\| (`--.*?) \|", README, re.MULTILINE) for name in re.findall(r"--[\w-]+", row)
    }
    assert listed == {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_every_command_is_listed() -> None:
    assert set(re.findall(r"`ooc (\w+) ", README)) >= set(cli.COMMANDS)


def test_files_it_names_exist() -> None:
    named = re.findall(r"`((?:ooc|tools)/[\w/.]+)[` ]", README) + re.findall(r"\]\(([^)]+)\)", README)
    assert len(named) > 10
    assert [name for name in named if not (CHECKOUT / name).exists()] == []


def test_the_accuracies_come_from_the_recipe_shown() -> None:
    [recipe] = re.findall(r'RECIPE = \(\s*"(.*)"\s*\)', (CHECKOUT / "tools/bench_accuracy").read_text())
    assert ["ooc", "train", "cora.ooc", "--model", "gcn", *shlex.split(recipe)] in COMMANDS


def test_the_python_example_runs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    out = capfd.readouterr().out
    assert out.count("\n") == 6 and "valid_acc" in out
    assert (here / "model.pt").exists()
