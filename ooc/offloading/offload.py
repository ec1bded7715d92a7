# SPDX-License-Identifier: Apache-2.0
"""A module's forward and backward pass within budgets: each tensor that autograd saves is kept, moved to the host or
the SSD, or recomputed, whichever takes the least time. Results have the same bits as without."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import local
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from ooc.errors import ModelError, OptionError
from ooc.memory import check_memory_alone, default_budgets, return_freed_memory
from ooc.offloading.measure import META, DryRuns, SavingPlan, on_meta
from ooc.offloading.saved import Saving, contents_of, tensors_of
from ooc.offloading.tiers import Pinned, Ssd, Tier
from ooc.plan.hardware import Hardware
from ooc.plan.workload import Fate
from ooc.prefetch.engine import Counters
from ooc.profile.profile import known_hardware
from ooc.sizes import parse_size
from ooc.suggestions import checked

_CURRENT = local()
"""``block``: the block that this thread is in."""
_TRIM_BYTES = 256 << 10
"""Freed allocations of at least this size are returned to the system; smaller ones hold little of the heap."""


@checked
def offload(
    module: nn.Module,
    *,
    memory: str | int | None = None,
    gpu_budget: str | int | None = None,
    host_budget: str | int | None = None,
    spill_dir: str | Path | None = None,
    hardware: Hardware | None = None,
) -> "Offload":
    """Run ``module`` forward and backward within budgets, in a ``with`` block around both.

        with ooc.offload(model, memory="300M"):
            loss = model(x).square().mean()
            loss.backward()

    What autograd saves is kept, moved to the host, written to a nameless file in ``spill_dir``, or recomputed. The
    choice is made layer by layer (members of the module's lists and sequences, and its other children) for the least
    time that ``hardware`` forecasts (this machine as ``ooc profile`` measured it, or estimates). Gradients have the
    same bits as without the block, and the same random numbers are drawn.

    Budgets bound what a step allocates beside parameters, the module's inputs, and what the caller keeps: saved
    tensors, temporaries, gradients, buffers of the SSD; for the loss as much as a cross-entropy of the outputs takes.
    ``memory`` bounds the CPU's memory. With a GPU, ``gpu_budget`` bounds its memory and ``host_budget`` the host's (on
    the CPU they add up). Sizes are found on the meta device when the module is called, before anything is computed.
    Later calls with nothing larger use the same plan, unless parameters were frozen or modes changed since then. Raises
    BudgetError with the least memory that would suffice. Raises ModelError for a module that does not run on the meta
    device, for a call before the backward pass of the last one, and for a backward pass outside the block.
    """
    if hasattr(module, "_orig_mod"):
        raise OptionError("what torch.compile has made cannot be offloaded; offload the module that it was given")
    if any(map(is_lazy, module.parameters())):
        raise ModelError(f"parameters of {type(module).__name__} have no size yet; call it once before")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"a module on {device} cannot be offloaded: it must be on the CPU or a GPU")
    on_gpu = device.type == "cuda"
    if memory is not None:
        check_memory_alone(gpu_budget, host_budget, on_device=on_gpu)
        gpu_budget, host_budget = parse_size(memory, name="memory"), 0
    usual = default_budgets(int(torch.cuda.mem_get_info(device)[0]) if on_gpu else None)
    folder = Path(spill_dir or ".")
    gpu_bytes = usual[0] if gpu_budget is None else parse_size(gpu_budget, name="gpu budget")
    host_bytes = usual[1] if host_budget is None else parse_size(host_budget, name="host budget", zero=True)
    hardware = hardware or known_hardware(folder, device=device.type)
    return Offload(module, spill_dir=folder, hardware=hardware, device=device, budgets=(gpu_bytes, host_bytes))


class Offload:
    """The block that ``offload`` returns. Only one at a time can be entered; it may be entered again afterwards.

    ``plan``: the plan of the last call, None before the first; or a given plan, used for all calls. ``moved``: bytes
    read from and written to the SSD under that plan within the block.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: SavingPlan | None = None,
        *,
        spill_dir: Path,
        hardware: Hardware,
        device: torch.device | None = None,
        budgets: tuple[int, int] = (0, 0),
    ) -> None:
        self.module, self.plan = module, plan
        self._spill_dir, self._hardware, self._device, self._budgets = spill_dir, hardware, device, budgets
        self._fixed = plan is not None
        self._called = list[Any]()
        self._open: ExitStack | None = None
        self.moved = Counters()

    def __enter__(self) -> Self:
        if self._open is not None:
            raise OptionError("the ooc.offload block is entered already")
        if getattr(_CURRENT, "block", None) is not None:
            raise OptionError("another ooc.offload block is entered; offload one module that has both in it")
        with ExitStack() as stack:
            self._saving = saving = Saving(self.module)
            self._tiers = stack.enter_context(ExitStack())
            if self.plan is not None:
                self._allocate(self.plan)
            stack.enter_context(saving.applied(self._plan_call))
            stack.callback(setattr, _CURRENT, "block", None)
            _CURRENT.block = self
            self._open = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _plan_call(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Make a plan, unless the present one holds for this call."""
        if self._fixed:
            return
        leaves, spec = tree_flatten((given, named))
        parts = (*((one.shape, one.requires_grad) for one in self.module.parameters()),)
        modes = (*(one.training for one in self.module.modules()),)
        called = [spec, hash((parts, modes)), *map(_size_of, contents_of(leaves))]
        if self.plan is None or not _covers(self._called, called):
            try:
                meta_given, meta_named = tree_map(_on_meta, (given, named))
                known = tensors_of(tree_leaves((meta_given, meta_named)))
                runs = DryRuns(self.module, lambda copy: copy(*meta_given, **meta_named), self._hardware, known=known)
                plan = runs.plan(*self._budgets)
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ModelError(f"{type(self.module).__name__} does not run on the meta device: {reason}") from error
            self.plan = None
            self._tiers.close()
            self._allocate(plan)
            self.plan, self._called = plan, called

    def _allocate(self, plan: SavingPlan) -> None:
        """Allocate the memory and the file that the plan requires."""
        if len(set(plan.fates)) > 1:  # otherwise the heap would keep the memory that was saved
            return_freed_memory(_TRIM_BYTES, trim_bytes=_TRIM_BYTES)
        tiers: dict[Fate, Tier] = {}
        if plan.ssd_bytes:
            tiers[Fate.SSD] = ssd = Ssd(self._spill_dir, plan.ssd_bytes, plan.staging_bytes)
            self._tiers.callback(ssd.close)
            self.moved = ssd.counters
        if self._device is not None and self._device.type == "cuda":
            tiers[Fate.HOST] = Pinned(self._device)
        saving = self._saving
        saving.fates, saving.tiers, saving.windows, saving.most = plan.fate_of, tiers, plan.windows, plan.most
        has = self._budgets[0] if Fate.HOST in tiers else sum(self._budgets)
        saving.spare = max(0, has - plan.nbytes) // 2  # saved tensors have gradients of the same size


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)
        return made.requires_grad_(leaf.requires_grad)
    if isinstance(leaf, nn.Module):
        return on_meta(leaf)
    if hasattr(leaf, "stores"):  # PyG's data, which it changes in place
        return copy.copy(leaf).apply(_on_meta)
    return copy.copy(leaf).to(META) if hasattr(leaf, "to") else leaf


def _size_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dtype, leaf.requires_grad, leaf.layout is torch.strided and leaf.is_contiguous(), leaf.shape


def _covers(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return whether a call with leaves of the sizes ``now`` resembles the one ``before``, with nothing larger."""
    if len(before) != len(now):
        return False
    for one, other in zip(before, now, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple):
            same = one[:-1] == other[:-1] and len(one[-1]) == len(other[-1])
            if not same or any(a < b for a, b in zip(one[-1], other[-1], strict=True)):
                return False
        elif not isinstance(other, bool | int | float | str | torch.dtype | TreeSpec | None) or one != other:
            return False
    return True
