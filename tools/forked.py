# SPDX-License-Identifier: Apache-2.0
"""Commands of ``ooc`` in children of one process that has imported everything, and what they leave behind.

Importing torch and PyG takes seconds, what a small graph takes a fraction of one. A child has memory, descriptors and
locks of its own; what it does to files, and how it ends, is what a process of its own would do.
"""

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

WATCHDOG_S = 120.0
_SET_CHILD_SUBREAPER = 36
_GRACE_S = 6.0
"""How long a process may take to find out that another one of its training has gone, and to end when it is told to."""
HUNG = "hung"
_CHANGING = ("created", "name")


def import_everything() -> None:
    """What a command would import."""
    from ooc.cli import COMMANDS

    for name in (
        *(f"ooc.cli.{command}" for command in COMMANDS),
        "ooc.cli.arguments.recipe",
        "ooc.train.batched.batches",
    ):
        importlib.import_module(name)
    for name in ("torch_geometric.nn.models", "zarr", "ooc.report.console", "ooc.report.logs", "ooc.report.runs"):
        importlib.import_module(name)


@dataclass(frozen=True)
class End:
    """How a child ended: ``code`` as ``subprocess`` has it, or ``None`` where the watchdog ended it."""

    code: int | None
    out: str
    err: str
    wall_s: float

    @property
    def killed(self) -> bool:
        """By SIGKILL."""
        return self.code == -signal.SIGKILL

    @property
    def complaint(self) -> str:
        """Why this is no end that a command may have; empty where it is: done, or one line and exit code 2."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        if self.code is None:
            return f"{HUNG} for {WATCHDOG_S:.0f} s"
        if "Traceback" in self.err:
            return "traceback: " + (lines[-1] if lines else "")
        if self.code == 0:
            return ""
        errors = [line for line in lines if line.startswith("ooc: error: ")]
        if self.code != 2 or len(errors) != 1 or lines[-1] != errors[0]:
            told = " | ".join(line for line in lines if "frame #" not in line)
            return f"exit code {self.code} with {len(errors)} lines of error: {told}"
        return ""


def run(
    arguments: Sequence[str | Path],
    log: Path,
    *,
    prepare: Callable[[], None] = lambda: None,
    prepare_second: Callable[[], None] = lambda: None,
    kill_after_s: float | None = None,
    watchdog_s: float = WATCHDOG_S,
) -> End:
    """``ooc`` with these arguments in a child, in which ``prepare`` is called first. What it prints is in ``log``.out
    and ``log``.err.

    With ``--nproc 2`` they are two children of that one, which does what ``torchrun`` does: it keeps the store that
    they meet in, and where one fails, it ends the other. It is killed itself where the first process is. In the second
    ``prepare_second`` is called.
    """
    from ooc import cli

    command = [str(argument) for argument in arguments]
    several = "--nproc" in command
    if several:
        at = command.index("--nproc")
        del command[at : at + 2]

    def work() -> int:
        prepare()
        return cli.main(command)

    def second() -> int:
        prepare_second()
        return cli.main(command)

    begun = partial(_launched, (work, second)) if several else work
    return call(begun, log, kill_after_s=kill_after_s, watchdog_s=watchdog_s)


def _launched(processes: Sequence[Callable[[], int]]) -> int:
    """All of them as processes of one training; what the first comes to."""
    import torch.distributed as dist

    port = _free_port()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(len(processes)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    children: list[int] = []
    for rank, process in enumerate(processes):
        os.environ["RANK"] = str(rank)
        children.append(os.fork())
        if not children[-1]:
            _end_with(process)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # now: its threads do not fork
    ends: dict[int, int] = {}
    failed_s, ending = float("inf"), [signal.SIGTERM]
    while len(ends) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            ends[child] = os.waitstatus_to_exitcode(status)
            if ends[child]:
                failed_s = min(failed_s, time.monotonic())
        elif time.monotonic() > failed_s + _GRACE_S:
            for other in set(children) - ends.keys():
                os.kill(other, ending.pop(0) if ending else signal.SIGKILL)
            failed_s = time.monotonic()
        time.sleep(0.002)
    del store
    if ends[children[0]] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return ends[children[0]]


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def call(
    work: Callable[[], int], log: Path, *, kill_after_s: float | None = None, watchdog_s: float = WATCHDOG_S
) -> End:
    """``work`` in a child, whose exit code it gives once processes that it has started have ended, too."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    logs = [Path(f"{log}.{name}") for name in ("out", "err")]
    for path in logs:
        path.write_text("")  # a child may be killed before it has opened them
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(work, log)
    deadline = started + (watchdog_s if kill_after_s is None else min(kill_after_s, watchdog_s))
    hung = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() >= deadline:
            hung = kill_after_s is None
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            break
        time.sleep(0.002)
    hung |= not _others_end(child, watchdog_s)
    out, err = (path.read_text(errors="replace") for path in logs)
    return End(None if hung else os.waitstatus_to_exitcode(status), out, err, time.monotonic() - started)


def _others_end(group: int, watchdog_s: float) -> bool:
    """Whether what is left of a group of processes ends by itself; it is ended."""
    deadline = time.monotonic() + watchdog_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-group, os.WNOHANG)[0]:
                time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)
        while True:
            os.waitpid(-group, 0)
    return time.monotonic() < deadline


def _become(work: Callable[[], int], log: Path) -> None:
    os.setpgid(0, 0)
    _end_with(work, log)


def _end_with(work: Callable[[], int], log: Path | None = None) -> None:
    """Be a process that does ``work`` and ends. ``log``: where what it prints goes; None: where it went before."""
    code = 99
    try:
        for name, descriptor in (("out", 1), ("err", 2)) if log is not None else ():
            opened = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        code = work()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 98
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# ---- changes of files --------------------------------------------------------------------------------------------

_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def is_change(event: str, arguments: tuple[Any, ...], root: str) -> bool:
    """Whether this audit event comes before something is done to the files in ``root``."""
    if event not in _CHANGES:
        return False
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _TO_WRITE):
        return False
    path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
    return path.startswith(root) or not path.startswith("/")  # relative: within a folder that is being removed


def before_change(root: Path, at: int, then: Callable[[], None]) -> Callable[[], int]:
    """Have ``then`` called right before the ``at``-th change in this process; what is returned tells how many there
    were."""
    seen, folder = itertools.count(1), str(root.resolve())
    last = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal last
        if is_change(event, arguments, folder):
            last = next(seen)
            if last == at:
                then()

    sys.addaudithook(watch)
    return lambda: last


# ---- what is left -----------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, Any]:
    """What of the files in ``folder`` must be the same whenever the same work was done, by their names.

    Of runs what was computed, not how long it took; of stores all but the time at which they were made; other files
    byte for byte.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name + "/"] = None
        else:
            try:
                found[name] = _content(path)
            except Exception as error:  # a damaged file is another one, whatever is made of it
                found[name] = f"damaged: {error}"
    return found


def differences(found: dict[str, Any], expected: dict[str, Any], *, more: bool = True, most: int = 4) -> str:
    """What is not the same, in a few words; empty where all is. Without ``more`` other files may be there besides."""
    lacking, besides = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    parts = [
        f"{what} {', '.join(names[:most])}{' …' if len(names) > most else ''}"
        for what, names in (("lacks", lacking), ("has besides", besides if more else []), ("differs in", sorted(other)))
        if names
    ]
    return "; ".join(parts)


def _content(path: Path) -> Any:
    if path.name == "zarr.json":
        document = json.loads(path.read_text())
        for changing in _CHANGING:
            document.get("attributes", {}).pop(changing, None)
        return json.dumps(document, sort_keys=True)
    if path.name in ("checkpoint.pt", "best.pt"):
        return _state(path)
    if path.name == "metrics.jsonl":
        return [_computed(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name in ("starts.jsonl", "plan.json", "planned.json", "timeline.json", "config.json", "config.toml"):
        return True
    if path.parent.name == "embedding":  # the states tell of those that count
        return True
    if path.suffix == ".safetensors":  # whose metadata come in any order
        import safetensors.torch

        return _plain(safetensors.torch.load_file(path))
    return path.read_bytes()


def _computed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in ("epoch", "loss", "train_score", "valid_score", "test_score")}


def _state(path: Path) -> Any:
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    if "embedding" in state:  # whichever file has them; of the best epoch the rows alone are kept
        of_best = path.name == "best.pt"
        versions = [one for one in state["embedding"]["versions"].items() if one[0] == "emb" or not of_best]
        files = {name: path.parent / "embedding" / f"{name}.{version}.npy" for name, version in versions}
        state["embedding"] = {name: file.read_bytes() for name, file in files.items()}
    return {
        name: [_computed(one) for one in value] if name == "history" else _plain(value)
        for name, value in state.items()
        if name != "record"
    } | {"record": _computed(state["record"])}


def _plain(value: Any) -> Any:
    """Tensors as their bits."""
    import torch

    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
