# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong, the command says it in one line and ends with 2, without a traceback."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import click
import pytest

from ooc import cli, interruption
from ooc.cli import _is_unanswered
from ooc.cli.train import command as train_command
from ooc.cli.train import report_failure_once
from ooc.errors import OocError, OptionError, RankError, RunError, SpillError, StoreError
from ooc.events import Event, Note, TaskAdvanced, TaskFinished, TaskStarted
from ooc.progress.reporter import Reporter, Verbosity
from ooc.ranks import Ranks
from ooc.report.console import Output
from ooc.storage.store import open_store
from ooc.storage.verification import verify
from tests.cli.conftest import RunCommand, exit_code, forked

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command trian; did you mean train?"),
        (["info"], "Missing argument 'STORE'"),
        (["info", "nowhere.ooc"], "there is no store at nowhere.ooc"),
        (["train", "--gpu-budget", "40X"], "--gpu-budget: '40X' is no size"),
        (["train", "--host-budget", "0"], "--host-budget: 0 is no size"),
        (["train", "--host-budget", "-5G"], "--host-budget: '-5G' is no size"),
        (["train", "--dropout", "nan"], "nan is not a finite number"),
        (["train", "--lr", "inf"], "inf is not a finite number"),
        (["train", "--dropout", "1.0"], "1.0 is not in the range 0.0<=x<1.0"),
        (["train", "--layers", "0"], "0 is not in the range x>=1"),
        (["train", "--threads", "100000"], "100000 is not in the range 1<=x<=1024"),
        (["train", "--hidden", "100000000"], "100000000 is not in the range 1<=x<=1048576"),
        (["train", "--model", "mlp"], "'mlp' is not one of 'gcn', 'sage'"),
        (["train", "--model", "GNC"], "did you mean gcn?"),
        (["convert", "ogbn-arxv"], "did you mean ogbn-arxiv?"),
        (["plan", "--graph", "papers10M"], "did you mean ogbn-papers100M?"),
        (["plan", "--graph", "reddit", "--hardware", "a500"], "did you mean a5000?"),
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
        (MemoryError(), 2, "ooc: error: out of memory; give a smaller --memory\n"),
        (
            RuntimeError("can't start new thread"),
            2,
            "ooc: error: the system allows no more threads (ulimit -u, or a limit of its container)\n",
        ),
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


Interrupted = Callable[[Callable[[], None]], None]
"""Runs a command made of a function, checks that it ends as one interrupted, and that the handlers are the old ones."""


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C, which is ignored where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(run: RunCommand, heeded: None, monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    def check(body: Callable[[], None]) -> None:
        before = [signal.getsignal(number) for number in HANDLED]
        monkeypatch.setattr(cli.cli, "get_command", lambda context, name: click.command("interrupted")(body))
        assert run("interrupted") == (130, "", "\nooc: interrupted\n")
        assert [signal.getsignal(number) for number in HANDLED] == before

    return check


def test_where_no_more_threads_can_be_started_it_says_so(
    run: RunCommand, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends the threads that there are."""
    before, real = threading.active_count(), threading.Thread.start
    known = {*threading.enumerate()}

    def start(thread: threading.Thread) -> None:
        if threading.active_count() > before + 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    options = ("--memory", "40M", "--epochs", 1, "--hidden", 8, "--layers", 2, "--threads", 2)
    code, _, error = run("train", graph, "--out", tmp_path / "run", *options)
    assert code == 2 and error.splitlines()[-1].startswith("ooc: error: the system allows no more threads")
    assert {one.name for one in {*threading.enumerate()} - known} <= {"tqdm_monitor"} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", HANDLED[:2])
@pytest.mark.parametrize("event", [TaskStarted("work", 2, "parts"), TaskAdvanced("work", 1)])
def test_a_signal_ends_the_work_where_it_goes_on(interrupted: Interrupted, number: int, event: Event) -> None:
    """Not wherever the main thread happens to be, which may have taken a lock that others need."""
    passed = []

    def work() -> None:
        os.kill(os.getpid(), number)
        for _ in range(1000):
            passed.append("unharmed")
        reporter = Reporter(verbosity=Verbosity.ERROR)
        for other in (TaskFinished("work"), Note("over")):  # Also told while things are put in order.
            reporter(other)
        thread = threading.Thread(target=reporter, args=[event])
        thread.start()
        thread.join()
        passed.append("the other thread")
        reporter(event)
        passed.append("never")

    interrupted(work)
    assert passed == ["unharmed"] * 1000 + ["the other thread"]


def test_a_signal_ends_work_that_tells_nothing_soon(interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "GRACE_S", 0.2)

    def silent() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    started_s = time.monotonic()
    interrupted(silent)
    assert 0.2 <= time.monotonic() - started_s < 30


def test_asked_again_the_work_ends_at_once(interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "GRACE_S", 60.0)

    def silent() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    started_s = time.monotonic()
    interrupted(silent)
    assert time.monotonic() - started_s < 30


def test_a_signal_after_the_last_step_leaves_nothing_behind(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is done; neither the timer nor the request reaches whoever called."""

    @click.command()
    def last() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getitimer(signal.ITIMER_REAL)
    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: last)
    assert run("last") == (0, "", "")
    after = signal.getitimer(signal.ITIMER_REAL)
    assert bool(after[0]) == bool(before[0]) and after[1] == before[1]
    interruption.stop_if_asked()


def test_ignored_signals_stay_ignored(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C is for what a shell runs in the background."""

    @click.command()
    def unmoved() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        Reporter(verbosity=Verbosity.ERROR)(TaskStarted("work", 2, "parts"))

    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: unmoved)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run("unmoved") == (0, "", "")
    finally:
        signal.signal(signal.SIGINT, before)


def test_alarms_are_their_owners_until_a_signal_comes(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []

    @click.command()
    def looking() -> None:
        handlers.append(signal.getsignal(signal.SIGALRM))

    monkeypatch.setattr(cli.cli, "get_command", lambda context, name: looking)
    assert run("looking") == (0, "", "")
    assert handlers == [signal.getsignal(signal.SIGALRM)]


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
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ooc", "train", "--help"]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, check=False)
    os.close(written)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_stop_no_command(here: Path) -> None:
    """Nor do files that are written get what is printed: OUT would have the number of the closed stream."""
    convert = ["convert", "synthetic:nodes=200,edges=900,features=4,classes=2"]
    program = f"{sys.executable} -m ooc {' '.join(convert)} a.ooc <&- >&- 2>&-"
    assert subprocess.run(program, shell=True, check=False).returncode == 0
    assert not verify(open_store("a.ooc"))

    def closed(*names: str) -> int:
        numbers = [("stdin", "stdout", "stderr").index(name) for name in names]
        for number, name in zip(numbers, names, strict=True):
            os.close(number)
            setattr(sys, name, None)  # as Python has it
        code = cli.main([*convert, f"{names[0]}.ooc"]) or cli.main(["plan", f"{names[0]}.ooc"])
        null = Path(os.devnull).stat().st_rdev
        return code or int(any(os.fstat(number).st_rdev != null for number in numbers))

    for names in (("stdin",), ("stdout",), ("stderr",), ("stdout", "stdin", "stderr")):
        assert exit_code(forked(partial(closed, *names))) == 0
        store = Path(f"{names[0]}.ooc")
        assert not verify(open_store(store))
        shutil.rmtree(store)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_that_is_not_utf8_gets_what_it_can_show(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    for option in "--list", "--help":
        assert cli.main(["convert", option]) == 0
    sys.stdout.flush()
    assert b"synthetic:nodes=..." in written.getvalue()
    assert encoding == "ascii" or rb"synthetic:nodes=\u2026" in written.getvalue()  # click takes ASCII for UTF-8


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a.bin"), "rank 0: a.bin: the disk is full"),
        (SpillError("m1: a.bin: writing failed"), "rank 0: m1: a.bin: writing failed"),
        (OptionError("epochs must be positive"), "epochs must be positive"),
    ],
)
def test_where_there_are_several_the_first_says_of_files_who_it_is(error: Exception, told: str) -> None:
    with pytest.raises(OocError) as raised, report_failure_once(click.Context(train_command), Ranks(rank=0, count=2)):
        raise error
    assert str(raised.value) == told


def test_tables_that_nobody_reads_any_more_end_as_lines_do() -> None:
    gone = Mock(spec=io.StringIO())
    gone.write.side_effect = BrokenPipeError
    with pytest.raises(BrokenPipeError):
        Output(file=gone).print("a table")


def test_where_nobody_reads_what_several_print_the_first_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does; the exit code of --nproc is that of whichever has ended first."""
    waited = list[float]()
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(BrokenPipeError), report_failure_once(click.Context(train_command), Ranks(rank=0, count=2)):
        raise BrokenPipeError
    with (
        pytest.raises(click.exceptions.Exit),
        report_failure_once(click.Context(train_command), Ranks(rank=1, count=2)),
    ):
        raise RankError("rank 0 has failed", is_told=True)
    assert len(waited) == 1 and waited[0] > 3


def test_more_processes_than_there_is_room_for_are_not_begun(run: RunCommand) -> None:
    code, _, err = run("train", "g.ooc", "--nproc", "100000")
    assert code == 2 and re.search(r"100000 processes need 30\.0 TB .* are free; give fewer with --nproc", err)


def test_where_the_run_cannot_be_written_the_first_says_who_it_is() -> None:
    error = RunError("checkpoint.pt: No space left on device")
    several = report_failure_once(click.Context(train_command), Ranks(rank=0, count=2))
    with pytest.raises(OocError, match=r"^rank 0: checkpoint\.pt: "), several:
        raise error from OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_does_not_answer_is_known_in_other_words() -> None:
    """As where a process says which one it is."""
    told = OocError("rank 1: x: the disk has not answered for 300 s")
    told.__cause__ = SpillError("x: the disk has not answered for 300 s", is_unanswered=True)
    assert _is_unanswered(told) and not _is_unanswered(SpillError("m: reading failed"))
    told.__cause__ = told
    assert not _is_unanswered(told)
