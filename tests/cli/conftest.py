# SPDX-License-Identifier: Apache-2.0
"""A small store, and the command run in this process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch_geometric.nn  # noqa: F401  (which warns where it is read first, which would be in a command then)

from ooc import cli
from tests.processes import fork

RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 2,500 nodes in two classes, in a folder of its own."""
    store = tmp_path_factory.mktemp("graph") / "graph.ooc"
    source = "synthetic:nodes=2500,edges=15000,features=12,classes=2,seed=5"
    assert cli.main(["convert", source, str(store), "--quiet"]) == 0
    return store


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> RunCommand:
    """``run("info", "x.ooc")`` gives exit code, standard output and standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        threads = torch.get_num_threads()
        code = cli.main([str(argument) for argument in arguments])
        torch.set_num_threads(threads)  # --threads is of one command, not of the tests after it
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def forked(work: Callable[[], int]) -> int:
    """The id of a process, forked here, which has read all that it wants; what ``work`` gives is its exit code."""
    process = fork()
    if process == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return process


def exit_code(process: int) -> int:
    """Waited for; minus the signal that has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """An empty current folder."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)
