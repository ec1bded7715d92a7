# SPDX-License-Identifier: Apache-2.0
"""The processes of one training, as started by ``torchrun``: this one's rank, and communication by
``torch.distributed`` with gloo, or from device to device with the devices' own backend.

Sums over processes are taken in the order of the summands, which is the same for any number of processes;
``all_reduce`` would add in an order that depends on it.

Processes tell each other that they are alive through the store in which they have met: a thread of each process counts
up a number there, whatever the process computes or waits for. A slow process goes on counting and is waited for. One
whose number stands still has been killed or stopped, or cannot be reached. Whoever finds that out first writes it to
the store, and all stop. One process of every machine reports what has gone wrong.
"""

import atexit
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, Self, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from ooc.errors import OptionError, RankError
from ooc.interruption import stop_if_asked
from ooc.ranks.packing import CPU, packed, unpacked

Store = Any
"""torch.distributed's store, with methods that its stubs lack."""

BEAT_S = 1.0
SILENT_BEATS = 30
"""How many beats of one's own another process may be silent: on a machine that swaps, or with an interpreter that is
held, threads wait for seconds."""
_BROKEN_BEATS = 3
"""The same after a connection has broken: some process has gone, and only its number is sought."""
_VERDICT = "verdict"
_START, _THERE = "start", "there"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variables that name the network interfaces for gloo."""


class Place(NamedTuple):
    """Where a process runs: the machine's ``host`` name, what tells it from others of that name, the ``address`` of the
    name there, and the ``interfaces`` that gloo should use instead. ``token``: random, for this process alone;
    ``is_anew``: torchrun has started it in place of another one."""

    host: str = ""
    boot: str = ""
    address: str = ""
    interfaces: str = ""
    token: str = ""
    is_anew: bool = False

    @classmethod
    def here(cls) -> Self:
        """Return the place of this process."""
        host, restarts = socket.gethostname(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = ""
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        return cls(host, boot, address, os.environ.get(_INTERFACES, ""), uuid4().hex, restarts != "0")

    @property
    def machine(self) -> tuple[str, str]:
        """What processes of one machine have in common."""
        return self.host, self.boot

    @property
    def is_reached(self) -> bool:
        """Whether processes of other machines may connect to it."""
        return bool(self.interfaces) or (self.address != "" and not self.address.startswith("127."))


class Machines:
    """The machine of every process, from their ``places`` by rank."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._machines, self._hosts = [place.machine for place in places], [place.host for place in places]

    def here(self, rank: int) -> list[int]:
        """Return the ranks on the machine of process ``rank``."""
        return [other for other, machine in enumerate(self._machines) if machine == self._machines[rank]]

    def name(self, rank: int) -> str:
        """Return a name of the process for people; with several machines, including its machine."""
        return f"rank {rank} ({self._hosts[rank]})" if len({*self._machines}) > 1 else f"rank {rank}"

    def is_told(self, by: int, to: int) -> bool:
        """Whether another process than ``to`` reports on its machine what went wrong, which ``by`` reports first."""
        here = self.here(to)
        return to != (by if by in here else here[0])


def meet(whole: Store, rank: int, count: int, within: timedelta) -> tuple[Store, list[Place]]:
    """Let the processes of one start find each other, and return where they are, by rank, once all have come. Raises
    RankError with those that have not come in time; one on every machine reports it.

    ``whole`` may be a store that torchrun keeps when it restarts processes, and torchrun counts restarts on each
    machine by itself. So the first process names the start, and says who is there.
    """
    own, names, deadline = (
        Place.here(),
        [f"here/{other}" for other in range(count)],
        monotonic() + within.total_seconds(),
    )
    store = None
    if rank == 0:
        own = own._replace(is_anew=own.is_anew or whole.check([_START]))
        whole.set(_START, own.token)
    while monotonic() <= deadline:
        stop_if_asked()
        if whole.check([_START]):
            store = PrefixStore(whole.get(_START).decode(), whole)
            store.set(_beat(rank), "0")
            store.set(names[rank], json.dumps(own))
            if rank == 0 and store.check(names):
                store.set(_THERE, json.dumps([json.loads(store.get(name)) for name in names]))
            if store.check([_THERE]):
                places = [Place(*one) for one in json.loads(store.get(_THERE))]
                if places[rank] == own:  # otherwise it belongs to an earlier start
                    return store, places
        sleep(BEAT_S / 20)
    come = {
        other: Place(*json.loads(store.get(name)))
        for other, name in enumerate(names)
        if store is not None and store.check([name])
    }
    missing = [0] if store is None else [other for other in range(count) if other not in come] or [0]
    text = f"rank {', '.join(map(str, missing))} has not started within {within.total_seconds():g} s"
    raise RankError(text, is_told=any(place.machine == own.machine for other, place in come.items() if other < rank))


def check_reached(places: Sequence[Place], rank: int) -> None:
    """Raise RankError if other machines cannot reach this one by its name, which gloo uses unless told otherwise."""
    machines = Machines(places)
    for other, place in enumerate(places):
        if len(machines.here(other)) < len(places) and not place.is_reached:
            found = place.address or "no address"
            why = f"there the name {place.host} has {found}, by which no other machine reaches it"
            text = f"{machines.name(other)}: {why}; set {_INTERFACES} to the network's interface (ip -brief address)"
            raise RankError(text, is_told=machines.is_told(0, rank))


class Heartbeat:
    """The heartbeat of process ``rank``, and what is known of the ``count`` processes that have met in ``store``, on
    ``machines``."""

    def __init__(self, store: Store, rank: int, count: int, machines: Machines) -> None:
        self._store, self._rank, self._machines = store, rank, machines
        self._silent = {other: 0 for other in range(count) if other != rank}
        self._rounds = self._rounds_seen = self._unheard = 0
        self._is_lost = False
        self._verdict: tuple[int, int, str] | None = None
        """Who reported, about whom, and what."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RankError if a process has failed or is known to be gone."""
        if self._verdict is None:
            return
        by, of, what = self._verdict
        raise RankError(f"{self._machines.name(of)} {what}", is_told=self._machines.is_told(by, self._rank))

    def check_waiting(self) -> None:
        """The same while waiting, once a beat; also raise RankError if the store cannot be reached."""
        self.check()
        self._unheard = 0 if self._rounds != self._rounds_seen else self._unheard + 1
        self._rounds_seen = self._rounds
        if self._is_lost or self._unheard > SILENT_BEATS:
            self._is_lost = True  # do not write there any more: that would wait as well
            keeper = f"torchrun's or {self._machines.name(0)}"
            raise RankError(f"the process that keeps the store of all others, {keeper}, does not answer")

    def find_gone(self) -> None:
        """After a connection has broken, raise RankError with who has gone, if that is found out within a few beats."""
        until = self._rounds + _BROKEN_BEATS + 1
        while self._rounds <= until and not self._is_lost:
            self.check_waiting()
            for other, beats in self._silent.items():
                if beats >= _BROKEN_BEATS:
                    self._judge(self._store, other, "has gone or does not answer")
                    self.check()
            self._ended.wait(BEAT_S / 4)

    def fail(self) -> None:
        """Tell all others that this process does not go on."""
        if self._verdict is None and not self._is_lost:
            self._judge(self._store, self._rank, "has failed")

    def end(self) -> None:
        """Stop the thread, unless it hangs in the store."""
        self._ended.set()
        self._thread.join(2 * BEAT_S)

    def _beat(self) -> None:
        own, seen = 0, dict.fromkeys(self._silent, b"")
        try:
            store = self._store.clone()  # a store is locked while a thread waits on it
            while not self._ended.wait(BEAT_S):
                own += 1
                store.set(_beat(self._rank), str(own))
                for other in self._silent:
                    beat = store.get(_beat(other))
                    self._silent[other] = 0 if beat != seen[other] else self._silent[other] + 1
                    seen[other] = beat
                    if self._silent[other] >= SILENT_BEATS:
                        self._judge(store, other, f"has not answered for {SILENT_BEATS * BEAT_S:.0f} s")
                if self._verdict is None and store.check([_VERDICT]):
                    self._judge(store, self._rank, "")
                self._rounds += 1
        except RuntimeError:
            self._is_lost = True

    def _judge(self, store: Store, of: int, what: str) -> None:
        """Tell all others of this, unless something else is known already; if the store has gone, only this process
        knows."""
        if self._verdict is not None:
            return
        verdict = f"{self._rank} {of} {what}"
        try:
            verdict = store.compare_set(_VERDICT, "", verdict).decode()
        except RuntimeError:
            self._is_lost = True
            if not what:
                raise
        by, known, why = verdict.split(" ", 2)
        self._verdict = int(by), int(known), why


def _beat(rank: int) -> str:
    return f"beat/{rank}"


T = TypeVar("T")

MEETING = timedelta(minutes=10)
"""How long a process waits for all others to start; some may have to read or convert their data first."""
_UNLIMITED = timedelta(days=365)
"""How long it waits for what they send, as they are known to be alive."""
_POLL_S = 2e-5
"""Seconds between checks whether a device has sent something."""
_EXIT_ERROR = 2
_PROBES = [64 << 10, 256 << 10, *[1 << 20] * 3]
"""Bytes that each process sends to each, to measure the link."""
_PROBING_S = 0.3
"""The most seconds for these."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Process ``rank`` of ``count``, and its communication. ``machines``: where they run (None: all on one);
    ``is_anew``: torchrun has restarted some of them.

    Messages go by ``group``, and by the group ``beside`` it, which another thread may use meanwhile; from device to
    device they go by ``direct``, if possible, which takes ``direct_bytes`` of device memory. Waiting raises RankError
    once another process is known to have failed, gone or stopped.
    """

    rank: int = 0
    count: int = 1
    machines: Machines | None = None
    is_anew: bool = False
    heartbeat: Heartbeat | None = None
    group: Any = None
    beside: Any = None
    direct: Any = None
    direct_bytes: int = 0

    @property
    def here(self) -> Sequence[int]:
        """The ranks on this machine."""
        return range(self.count) if self.machines is None else self.machines.here(self.rank)

    @property
    def local_count(self) -> int:
        """The number of processes on this machine."""
        return len(self.here)

    @property
    def most_on_a_machine(self) -> int:
        """The number of processes on the machine that has the most."""
        return self.count if self.machines is None else max(len(self.machines.here(rank)) for rank in range(self.count))

    @property
    def first_of_machines(self) -> Sequence[int]:
        """The first rank of every machine."""
        return [0] if self.machines is None else sorted({self.machines.here(rank)[0] for rank in range(self.count)})

    def name(self, rank: int) -> str:
        """Return a name of a process for people."""
        return f"rank {rank}" if self.machines is None else self.machines.name(rank)

    @classmethod
    def of_environment(cls, within: timedelta = MEETING) -> Self:
        """Return the processes by ``torchrun``'s environment, or by a group made by the surrounding program, whatever
        backend it has; a single process without either. ``within``: the time in which all must come."""
        is_asked = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
        if not dist.is_available() or not (dist.is_initialized() or is_asked):
            return cls()
        if _met and dist.is_initialized() and _met[0] is dist.group.WORLD:
            return cast(Self, _met[1])
        try:
            made = cls._meet(within)
        except (RuntimeError, ValueError) as error:
            why = "the processes cannot meet as RANK, WORLD_SIZE and MASTER_ADDR say"
            raise RankError(f"{why}: {_line(error)}") from error
        if not _met:
            atexit.register(_end)
        _met[:] = dist.group.WORLD, made
        return made

    @classmethod
    def _meet(cls, within: timedelta) -> Self:
        if not dist.is_initialized():
            count = int(os.environ["WORLD_SIZE"])
            # Without waiting for all processes yet.
            met, rank, _ = next(rendezvous("env://", world_size=1, timeout=within))
            store, places = meet(met, rank, count, within)
            check_reached(places, rank)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=within)
        else:
            rank, count = dist.get_rank(), dist.get_world_size()
            store, places = meet(PrefixStore("ooc", _get_default_store()), rank, count, within)
            check_reached(places, rank)
        groups = [_group("gloo", within) for _ in range(2)]
        machines, is_anew = Machines(places), any(place.is_anew for place in places)
        heartbeat = Heartbeat(store, rank, count, machines) if count > 1 else None
        return cls(rank, count, machines, is_anew, heartbeat, *groups)

    def linked(
        self, backend: str, unit: int, place: torch.device, within_bytes: int, free_bytes: Callable[[], int]
    ) -> Self:
        """Return these processes with a group of ``backend`` that sends from device to device, if all have one and a
        device of their own, with number ``unit``. ``place``: the device, with ``free_bytes`` free and ``within_bytes``
        to be used."""
        units = [int(one) for one in self.gathered(torch.tensor([unit if backend else -1]))]
        if -1 in units or len({*units}) < self.count:
            return replace(self, direct=None)
        if self.direct is not None:
            return self
        # Else NCCL's watchdog ends the process when a connection breaks, before anybody has said whose.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        made, before = replace(self, direct=_group(backend, MEETING)), free_bytes()
        made.measured_link(place, within_bytes)  # this connects the processes
        taken = max(map(int, self.gathered(torch.tensor([before - free_bytes()]))))
        _met[1] = made = replace(made, direct_bytes=max(0, taken))
        return made

    @property
    def directly(self) -> Self:
        """Return these processes, sending from device to device."""
        return replace(self, group=self.direct)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return, in all processes, what ``make`` gives in the first. If it raises there, the others raise
        RankError."""
        if self.count == 1:
            return make()
        return cast(T, self.broadcast_object(self.in_all(make if self.rank == 0 else lambda: None), 0))

    def in_all(self, make: Callable[[], T]) -> T:
        """Return ``make()`` once it has succeeded in all processes. If it fails, the first that failed raises its
        error, and the others RankError."""
        if self.count == 1:
            return make()
        made: T | None = None
        failure: BaseException | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        try:
            state = 0 if failure is None else 1 if isinstance(failure, RankError) else 2  # 1: told of another's
            states = [int(state) for state in self.gathered(torch.tensor([state]))]
        except RankError:  # the other processes were doing something else, which has failed
            if failure is not None:
                raise failure from None
            raise
        if not any(states):
            return cast(T, made)
        first = states.index(max(states))
        why = str(self.broadcast_object(str(failure), first))
        if failure is not None and (first == self.rank or isinstance(failure, RankError)):
            raise failure
        is_told = self.machines is None or self.machines.is_told(first, self.rank)
        raise RankError(f"{self.name(first)} has failed: {why}", is_told=is_told)

    def check_equal(self, own: Mapping[str, Any], what: str) -> None:
        """Raise OptionError in the first process that has something else under one of these names than rank 0, and
        RankError in the others; ``what`` names it all."""
        if self.count == 1:
            return
        first = self.from_first(lambda: own)

        def check() -> None:
            differs = [name for name in {**first, **own} if first.get(name) != own.get(name)]
            if differs:
                raise OptionError(f"{what} is not that of {self.name(0)}: it differs in {', '.join(differs[:4])}")

        self.in_all(check)

    def gathered(self, own: Tensor) -> Sequence[Tensor]:
        """Return ``own`` [n] of every process, in order."""
        if self.count == 1:
            return (own,)
        found = [torch.empty_like(own) for _ in range(self.count)]
        self.wait(dist.all_gather(found, own, self.group, async_op=True))
        return found

    def share(self, model: nn.Module) -> None:
        """Give every process the parameters and buffers of rank 0."""
        if self.count > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                self.broadcast(tensor.data, 0)

    def broadcast(self, values: Tensor, rank: int) -> None:
        """Give every process the values of one of them, in the memory of ``values``; through the host, if that is a
        device's."""
        there = _on_host(values, is_sent=rank == self.rank)
        self.wait(dist.broadcast(there, rank, self.group, async_op=True))
        if there is not values and rank != self.rank:
            values.copy_(there)

    def broadcast_parts(self, parts: Sequence[Tensor]) -> None:
        """Give every process the part of each, in order and all at once: for four processes on two busy cores, 0.5 MB
        each took 3 ms instead of 7."""
        begun = [
            dist.broadcast(part, rank, self.group, async_op=True) for rank, part in enumerate(parts) if part.numel()
        ]
        _started.update(begun)
        for work in begun:
            self.wait(work)

    def all_to_all(
        self, received: Tensor, values: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> None:
        """Send rows of ``values``, this many to each process, one after the other; receive theirs in ``received``."""
        self.wait(self.begin_all_to_all(received, values, received_rows, sent_rows))

    def begin_all_to_all(
        self, received: Tensor, values: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Any:
        """Begin the same, to be waited for."""
        counts = [*received_rows], [*sent_rows]
        try:
            begun = dist.all_to_all_single(received, values, *counts, self.group, async_op=True)
        except RuntimeError as error:  # NCCL reports unsupported operations here
            self.check()
            raise RankError(f"rows cannot be sent: {_line(error)}") from error
        _started.add(begun)
        return begun

    def pass_on(self, received: Tensor, sent: Tensor, source: int, target: int) -> None:
        """Send rows to process ``target``, and receive those of ``source`` in ``received``; all processes must take
        part."""
        received_rows, sent_rows = [0] * self.count, [0] * self.count
        received_rows[source], sent_rows[target] = len(received), len(sent)
        self.all_to_all(received, sent, received_rows, sent_rows)

    def send_between(self, values: Tensor, sender: int, receiver: int) -> None:
        """Send from one process to another, in the memory of its ``values``; all must take part. It goes through the
        host, if that memory is a device's."""
        there = _on_host(values, is_sent=sender == self.rank)
        sent, received = (there if self.rank == rank else there[:0] for rank in (sender, receiver))
        self.pass_on(received, sent, sender, receiver)
        if there is not values and self.rank == receiver:
            values.copy_(there)

    def measured_link(self, place: torch.device = CPU, within_bytes: int = sys.maxsize) -> int:
        """Return the bytes per second that each process receives from all others at once, at best, for the slowest; in
        memory of ``place``, for a device at most ``within_bytes``."""
        link = self if place == CPU else self.directly
        # Gloo may still hold the buffers of the time before.
        rate, taken_s, most = 0.0, 0.0, within_bytes // (4 * self.count)
        buffers = torch.zeros(2, min(max(_PROBES), most) * (self.count - 1), dtype=torch.uint8, device=place)
        for nbytes in _PROBES:
            rows = [min(nbytes, most) * (rank != self.rank) for rank in range(self.count)]
            received, sent = buffers[:, : sum(rows)]
            begun = perf_counter()
            link.all_to_all(received, sent, rows, rows)
            slowest_s = max(map(float, self.gathered(torch.tensor([perf_counter() - begun], dtype=torch.float64))))
            rate, taken_s = max(rate, len(sent) / slowest_s), taken_s + slowest_s
            if taken_s > _PROBING_S:
                break
        return int(rate)

    def broadcast_object(self, value: Any, rank: int, place: torch.device = CPU) -> Any:
        """Return one process's ``value``, any object, in all processes. Its tensors of a device are on each one's own,
        ``place``."""
        found = packed(value)
        size = torch.tensor([len(found)])
        self.broadcast(size, rank)
        if rank != self.rank:
            found = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(found, rank)
        return value if rank == self.rank else unpacked(found, place)

    def failed(self) -> None:
        """Tell the others that this process does not go on; devices send nothing any more."""
        if self.heartbeat is not None:
            self.heartbeat.fail()
        if self.direct is not None:
            self.direct.abort()

    def check(self) -> None:
        """Raise RankError if another process is known to have failed, gone or stopped."""
        if self.heartbeat is not None:
            self.heartbeat.check()

    def wait(self, work: Any) -> None:
        """Return when it is done, so that a device's later work comes after it. Raises RankError, with who has gone,
        instead of gloo's or NCCL's error."""
        assert self.heartbeat is not None
        _started.add(work)
        while not self._is_done(work):
            stop_if_asked()
            self.heartbeat.check_waiting()
        _started.discard(work)
        try:
            work.wait()
        except RuntimeError as error:
            self.heartbeat.find_gone()
            raise RankError(f"another process has gone: {_line(error)}") from error

    def _is_done(self, work: Any) -> bool:
        """Whether it is done within a beat."""
        if self.group is self.direct:  # NCCL ends the group once it has been waited for in vain
            until = monotonic() + BEAT_S
            while not work.is_completed() and monotonic() < until:
                sleep(_POLL_S)
        elif not work.is_completed():
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=BEAT_S))
        return bool(work.is_completed())


def _on_host(values: Tensor, *, is_sent: bool) -> Tensor:
    """Return ``values``, or as much host memory for those of a device."""
    return values.cpu() if is_sent or values.device == CPU else torch.empty_like(values, device=CPU)


_met: list[Any] = []
"""Torch's group of all, and these processes as it has been met."""
_started: set[Any] = set()
"""The transfers that were started."""


def _group(backend: str, within: timedelta) -> Any:
    """Return a further group of all, made by all in the same order, once all have come ``within`` that time."""
    group = dist.new_group(backend=backend, timeout=within)
    group._get_backend(group._device_types[0])._set_default_timeout(_UNLIMITED)
    return group


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def _end() -> None:
    """End at the exit of the process; gloo and NCCL would wait for what others have left undone."""
    _met[1].heartbeat.end()
    if _met[1].direct is not None:
        _met[1].direct.abort()
    if not all(work.is_completed() for work in _started):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_EXIT_ERROR)


ALONE = Ranks()
"""A single process."""
