# SPDX-License-Identifier: Apache-2.0
"""The optimizer state of a model's large parameters, on the SSD instead of in memory, as in ZeRO-Infinity (Rajbhandari
et al., SC 2021): read, stepped and written in pieces, each by torch's own optimizer.

An optimizer that steps every number by itself gives the same bits for a parameter in pieces as for the whole one. A run
has two versions of the state, and a step never writes the one that the last checkpoint names, so that one still exists
whenever the process ends. Without a run there is one file, which ends with the process. With several processes, which
all make the same steps, the first has the versions, and each of the others one such file.
"""

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import google_crc32c
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ooc.errors import OptionError, RunError, SpillError, as_error
from ooc.prefetch.arena import Arena, Bytes
from ooc.prefetch.engine import Engine, OpenFile, Span, Ticket, open_file
from ooc.prefetch.spill import create_spill
from ooc.sizes import format_size
from ooc.storage.array import flush, make_folders

WHERE = ("auto", "memory", "ssd")
"""Where optimizer state may be."""
PIECE = 1 << 16
"""Numbers of a parameter that are stepped at once; the state of a smaller parameter stays in memory."""
_IN_MEMORY = 3
"""Pieces in memory: one being read, one stepped, one written."""
_OF_A_STEP = 3
"""The most tensors of a piece that torch makes to step it, beside its state."""
_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
    torch.optim.SGD,
)
_NAME = "optimizer state"


_HOLDERS: "WeakKeyDictionary[Optimizer, ref[StateOnDisk]]" = WeakKeyDictionary()
"""The owners of files with an optimizer's state."""


def check_there(optimizer: Optimizer, own: "StateOnDisk | None") -> None:
    """Raise OptionError if state of ``optimizer`` is on the SSD, but not in the files of ``own``."""
    other = holder() if (holder := _HOLDERS.get(optimizer)) is not None else None
    if other is not None and other is not own and other.state() is not None:
        raise OptionError("what the optimizer keeps is on the SSD for another trainer; close that one first")


def why_in_memory(optimizer: Optimizer) -> str | None:
    """Return why the state of ``optimizer`` cannot be on the SSD, or None: each number must be stepped by itself."""
    name = type(optimizer).__name__
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        return f"what {name} keeps has to be in memory; on the SSD may be that of {known}"
    for option in ("fused", "capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return f"what {name} keeps has to be in memory with {option}=True"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Paged:
    """A parameter, and the names of its optimizer state with as many numbers."""

    parameter: nn.Parameter
    names: tuple[str, ...]

    @property
    def starts(self) -> range:
        """The first number of every piece."""
        return range(0, self.parameter.numel(), PIECE)


class StateOnDisk:
    """The state that ``optimizer`` keeps for those of ``parameters`` that it steps and that have at least ``PIECE``
    numbers.

    ``folder``: of the run it belongs to (None: of none), which this process writes unless it ``follows``. Raises
    OptionError if the optimizer has no such state. Scalars, such as the number of steps, stay with the optimizer, which
    has all of the state again after ``close``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Collection[nn.Parameter],
        *,
        folder: Path | None = None,
        follows: bool = False,
    ) -> None:
        why = why_in_memory(optimizer)
        if why is not None:
            raise OptionError(why)
        self._optimizer, self._folder = optimizer, None if follows else folder
        self._read_from = folder
        self._to_copy: Path | None = None
        asked = {id(one) for one in parameters if one.numel() >= PIECE and one.is_contiguous()}
        found = [(group, one) for group in optimizer.param_groups for one in group["params"] if id(one) in asked]
        paged = [_Paged(one, _kept_of(optimizer, group, one)) for group, one in found]
        self._paged = [one for one in paged if one.names]
        itemsize = max((one.parameter.itemsize for one in self._paged), default=0)
        most = max((len(one.names) for one in self._paged), default=0)
        self._stride = most * PIECE * itemsize
        self._count = sum(len(one.starts) for one in self._paged)
        self.nbytes = self._count * self._stride
        """Bytes that a step reads, and also writes: those of one version."""
        self.spared_bytes = sum((len(one.names) + 1) * one.parameter.nbytes for one in self._paged)
        """Bytes of memory saved: the state, and what torch makes to step a whole parameter."""
        self.pieces_bytes = _IN_MEMORY * self._stride
        """Bytes of memory for pieces on their way."""
        self.step_bytes = (most + _OF_A_STEP) * PIECE * itemsize
        """Further bytes of a piece while it is stepped."""
        self._files: list[OpenFile] = []
        self._current: int | None = None  # None: no step was made yet, and no file has state
        self._saved: int | None = None
        self._crcs: dict[int, list[int]] = {}
        self._half_done = False
        self._seen: object = None  # the optimizer's state in memory after the last step

    # ---- files -----------------------------------------------------------------------------------------------

    def open(self, scratch: Path, engine: Engine) -> None:
        """Open the files, in ``scratch`` if they belong to no run, and move the optimizer's state in memory there.
        Raises SpillError if there is no room."""
        if self._files or not self._paged:
            return
        _HOLDERS[self._optimizer] = ref(self)
        if self._folder is None:
            self._files = [create_spill(scratch, _NAME, self.nbytes)]
            found, self._to_copy = self._to_copy, None
            if found is not None:
                with found.open("rb") as file:
                    for at in range(0, self.nbytes, self._stride):
                        os.pwrite(self._files[0].buffered, os.pread(file.fileno(), self._stride, at), at)
        else:
            list(make_folders(self._folder))
            for version in range(2):
                self._files.append(_open_version(_path(self._folder, version), self.nbytes))
            flush(self._folder)
        if self._current is None:
            self._take_in(engine)

    def _take_in(self, engine: Engine) -> None:
        """Write the optimizer's state in memory to the files, and free it."""
        state = self._optimizer.state
        known = [any(name in state.get(one.parameter, ()) for name in one.names) for one in self._paged]
        if not any(known):
            return
        if not all(known):
            raise OptionError("of some large parameters the optimizer has state, of others none; keep it in memory")

        def fill(one: _Paged, start: int, kept: Mapping[str, Tensor]) -> None:
            for name, row in kept.items():
                row.copy_(state[one.parameter][name].reshape(-1)[start : start + PIECE])

        self._through(engine, fill)
        for one in self._paged:
            for name in one.names:
                del state[one.parameter][name]

    @property
    def _is_outdated(self) -> bool:
        """Whether the optimizer was given another state since the last step, or lost it."""
        state = self._optimizer.state
        there = [(one.names, state.get(one.parameter)) for one in self._paged]
        return state is not self._seen or any(kept is None or not kept.keys().isdisjoint(n) for n, kept in there)

    def close(self) -> None:
        """Close the files; the optimizer has all of its state in memory again, if it can be read. May be called
        twice."""
        files, self._files = self._files, []
        try:
            if files and self._current is not None and not self._is_outdated:
                if self._half_done:
                    raise SpillError("of some pieces it is the state before a step, of others that after it")
                self._give_back(files[self._current].buffered)
        except (OSError, SpillError):
            for one in self._paged:
                self._optimizer.state.pop(one.parameter, None)
        finally:
            self._current = None
            for file in files:
                file.close()

    def _give_back(self, descriptor: int) -> None:
        assert self._current is not None
        for at, (one, start) in enumerate(self._pieces()):
            read = os.pread(descriptor, self._stride, at * self._stride)
            memory = np.frombuffer(bytearray(read), dtype=np.uint8)
            self._check(memory, self._current, at)
            for name, row in self._rows(memory, one, start).items():
                state = self._optimizer.state[one.parameter]
                whole = state.setdefault(name, torch.empty_like(one.parameter, requires_grad=False))
                whole.view(-1)[start : start + PIECE].copy_(row)

    # ---- steps -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, engine: Engine) -> None:
        """Make one step of the optimizer, of all parameters. Raises RunError after a step that was interrupted
        halfway."""
        if self._half_done:
            remedy = "make a trainer anew, or go on with the run"
            raise RunError(f"a step of the optimizer was interrupted halfway; {remedy}")
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        if self._current is not None and self._is_outdated:
            self._current = None
            self._take_in(engine)
            if self._current is None and any(one.parameter in optimizer.state for one in self._paged):
                raise OptionError(
                    "the optimizer was given a state_dict() without what is on the SSD; take it after close()"
                )
        self._half_done = True
        paged, of = {id(one.parameter) for one in self._paged}, {id(p): g for g in groups for p in g["params"]}
        optimizer.param_groups = [{**g, "params": [p for p in g["params"] if id(p) not in paged]} for g in groups]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        alone, is_new = copy.copy(optimizer), self._current is None

        def step(one: _Paged, start: int, kept: Mapping[str, Tensor]) -> None:
            whole = one.parameter
            assert whole.grad is not None, "those whose gradient is cut off are not among the parameters"
            piece = nn.Parameter(whole.detach().view(-1)[start : start + PIECE])
            piece.grad = whole.grad.view(-1)[start : start + PIECE]
            state = copy.deepcopy(optimizer.state[whole])
            if not is_new:
                state |= {name: row.to(piece.device) for name, row in kept.items()}
            after = _stepped(alone, of[id(whole)], piece, state)
            for name, row in kept.items():
                if after[name].data_ptr() != row.data_ptr():
                    row.copy_(after[name])
            if start == one.starts[-1]:
                optimizer.state[whole] = {name: value for name, value in after.items() if name not in kept}

        self._through(engine, step)
        self._half_done = False

    def _through(self, engine: Engine, work: Callable[[_Paged, int, Mapping[str, Tensor]], None]) -> None:
        """Process the current version piece by piece into the next one, or into itself if no checkpoint names it.
        ``work`` is given the parameter, the piece's first number and its state by name, to be changed."""
        source = self._current
        target = source if source is not None and source != self._saved else int(self._saved == 0)
        arena, crcs = Arena(self.pieces_bytes), list[int]()
        views = [arena.view(at * self._stride, self._stride) for at in range(_IN_MEMORY)]
        reads, writes = dict[int, Ticket](), dict[int, Ticket]()

        def prepare(at: int) -> None:
            """Begin to fill a piece's memory, once it is free."""
            if at >= self._count or at in reads:
                return
            if at - _IN_MEMORY in writes:
                writes[at - _IN_MEMORY].wait()
            if source is not None:
                reads[at] = engine.read([self._span(source, at)], views[at % _IN_MEMORY])

        try:
            for at, (one, start) in enumerate(self._pieces()):
                memory = views[at % _IN_MEMORY]
                prepare(at)
                prepare(at + 1)
                if source is not None:
                    reads[at].wait()
                    self._check(memory, source, at)
                work(one, start, self._rows(memory, one, start))
                crcs.append(google_crc32c.extend(0, memory))
                writes[at] = engine.write([self._span(target, at)], memory)
            for write in writes.values():
                write.wait()
        finally:
            for ticket in (*reads.values(), *writes.values()):
                ticket.settle()
            arena.close()
        if self._folder is not None:
            flush(_path(self._folder, target))
        self._current, self._crcs[target] = target, crcs
        self._seen = self._optimizer.state

    def _pieces(self) -> Iterator[tuple[_Paged, int]]:
        return ((one, start) for one in self._paged for start in one.starts)

    def _rows(self, memory: Bytes, one: _Paged, start: int) -> dict[str, Tensor]:
        """Return what a piece's memory holds, by name."""
        kept = torch.frombuffer(memory, dtype=one.parameter.dtype).view(-1, PIECE)
        numbers = min(PIECE, one.parameter.numel() - start)
        return {name: kept[at, :numbers] for at, name in enumerate(one.names)}

    def _span(self, version: int, at: int) -> Span:
        return Span(self._files[version], at * self._stride, self._stride, _NAME)

    def _check(self, memory: Bytes, version: int, at: int) -> None:
        if google_crc32c.extend(0, memory) != self._crcs[version][at]:
            raise SpillError(f"{_NAME}: the SSD returns other bytes than were written there")

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the current version for a checkpoint, or None if all is in memory; call ``saved`` when it is
        written."""
        if self._current is None:
            return None
        return {"version": self._current, "crcs": self._crcs[self._current], "pieces": self._layout}

    @property
    def _layout(self) -> list[list[Any]]:
        return [[one.parameter.numel(), *one.names] for one in self._paged]

    def saved(self) -> None:
        """Keep the current version, which a checkpoint names, until the next one."""
        self._saved = None if self._folder is None else self._current

    def load(self, state: Mapping[str, Any] | None, *, into_memory: bool) -> None:
        """Continue from a checkpoint's ``state()``. Raises RunError if it does not exist or does not fit."""
        self._current, self._half_done, self._seen = None, False, self._optimizer.state
        if state is None:
            groups = {id(one): group for group in self._optimizer.param_groups for one in group["params"]}
            for one in () if into_memory else self._paged:
                if _kept_of(self._optimizer, groups[id(one.parameter)], one.parameter) != one.names:
                    raise RunError(
                        "the run was begun with other options of the optimizer, by which it keeps other state"
                    )
            return
        version, crcs = state["version"], state["crcs"]
        if state["pieces"] != self._layout or self._read_from is None:
            raise RunError("what the optimizer keeps of large parameters is of another model, or of other options")
        path = _path(self._read_from, version)
        try:
            if path.stat().st_size != self.nbytes:
                raise RunError(f"{path} is not what the checkpoint names")
            self._current, self._crcs = version, {version: crcs}
            if into_memory:
                with path.open("rb") as file:
                    self._give_back(file.fileno())
                self._current = None
        except (OSError, SpillError) as error:
            raise RunError(f"{path}: {error}") from error
        self._saved = version
        if self._folder is None and not into_memory:
            self._current, self._saved, self._crcs, self._to_copy = 0, None, {0: crcs}, path


def _kept_of(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names of the state that ``optimizer`` keeps of every number of a parameter, by trying two numbers."""
    tried = nn.Parameter(torch.zeros(2, dtype=parameter.dtype))
    tried.grad = torch.zeros_like(tried)
    state = {
        name: torch.zeros_like(tried) if isinstance(kept, Tensor) and kept.shape == parameter.shape else kept
        for name, kept in optimizer.state.get(parameter, {}).items()
    }
    after = _stepped(copy.copy(optimizer), group, tried, copy.deepcopy(state))
    return tuple(name for name, kept in after.items() if isinstance(kept, Tensor) and kept.shape == tried.shape)


def _stepped(alone: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, state: dict[str, Any]) -> Any:
    """Return the state that ``alone``, a copy of an optimizer, has of a parameter after a step with the options of
    ``group``."""
    alone.param_groups = [{**group, "params": [parameter]}]
    alone.state = defaultdict(dict, {parameter: state})
    with torch.no_grad():
        alone.step()
    return alone.state[parameter]


def _path(folder: Path, version: int) -> Path:
    return folder / f"state.{version}"


def _open_version(path: Path, nbytes: int) -> OpenFile:
    """Open a version's file with its full size, whatever it contains."""
    with as_error(SpillError, f"{path}: no room for {format_size(nbytes)} of what the optimizer keeps"):
        with path.open("ab") as file:
            os.ftruncate(file.fileno(), nbytes)
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return open_file(path, os.O_RDWR | os.O_CLOEXEC)
