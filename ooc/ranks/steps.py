# SPDX-License-Identifier: Apache-2.0
"""What processes that train by batches add up after each batch, in the batches' order: gradients, and statistics of
batch norms."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ooc.errors import ModelError
from ooc.ranks.group import Ranks


class StepSum:
    """The gradients of one step's batches, each computed by one process, added up by all in the batches' order.

    The bits are those of one process that computes the batches one after the other. It holds the parameters' bytes once
    for every process.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._ranks = ranks
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    @staticmethod
    def nbytes(model: nn.Module, ranks: Ranks) -> int:
        """Return the bytes held beside the gradients: those sent, those received, the sums, and one that is added."""
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        return (ranks.count + 3) * parameters if ranks.count > 1 else 0

    def add(self, loss: float, batches: int) -> list[float]:
        """Add what the last backward of every process has left in the parameters' gradients, for the first ``batches``
        processes, as the others had no batch. Return their losses, in the batches' order."""
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
            for place, (parameter, part) in enumerate(zip(self._parameters, parts, strict=True)):
                if have[place]:
                    gradient = part.clone().view(parameter.dtype).view(parameter.shape)  # bytes need not be aligned
                    total = self._sums[place]
                    self._sums[place] = gradient if total is None else total.add_(gradient)
        for parameter in self._parameters:
            parameter.grad = None
        return losses

    def finish(self) -> None:
        """Put the sums where the optimizer looks for them."""
        if self._ranks.count > 1:
            for parameter, total in zip(self._parameters, self._sums, strict=True):
                parameter.grad = total


class RunningStatistics:
    """The running mean and variance of batch norms, updated batch after batch whatever process computes them.

    Within a batch a norm leaves the batch's own statistics in its buffers (momentum 1), and ``fold`` combines them with
    the previous ones as torch does: (1 - m) · before + m · the batch's.
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
        """A context for a forward that leaves its own statistics, which are kept for ``fold``; afterwards buffers are
        as before, in any case. Raises ModelError if a norm sees two inputs."""
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
        """Fold in those of the first ``batches`` processes, in order."""
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
