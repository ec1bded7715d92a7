# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong, the command says it in one line and ends with 2, without a traceback."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from ooc import cli
from ooc.errors import StoreError
from tests.cli.conftest import RunCommand


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["info"], "Missing argument 'STORE'"),
        (["info", "nowhere.ooc"], "there is no store at nowhere.ooc"),
        (["train", "--gpu-budget", "40X"], "--gpu-budget: '40X' is no size"),
        (["train", "--host-budget", "0"], "--host-budget: 0 is no size"),
        (["train", "--host-budget", "-5G"], "--host-budget: '-5G' is no size"),
        (["train", "--dropout", "nan"], "nan is not a finite number"),
        (["train", "--lr", "inf"], "inf is not a finite number"),
        (["train", "--dropout", "1.0"], "1.0 is not in the range 0.0<=x<1.0"),
        (["train", "--layers", "0"], "0 is not in the range x>=1"),
        (["train", "--hidden", "100000000"], "100000000 is not in the range 1<=x<=1048576"),
        (["train", "--model", "mlp"], "'mlp' is not one of 'gcn', 'sage'"),
        (["train"], "STORE is not given and no *.ooc is in the current folder"),
        (["train", "nowhere.ooc"], "there is no store at"),
        (["train", "--resume"], "--resume needs --out RUN"),
        (["train", "--resume", "--out", "nowhere"], "there is no run at nowhere"),
    ],
)
def test_one_line_and_exit_code_2(run: RunCommand, arguments: list[str], message: str, here: Path) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ooc: error: ") and err.count("\n") == 1 and message in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (StoreError("two\nlines"), 2, "ooc: error: two lines\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a.bin"),
            2,
            "ooc: error: a.bin: the disk is full\n",
        ),
        (OSError(errno.EACCES, "Permission denied", "a.bin"), 2, "ooc: error: a.bin: Permission denied\n"),
        (OSError("strange"), 2, "ooc: error: strange\n"),
        (MemoryError(), 2, "ooc: error: out of memory; give smaller budgets\n"),
        (KeyboardInterrupt(), 130, "\nooc: interrupted\n"),
    ],
)
def test_errors_from_within(
    run: RunCommand, error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: failing)
    assert run("failing") == (code, "", line)


def test_termination_is_an_interrupt(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    @click.command()
    def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: terminated)
    assert run("terminated") == (130, "", "\nooc: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_our_own_bugs_keep_their_traceback(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def failing() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: failing)
    with pytest.raises(AssertionError):
        run("failing")


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_help_says_what_sizes_mean_and_every_command_has_it(run: RunCommand, command: list[str]) -> None:
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage: ooc" in out
    assert "GiB" in out or command


def test_without_arguments_there_is_help(run: RunCommand) -> None:
    assert run() == run("--help")


def test_version(run: RunCommand) -> None:
    import ooc

    assert run("--version") == (0, f"ooc, version {ooc.__version__}\n", "")


def test_help_is_quick_because_it_imports_little() -> None:
    program = (
        "import sys; from ooc.cli import main; main(['train', '--help'])\n"
        "heavy = {'torch', 'numpy', 'rich', 'zarr', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin_s < 10  # a hang, not a benchmark


def test_a_closed_pipe_is_no_error() -> None:
    program = f"{sys.executable} -m ooc train --help | head -n 1"
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage") and done.stderr == ""
