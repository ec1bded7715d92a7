# SPDX-License-Identifier: Apache-2.0
"""Several machines on this one, for who is root: each has a network, a hostname, processes, hosts and a folder of its
own (Linux namespaces), and a link to a switch that all are on, as fast as is asked for.

What runs on a machine sees the files of all; but the folder ``here`` is on every machine another one, of that machine
alone (``Machine.folder`` from outside).
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TOOLS = "ip", "unshare", "nsenter", "mount"
_NEW_MOUNTS, _DETACH = 0x20000, 2
_NAMESPACES = "--net", "--uts", "--mount", "--pid"


class MachinesUnavailable(Exception):
    """None can be made here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """One of them: its ``name`` leads to its ``address``. ``folder``: what it has ``here``. ``holder``: the process in
    whose namespaces it is, which ends with all of its processes."""

    name: str
    address: str
    folder: Path
    here: Path
    holder: int

    def popen(self, *command: Any, env: Mapping[str, str] | None = None, **options: Any) -> "subprocess.Popen[str]":
        """Start a command there, in the folder ``here``."""
        inside = ["nsenter", f"--target={self.holder}", *_NAMESPACES, f"--wdns={self.here}", "--", *map(str, command)]
        return subprocess.Popen(inside, env={**os.environ, **(env or {})}, text=True, **options)

    def run(self, *command: Any) -> str:
        """What a command prints there."""
        process = self.popen(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed, _ = process.communicate()
        if process.returncode:
            raise MachinesUnavailable(f"{' '.join(map(str, command))} on {self.name}: {printed.strip()}")
        return printed

    def enter(self) -> None:
        """Have this process, of one thread, go on there, but for its number; for children that are forked."""
        libc, own = (
            ctypes.CDLL(None, use_errno=True),
            [f"/proc/{self.holder}/ns/{kind}" for kind in ("net", "uts", "mnt")],
        )
        for descriptor in [os.open(path, os.O_RDONLY) for path in own]:
            if libc.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        libc.unshare(_NEW_MOUNTS)
        libc.umount2(b"/proc", _DETACH)  # in that of the machine this process has no number
        os.chdir(self.here)

    def unplug(self) -> None:
        """Have nothing reach it any more, nor it anything."""
        self.run("ip", "link", "set", "eth0", "down")

    def slow_down(self, rate: str) -> None:
        """What it sends goes at ``rate``, as tc says it (100mbit)."""
        self.run(
            "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "latency", "200ms", "burst", "256k", "rate", rate
        )


@contextmanager
def machines(folder: Path, names: Sequence[str], *, rate: str | None = None) -> Iterator[list[Machine]]:
    """So many machines, with what they have for themselves below ``folder``, until the end of the block.
    MachinesUnavailable where they cannot be made."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        raise MachinesUnavailable(f"needs root and {', '.join(_TOOLS)} (util-linux, iproute2)")
    here, made = folder / "here", list[Machine]()
    here.mkdir(parents=True, exist_ok=True)
    hosts = folder / "hosts"
    addresses = [f"10.77.0.{number}" for number in range(1, len(names) + 1)]
    known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    hosts.write_text(f"127.0.0.1 localhost\n{known}")
    with ExitStack() as stack:
        switch = Machine("switch", "", here, here, stack.enter_context(_held(["--net", "--uts", "--mount"])))
        switch.run("ip", "link", "add", "switch", "up", "type", "bridge")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            own = folder / name
            own.mkdir(exist_ok=True)
            one = Machine(name, address, own, here, stack.enter_context(_held([*_NAMESPACES, "--mount-proc"])))
            ends = ["add", f"port{number}", "up", "master", "switch", "type", "veth", "peer", "eth0"]
            switch.run("ip", "link", *ends, "netns", one.holder)
            for command in (
                f"hostname {name}",
                f"mount --bind {own} {here}",
                f"mount --bind {hosts} /etc/hosts",
                f"mount --bind {hosts} /etc/resolv.conf",
                "ip link set lo up",
                f"ip address add {address}/24 dev eth0",
                "ip link set eth0 up",
            ):
                one.run(*command.split())
            if rate is not None:
                one.slow_down(rate)
            made.append(one)
        yield made


@contextmanager
def _held(namespaces: Sequence[str]) -> Iterator[int]:
    """A process in namespaces of its own, whose end is that of all that run in them."""
    holder = ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", "echo; exec cat"]
    pipes: dict[str, int] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(holder, text=True, **pipes)  # without us, there is nothing more to be read
    assert process.stdout is not None and process.stderr is not None
    try:
        if not process.stdout.readline():
            raise MachinesUnavailable(process.stderr.read().strip())
        yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    finally:
        process.kill()
        process.communicate()
