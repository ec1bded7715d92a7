# SPDX-License-Identifier: Apache-2.0
"""The processes of one training, as ``torchrun`` starts them: which of them this one is, and what they tell each other
by ``torch.distributed`` with gloo.

Sums over processes are taken in the order of what is summed, the same for any number of them; ``all_reduce`` would add
in an order that depends on it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ooc.errors import ModelError, OptionError, RankError
from ooc.events import Event, Listener, TaskAdvanced

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others: longer than a batch, or a pass of scoring, takes."""
_NAMING = timedelta(seconds=5)
"""How long the first waits to learn who does not answer."""
_GOES_ON, _DONE, _FAILED = range(3)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process is number ``rank`` of ``count``, ``local_count`` of them on this machine."""

    rank: int = 0
    count: int = 1
    local_count: int = 1
    _watch: Any = None
    """A second group, by which it is found out who has gone."""

    @classmethod
    def of_environment(cls) -> Self:
        """As ``torchrun`` says, or a group that the program around us has made; alone where there is neither.
        OptionError for a group that cannot send what lies in RAM."""
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return cls()
            try:
                met, rank, count = next(rendezvous("env://"))
                # torchrun keeps its store when it starts processes anew; where those of before listened is not asked.
                store = PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", met)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
            except (RuntimeError, ValueError) as error:
                raise RankError(f"the processes cannot meet: {' '.join(str(error).split())}") from error
        elif dist.get_backend() not in ("gloo", "mpi"):
            raise OptionError(f"batches are trained on the CPU, and the process group is of {dist.get_backend()}")
        count = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        return cls(dist.get_rank(), count, local, dist.new_group(backend="gloo", timeout=TIMEOUT))

    def told(self, make: Callable[[], T]) -> T:
        """What ``make`` gives the first of them, for all. Where it raises there, the others raise RankError."""
        if self.count == 1:
            return make()
        made = None
        if self.rank == 0:
            try:
                made = (make(),)
            except BaseException:
                self.sent(None, 0)
                raise
        made = self.sent(made, 0)
        if made is None:
            raise RankError("rank 0 has failed", is_told=True)
        return cast(T, made[0])

    def all_of(self, make: Callable[[], T]) -> T:
        """``make()``, once it has succeeded everywhere; of those where it fails the first raises what it raised, the
        others RankError."""
        if self.count == 1:
            return make()
        made: T | None = None
        failure: BaseException | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        failed: list[Any] = [None] * self.count
        with self._naming():
            dist.all_gather_object(failed, failure is not None)
        first = next((rank for rank, has_failed in enumerate(failed) if has_failed), None)
        if first is None:
            return cast(T, made)
        if failure is not None and first == self.rank:
            raise failure
        raise RankError(f"rank {first} has failed", is_told=True)

    def gathered(self, own: Tensor) -> Sequence[Tensor]:
        """``own`` [n] of every process, in their order."""
        if self.count == 1:
            return (own,)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with self._naming():
            dist.all_gather(found, own)
        return found

    def share(self, model: nn.Module) -> None:
        """Give every process the first one's parameters and buffers."""
        if self.count > 1:
            with self._naming():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.data, 0)

    def broadcast(self, values: Tensor, rank: int) -> None:
        """Give every process those of one of them, in the memory of ``values``."""
        with self._naming():
            dist.broadcast(values, rank)

    def all_to_all(
        self, received: Tensor, values: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> None:
        """Send rows of ``values``, so many to each process, one behind the other; have theirs in ``received``."""
        with self._naming():
            dist.all_to_all_single(received, values, list(received_rows), list(sent_rows))

    def send(self, values: Tensor, rank: int) -> None:
        """To one of them, which has to ``receive`` them."""
        with self._naming():
            dist.send(values, rank)

    def receive(self, values: Tensor, rank: int) -> None:
        """What one of them sends, in the memory of ``values``."""
        with self._naming():
            dist.recv(values, rank)

    def sent(self, value: Any, rank: int) -> Any:
        """What ``value`` is for one of them, any object, for all."""
        found = [value]
        with self._naming():
            dist.broadcast_object_list(found, rank)
        return found[0]

    @contextmanager
    def waited_for(self) -> Iterator[Listener]:
        """For work of the first alone that may take longer than the others wait, who call ``wait`` meanwhile: told of
        its progress, the listener that is given lets them wait on."""

        def tell(event: Event) -> None:
            if isinstance(event, TaskAdvanced):
                self._say(_GOES_ON)

        if self.count == 1:
            yield lambda event: None
            return
        try:
            yield tell
        except BaseException:
            self._say(_FAILED)
            raise
        self._say(_DONE)

    def wait(self) -> None:
        """Return when the first has left ``waited_for``; RankError where it failed there."""
        while (said := self._say(_GOES_ON)) != _DONE:
            if said == _FAILED:
                raise RankError("rank 0 has failed", is_told=True)

    def _say(self, state: int) -> int:
        said = torch.tensor([state])
        with self._naming():
            dist.broadcast(said, 0)
        return int(said)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """RankError in the place of gloo's, with who has gone, which the first finds out."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(self._who_has_gone(str(error))) from error

    def _who_has_gone(self, reason: str) -> str:
        try:
            dist.monitored_barrier(self._watch, timeout=_NAMING, wait_all_ranks=True)
        except RuntimeError as error:
            _, found, rest = str(error).partition("Ranks ")
            if found:
                return f"rank {rest.split(' failed')[0]} has gone or does not answer"
        if "onnection" in reason:
            return "another process of the training has gone"
        return f"what processes of the training tell each other was cut off: {' '.join(reason.split())[:120]}"


ALONE = Ranks()
"""One process."""


class StepSum:
    """The gradients of one step's batches, each computed by one process, added up in the batches' order by all.

    The same bits as one process gives that computes them one after the other. Holds the parameters' bytes once for
    every process.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ranks = ranks
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    @staticmethod
    def nbytes(model: nn.Module, ranks: Ranks) -> int:
        """What is held beside the gradients: what is told, what all have told, the sums, and one that is added."""
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        return (ranks.count + 3) * parameters if ranks.count > 1 else 0

    def add(self, loss: float, batches: int) -> list[float]:
        """Add what the last backward of every process has left in the parameters' gradients; of the first ``batches``
        of them, as the others had no batch. Their losses, in the batches' order."""
        if self._ranks.count == 1:
            return [loss]
        gradients = [parameter.grad for parameter in self._parameters]
        there = [gradient is not None for gradient in gradients]
        packed = [torch.tensor([loss], dtype=torch.float64), torch.tensor(there)]
        packed += [
            torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        sizes = [part.nbytes for part in packed]
        own = torch.cat([part.reshape(-1).view(torch.uint8) for part in packed])
        losses = []
        for found in self._ranks.gathered(own)[:batches]:
            said, have, *parts = torch.split(found, sizes)
            losses.append(float(said.clone().view(torch.float64)))
            for place, part in enumerate(parts):
                if have[place]:
                    self._add(place, part)
        for parameter in self._parameters:
            parameter.grad = None
        return losses

    def _add(self, place: int, part: Tensor) -> None:
        parameter, total = self._parameters[place], self._sums[place]
        gradient = part.clone().view(parameter.dtype).view(parameter.shape)  # bytes need not be aligned
        if total is None:
            self._sums[place] = gradient
        else:
            total += gradient

    def finish(self) -> None:
        """Put the sums where the optimizer looks for them."""
        if self._ranks.count > 1:
            for parameter, total in zip(self._parameters, self._sums, strict=True):
                parameter.grad = total


class RunningStatistics:
    """The running mean and variance of batch norms, updated batch after batch whatever process computes them.

    Within a batch a norm leaves the batch's own statistics in its buffers (momentum 1), and ``fold`` brings them
    together with what they were, as torch does: (1 - m) · before + m · of the batch.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        self._norms = [
            (module, cast(Tensor, module.running_mean), cast(Tensor, module.running_var), tracked)
            for module in norms
            if (tracked := module.num_batches_tracked) is not None
        ]
        self._of_batch: list[Tensor] = []

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Within, a forward leaves its own statistics, which are put aside for ``fold``; afterwards, whatever happens,
        buffers are as before. ModelError where a norm takes those of two inputs."""
        before = [[buffer.clone() for buffer in buffers] for _, *buffers in self._norms]
        momenta = [module.momentum for module, *_ in self._norms]
        for module, *_ in self._norms:
            module.momentum = 1.0
        try:
            yield
            self._of_batch = [
                buffer.to(torch.float64, copy=True)
                for _, mean, variance, _ in self._norms
                for buffer in (mean, variance)
            ]
            calls = [int(tracked - kept) for (*_, tracked), (*_, kept) in zip(self._norms, before, strict=True)]
        finally:
            for (module, *buffers), momentum, kept in zip(self._norms, momenta, before, strict=True):
                module.momentum = momentum
                for buffer, values in zip(buffers, kept, strict=True):
                    buffer.copy_(values)
        if max(calls, default=0) > 1:
            raise ModelError("a batch norm that is called twice in a model would keep statistics of the second only")

    def fold(self, batches: int) -> None:
        """Take in those of the first ``batches`` processes, in their order."""
        if not self._norms:
            return
        sizes = [len(values) for values in self._of_batch]
        for found in self._ranks.gathered(torch.cat(self._of_batch))[:batches]:
            parts = iter(torch.split(found, sizes))
            for module, mean, variance, tracked in self._norms:
                of_batch = next(parts), next(parts)
                if not module.training:
                    continue
                tracked += 1
                momentum = 1 / float(tracked) if module.momentum is None else module.momentum
                for buffer, values in zip((mean, variance), of_batch, strict=True):
                    buffer.mul_(1 - momentum).add_(values.to(buffer.dtype), alpha=momentum)
