# SPDX-License-Identifier: Apache-2.0
"""The memory a module saves and takes, item by item, found by dry runs on torch's meta device.

Meta tensors have sizes and no content. The resulting plan is dry-run as well, so that its peak is counted and not just
forecast.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ooc.errors import BudgetError
from ooc.model.layers.conformance import Watch
from ooc.offloading.saved import Saving, Sizes
from ooc.offloading.tiers import Nowhere, staging_bytes
from ooc.plan.chain import Saved, leanest, plan_chain, shortage
from ooc.plan.hardware import Hardware
from ooc.plan.workload import Fate
from ooc.sizes import format_size

META = torch.device("meta")
Step = Callable[[nn.Module], Any]
"""A function that calls the module it is given, a copy on the meta device, and returns the outputs."""
_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingPlan:
    """A plan for what a module saves, by item: its fate, its name, the most bytes it may have.

    ``windows``: bytes that may be on their way back early when the backward pass is at an item. The plan takes at most
    ``nbytes`` of the device (or of the only memory), ``host_bytes`` of the host, and ``ssd_bytes`` of the SSD, which is
    written through ``staging_bytes`` of memory.
    """

    fates: tuple[Fate, ...]
    names: tuple[str, ...]
    most: tuple[int, ...]
    windows: tuple[int, ...]
    nbytes: int
    host_bytes: int
    ssd_bytes: int
    staging_bytes: int

    def fate_of(self, item: int) -> Fate:
        """Return an item's fate; an unplanned item stays on the device, where its bytes count as unplanned."""
        return self.fates[item] if item < len(self.fates) else Fate.DEVICE

    def bytes_by_fate(self) -> dict[Fate, int]:
        """Return the saved bytes by the place where they are kept."""
        each = list(zip(self.fates, self.most, strict=True))
        return {fate: sum(nbytes for its, nbytes in each if its is fate) for fate in Fate if fate is not Fate.RECOMPUTE}


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` on the meta device, made without copying the content of any tensor."""
    held = [leaf for part in module.modules() for leaf in tree_leaves(vars(part)) if type(leaf) is Tensor]
    memo: dict[int, Any] = {
        id(leaf): leaf.detach().to(META).requires_grad_(leaf.is_leaf and leaf.requires_grad) for leaf in held
    }
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to(META)
    made = copy.deepcopy(module, memo)
    for part in made.modules():
        for hooks in (part._forward_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()  # the caller's hooks may read or keep values
    return made


@dataclass(frozen=True, slots=True)
class _Trial:
    """The result of a dry run: items' sizes, and the peak bytes and the seconds of each item, forward (True) and
    backward."""

    sizes: dict[int, Sizes]
    peaks: dict[tuple[bool, int], int]
    seconds: dict[tuple[bool, int], float]

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values(), default=0)

    def peak_of(self, item: int) -> int:
        return max(self.peaks.get((forward, item), 0) for forward in (True, False))


class _Meter(Watch):  # type: ignore[no-untyped-call]
    """A counter of bytes by item, which also estimates seconds from what operators read, write and multiply."""

    def __init__(self, known: Sequence[Tensor], hardware: Hardware) -> None:
        super().__init__(known)
        self.at = True, -1
        self.peaks: dict[tuple[bool, int], int] = defaultdict(int)
        self.seconds: dict[tuple[bool, int], float] = defaultdict(float)
        self._hardware = hardware.processor

    def move(self, forward: bool, item: int) -> None:
        """Start another item, with its own peak."""
        self.peaks[self.at] = max(self.peaks[self.at], self.peak_bytes)
        self.at = forward, item
        self.peak_bytes = self.peaks[self.at]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        leaves = tree_leaves((args, kwargs, made))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
        if not func.is_view and tensors:
            rates = self._hardware.multiplies_per_s
            seconds = sum(tensor.nbytes for tensor in tensors) / self._hardware.stream_bytes_per_s
            if (flops := self.flops.get(func.overloadpacket)) is not None:
                name = str(tensors[0].dtype).removeprefix("torch.")
                seconds += flops(*args, **(kwargs or {}), out_val=made) / 2 / rates.get(name, rates["float32"])
            self.seconds[self.at] += seconds + self._hardware.seconds_per_operator
        return made


class DryRuns:
    """Dry runs of ``step`` with a copy of ``module``; ``within`` gives a context for both passes with the copy.

    ``known``: meta tensors that the step is given and that do not count. A cross-entropy stands for what follows the
    module. ``least_bytes``: what a step takes at least; set when a plan was refused.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Step,
        hardware: Hardware,
        *,
        known: Sequence[Tensor] = (),
        within: Callable[[nn.Module], AbstractContextManager[None]] = lambda module: nullcontext(),
    ) -> None:
        self._module, self._step, self.hardware, self._within = on_meta(module), step, hardware, within
        self.least_bytes = 0
        self._known = [*known, *self._module.parameters(), *self._module.buffers()]
        self._kept = self.run(lambda item: Fate.HOST)

    @property
    def kept_bytes(self) -> int:
        """The peak bytes of a step in which nothing is moved."""
        return self._kept.peak_bytes

    def run(self, fates: Callable[[int], Fate]) -> _Trial:
        """Run one step forward and backward, with new gradients."""
        meter = _Meter(self._known, self.hardware)
        saving = Saving(self._module, meter.move)
        saving.fates, saving.tiers = fates, {Fate.SSD: Nowhere()}
        if self.hardware.has_device_memory:
            saving.tiers = {Fate.SSD: Nowhere(), Fate.HOST: Nowhere()}
        self._module.zero_grad(set_to_none=True)
        # A mask is assumed to select everything.
        every = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]), META, every, meter, self._within(self._module), saving.applied():
            made = [t for t in tree_leaves(self._step(self._module)) if isinstance(t, Tensor) and t.requires_grad]
            rows = [t.flatten(0, -2) if t.dim() > 1 else t.reshape(1, -1) for t in made]
            labels = [torch.zeros(len(t), dtype=torch.int64) for t in rows]
            torch.autograd.backward([*map(F.cross_entropy, rows, labels)])
        meter.move(True, -1)
        return _Trial(dict(saving.sizes), dict(meter.peaks), dict(meter.seconds))

    def plan(self, gpu_budget: int, host_budget: int) -> SavingPlan:
        """Return the plan of the least forecast time within the budgets; raise BudgetError with the least that would
        suffice.

        On the CPU both budgets bound the same memory and add up.
        """
        on_device = self.hardware.has_device_memory
        has = gpu_budget if on_device else gpu_budget + host_budget
        if self.kept_bytes <= has:  # moving nothing is the fastest
            return self._planned([_kept_fate(self.hardware)] * len(self._kept.sizes), self._kept, has, 0, 0)
        items = self._items()
        staging = staging_bytes(max(sizes.largest_bytes for sizes in self._kept.sizes.values()))
        beside, host_beside = (0, staging) if on_device else (staging, 0)
        room, host = has - beside, host_budget - host_beside if on_device else 0
        allowed = room
        for _ in range(_TRIES):
            try:
                found = plan_chain(items, max(0, allowed), max(0, host), self.hardware)
            except BudgetError:
                break
            trial = self.run(found.fates.__getitem__)
            if trial.peak_bytes <= room:
                return self._planned(found.fates, trial, has, beside, found.host_bytes + host_beside)
            allowed -= trial.peak_bytes - room
        least = leanest(items, self.hardware)
        trial, least_host = self.run(least.fates.__getitem__), least.host_bytes + host_beside
        if trial.peak_bytes > room or (on_device and least_host > host_budget):
            saved = format_size(sum(sizes.nbytes for sizes in self._kept.sizes.values()))
            what = f"a step of a module that saves {saved} for its backward pass"
            self.least_bytes = trial.peak_bytes + beside
            raise BudgetError(shortage(what, self.least_bytes, least_host, (has, host_budget), self.hardware))
        return self._planned(least.fates, trial, has, beside, least_host)

    def _items(self) -> list[Saved]:
        kept = self._kept
        away = self.run(lambda item: Fate.SSD)

        def again(item: int) -> Fate:
            return Fate.RECOMPUTE if item % 2 and kept.sizes[item].repeatable else Fate.SSD

        recomputed = self.run(again)
        items, so_far = [], 0
        for item, sizes in sorted(kept.sizes.items()):
            so_far += sizes.nbytes
            shared = kept.sizes[item - 1].given_bytes if item % 2 else 0
            repeats = again(item) is Fate.RECOMPUTE
            items.append(
                Saved(
                    name=sizes.name,
                    nbytes=max(sizes.nbytes, recomputed.sizes[item].nbytes),
                    recompute_s=kept.seconds.get((True, item), 0.0) if repeats else None,
                    forward_s=kept.seconds.get((True, item), 0.0),
                    backward_s=kept.seconds.get((False, item), 0.0),
                    kept_bytes=max(0, kept.peak_of(item) - so_far),
                    away_bytes=max(0, away.peak_of(item) - shared),
                    recompute_bytes=max(0, recomputed.peak_of(item) - shared) if repeats else 0,
                    shared_bytes=shared,
                )
            )
        return items

    def _planned(self, fates: Sequence[Fate], trial: _Trial, has: int, staging: int, host_bytes: int) -> SavingPlan:
        """Return the plan for these fates; ``staging``: bytes for writing the SSD, within the ``has`` bytes of the
        budget."""
        sizes = [trial.sizes.get(item, Sizes()) for item in range(len(fates))]
        written = [one for one, fate in zip(sizes, fates, strict=True) if fate is Fate.SSD and one.nbytes]
        part = staging_bytes(max(one.largest_bytes for one in written)) if written else 0
        has -= min(part, staging)
        room = [has - trial.peaks.get((False, item), 0) for item in range(len(fates))]
        moves = any(
            fate not in (_kept_fate(self.hardware), Fate.RECOMPUTE) and one.nbytes
            for fate, one in zip(fates, sizes, strict=True)
        )
        return SavingPlan(
            fates=tuple(fates),
            names=tuple(one.name for one in sizes),
            most=tuple(one.nbytes for one in sizes),
            windows=tuple(accumulate(room, min)) if moves else (),
            nbytes=(has if moves else trial.peak_bytes) + min(part, staging),
            host_bytes=host_bytes,
            ssd_bytes=sum(one.landing_bytes for one in written),
            staging_bytes=part,
        )


def _kept_fate(hardware: Hardware) -> Fate:
    """Return the fate of what stays where it is computed."""
    return Fate.DEVICE if hardware.has_device_memory else Fate.HOST
