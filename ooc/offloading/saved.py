# SPDX-License-Identifier: Apache-2.0
"""The tensors that autograd saves while a module runs, each stored or recomputed according to a plan.

A module is a chain of *layers* that are called one after the other. Its saved tensors are grouped into *items*: item 2n
+ 1 is what layer n's call saves; item 2n is what is saved before that call, and the layer's inputs. The backward pass
needs the items in reverse order.

A storage is moved once, however many saved tensors are views of it, and belongs to the first item that saves it.
Storages of parameters, buffers and the module's inputs stay where they are. So does what is saved before the module is
called, by other modules or for another step. Recomputation is ``torch.utils.checkpoint``, which draws the same random
numbers again.
"""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ooc.errors import BudgetError, ModelError
from ooc.offloading.tiers import Tier, landing_bytes
from ooc.plan.workload import Fate
from ooc.prefetch.engine import PAGE_BYTES
from ooc.sizes import format_size

_LISTS = nn.Sequential, nn.ModuleList, nn.ModuleDict
CallHook = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""A function that is told the arguments of each call of the module."""


_SET = "forward", "__reduce_ex__"
"""What is set on modules within a block."""


def layers_of(module: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of ``module`` with their names.

    They are the members of its lists and sequences, nested ones too, and its other children.
    """

    def found(module: nn.Module, name: str, listed: bool) -> Iterator[tuple[nn.Module, str]]:
        of_lists = isinstance(module, _LISTS)
        if of_lists or (not listed and any(isinstance(part, nn.ModuleList) for part in module.modules())):
            for its_name, child in module.named_children():
                yield from found(child, f"{name}.{its_name}".lstrip("."), of_lists)
        elif name:
            yield module, name

    of_lists = isinstance(module, _LISTS)
    return dict(pair for name, child in module.named_children() for pair in found(child, name, of_lists))


@dataclass(slots=True)
class Sizes:
    """The sizes of an item, in bytes, its layer's name, and whether it may be recomputed.

    ``nbytes``: its storages; ``landing_bytes``: the memory that they return to; ``largest_bytes``: the largest storage;
    ``given_bytes``: the inputs of the call after it.
    """

    nbytes: int = 0
    landing_bytes: int = 0
    largest_bytes: int = 0
    given_bytes: int = 0
    repeatable: bool = True
    name: str = "the end"


class _Call:
    """A call of the module; it stays alive as long as anything that the call saved."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Entry:
    """A storage that is kept in a tier until no saved tensor needs it."""

    tier: Tier
    token: Any
    nbytes: int
    coming: bool = False
    bytes: Tensor | None = None

    def __del__(self) -> None:
        self.tier.drop(self.token)


@dataclass(eq=False, slots=True)
class _StoredTensor:
    """A saved tensor that is a view of an entry; the backward pass needs it at ``item``."""

    call: _Call | None
    item: int
    entry: _Entry
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


@dataclass(eq=False, slots=True)
class _KeptTensor:
    """A saved tensor that stays where it is, with its version when it was saved."""

    call: _Call | None
    item: int
    tensor: Tensor
    version: int


@dataclass(slots=True)
class _SeenStorage:
    """A storage that belongs to an item; it may have been freed. ``counter``: an empty tensor with the version counter
    of the saved tensor."""

    storage: StorageWeakRef
    item: int
    entry: "weakref.ref[_Entry] | None" = None
    counter: Tensor | None = None

    @property
    def gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def counts(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` shares this storage's version counter, as ordinary views do.

        Parts made by ``unsafe_chunk``, which GRU and LSTM write into one by one, have their own counters.
        """
        assert self.counter is not None
        before = self.counter._version
        with _unsafe_preserve_version_counter(tensor):
            increment_version(tensor)
            return self.counter._version != before


def _reduced(module: nn.Module, own: dict[str, Any], protocol: Any) -> Any:
    """Return what ``module`` is copied or pickled by, as outside a block: calls of a copy are not of the module."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    made, given, state, *rest = reduced
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in _SET} | own
    return made, given, state, *rest


class Saving:
    """The hooks that store or recompute what ``module`` saves while it is called within ``applied``.

    ``fates``: the fate of an item; ``tiers``: where items of a fate go; without a tier they stay. ``windows``: bytes
    that may be on their way back early when the backward pass is at an item. ``most``: the planned bytes of each item,
    and ``spare``: bytes by which all items together may exceed them. These may be set before each call. ``moved`` is
    called when another item begins, in the forward pass (True) or the backward pass.
    """

    def __init__(self, module: nn.Module, moved: Callable[[bool, int], None] = lambda forward, item: None) -> None:
        self.module = module
        self.fates: Callable[[int], Fate] = lambda item: Fate.DEVICE
        self.tiers: Mapping[Fate, Tier] = {}
        self.windows: Sequence[int] = ()
        self.most: Sequence[int] | None = None
        self.spare = self._left = 0
        self.sizes: dict[int, Sizes] = defaultdict(Sizes)
        self._moved = moved
        self._item = self._reached = 0
        self._calling = self._within = self._returning = self._over = False
        self._current: _Call | None = None
        self._call: Callable[[], _Call | None] = lambda: None
        self._known: set[int] = set()
        self._seen: dict[tuple[int, int], list[_SeenStorage]] = defaultdict(list)
        self._given: dict[int, _SeenStorage] = {}
        self._waiting: list[weakref.ref[_Entry]] = []
        self._coming_bytes = 0

    # ---- calls of the module and of its layers -------------------------------------------------------------

    @contextmanager
    def applied(self, before: CallHook = lambda given, named: None) -> Iterator[None]:
        """Within this context, calls of the module and backward passes follow the fates; ``before`` is called before
        each."""
        wrapped = {self.module: self._module_call(self.module.forward, before)}
        for layer, name in layers_of(self.module).items():
            wrapped[layer] = self._layer_call(layer, name, layer.forward)
        own = {module: {"forward": vars(module)["forward"]} for module in wrapped if "forward" in vars(module)}
        try:
            for module, forward in wrapped.items():
                module.forward = forward
                vars(module)["__reduce_ex__"] = partial(_reduced, module, own.get(module, {}))
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._over = True
            for module in wrapped:
                for name in _SET:
                    vars(module).pop(name, None)
                vars(module).update(own.get(module, {}))

    def _module_call(self, forward: Callable[..., Any], before: CallHook) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled() or self._calling:
                return forward(*given, **named)
            self._check_freed()
            before(given, named)
            of_call = tensors_of(tree_leaves((given, named)))
            self._begin([*self.module.parameters(), *self.module.buffers(), *of_call])
            try:
                return forward(*given, **named)
            finally:
                self._calling = False

        return run

    def _check_freed(self) -> None:
        """Raise ModelError if tensors that the last call saved are still alive."""
        self._current = None
        if self._call() is not None:
            gc.collect()  # an error's traceback may hold it
        if self._call() is not None:
            raise ModelError("the module is called again before the backward pass of its last call")

    def _begin(self, known: Iterable[Tensor]) -> None:
        self._current, self._calling, self._returning, self._reached = _Call(), True, False, -1
        self._left = self.spare
        self._is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._call = weakref.ref(self._current)
        self._known = {t.untyped_storage()._cdata for t in known if _is_plain(t)}
        self.sizes = defaultdict(Sizes)
        for past in (self._seen, self._given, self._waiting):
            past.clear()
        self._coming_bytes = 0
        self._move(0)

    def _layer_call(self, layer: nn.Module, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(item: int, called: TreeSpec, settings: list[Any], *leaves: Any) -> Any:
            """Call the layer, in the forward pass or again in the backward pass."""
            if not self._calling:
                self._reach(item)
                if settings != _settings_of(layer):
                    raise ModelError(
                        f"parameters, buffers or modes of {name} were changed between the forward and the backward "
                        "pass, which computes it again; change them when the backward pass is over"
                    )
            given, named = tree_unflatten(leaves, called)
            return forward(*given, **named)

        def run(*given: Any, **named: Any) -> Any:
            if not self._calling or self._within or not torch.is_grad_enabled():
                return forward(*given, **named)
            before, item = self._item, self._item + 1
            leaves, called = tree_flatten((given, named))
            self._assign_inputs(before, leaves)
            self.sizes[before].name, self.sizes[item].name = f"before {name}", name
            state, settings = _state_of(layer, leaves), list[Any]()
            self._within = True
            self._move(item)
            try:
                if self.fates(item) is Fate.RECOMPUTE:
                    made = checkpoint(partial(compute, item, called, settings), *leaves, use_reentrant=False)
                else:
                    made = compute(item, called, settings, *leaves)
            finally:
                self._within = False
            if self.fates(item) is Fate.RECOMPUTE:
                settings.extend(_settings_of(layer))
            # A second run would update running statistics again.
            tracks = any(getattr(part, "track_running_stats", False) and part.training for part in layer.modules())
            self.sizes[item].repeatable = state == _state_of(layer, leaves) and not tracks
            self._move(item + 1)
            return made

        return run

    def _move(self, item: int) -> None:
        self._item = item
        self._moved(True, item)

    def _assign_inputs(self, item: int, given: Iterable[Any]) -> None:
        """Assign a layer's inputs to the item before it, except those that belong to an earlier item."""
        storages = {}
        for tensor in given:
            if isinstance(tensor, Tensor) and _is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    storages[storage._cdata] = storage
        for key, storage in storages.items():
            if (seen := self._given.get(key)) is None or seen.gone:
                self._given[key] = _SeenStorage(StorageWeakRef(storage), item)  # type: ignore[no-untyped-call]
        self.sizes[item].given_bytes = sum(storage.nbytes() for storage in storages.values())

    # ---- what autograd saves -------------------------------------------------------------------------------

    @torch.no_grad()
    def _pack(self, tensor: Tensor) -> _KeptTensor | _StoredTensor:
        # Tensors saved during a backward pass, but not by it, belong to another call.
        is_outside = self._returning and torch._C._current_graph_task_id() == -1
        call = None if is_outside else self._current
        if call is None or not _is_plain(tensor):
            return _KeptTensor(call, -1, tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        is_made = self._calling or tensor.requires_grad
        is_part = not is_made and tensor.nbytes < storage.nbytes()  # for instance labels: it existed before the loss
        if storage.nbytes() < PAGE_BYTES or storage._cdata in self._known or is_part:
            return _KeptTensor(call, -1, tensor.detach(), tensor._version)
        key = storage._cdata, tensor._version  # after an in-place change it counts as another storage
        there = self._seen[key] = [one for one in self._seen[key] if not one.gone]
        whole, marks = tensor, (tensor.is_conj(), tensor.is_neg())
        tensor = _as_stored(tensor, *marks)
        seen = next((one for one in there if one.counts(tensor)), None)
        if seen is None:
            given = self._given.get(storage._cdata)
            item = self._item if given is None or given.gone else given.item
            counter = tensor.detach()
            counter.data = counter.new_empty(0)
            seen = _SeenStorage(StorageWeakRef(storage), item, counter=counter)  # type: ignore[no-untyped-call]
            there.append(seen)
            self._count(item, storage.nbytes())
        tier = self.tiers.get(self.fates(seen.item))
        if tier is None:
            return _KeptTensor(call, self._item, whole.detach(), whole._version)
        entry = None if seen.entry is None else seen.entry()
        if entry is None:
            entry = _Entry(tier, tier.put(storage), landing_bytes(storage.nbytes()))
            seen.entry = weakref.ref(entry)
            self._waiting.append(seen.entry)
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _StoredTensor(call, self._item, entry, tensor.dtype, *place, *marks)

    def _count(self, item: int, nbytes: int) -> None:
        sizes = self.sizes[item]
        before = sizes.nbytes
        sizes.nbytes += nbytes
        sizes.landing_bytes += landing_bytes(nbytes)
        sizes.largest_bytes = max(sizes.largest_bytes, nbytes)
        if self.most is None:
            return
        most = self.most[item] if item < len(self.most) else 0
        self._left -= max(0, sizes.nbytes - max(before, most))
        if self._left < 0:
            reason = (
                "what follows the module, as a loss does, may save as much as a cross-entropy of what it gives, and "
                "half of what the budget leaves; make it part of the module, or give more memory"
            )
            if self._is_cast:
                reason = "what torch.autocast saves cannot be counted beforehand; enter it within the module's forward"
            for name, part in self.module.named_modules():
                if isinstance(part, nn.RNNBase):
                    reason = f"what {type(part).__name__} ({name}) saves of a sequence cannot be counted beforehand; "
                    reason += "offload the parts beside it"
            raise BudgetError(
                f"what is saved by {sizes.name} comes to {format_size(sizes.nbytes)}, and {format_size(most)} was "
                f"planned: {reason}"
            )

    @torch.no_grad()
    def _unpack(self, saved: _KeptTensor | _StoredTensor) -> Tensor:
        self._returning = self._returning or (saved.call is not None and not self._calling)
        if saved.item >= 0:
            self._reach(saved.item)
        if isinstance(saved, _KeptTensor):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"it is at version {saved.tensor._version}, and was saved at {saved.version}"
                )
            return saved.tensor
        if self._over:
            raise ModelError("the backward pass has to run within the ooc.offload block")
        entry = saved.entry
        if entry.bytes is None:
            self._coming_bytes -= entry.nbytes if entry.coming else 0
            entry.bytes = entry.tier.take(entry.token)
        self._fetch_ahead()
        base = entry.bytes.view(saved.dtype)
        tensor = base.as_strided(saved.size, saved.stride, base.storage_offset() + saved.offset)
        return _as_stored(tensor, saved.is_conj, saved.is_neg)

    def _reach(self, item: int) -> None:
        """Note that the backward pass has come to an item."""
        if self._reached < 0 or item < self._reached:
            self._reached = item
            self._moved(False, item)
        self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Begin to fetch what is needed next, as far as there is room beside what the step takes."""
        room = self.windows[self._reached] if self._reached < len(self.windows) else 0
        while self._waiting:
            entry = self._waiting[-1]()
            if entry is not None and entry.bytes is None and not entry.coming:
                if self._coming_bytes + entry.nbytes > room:
                    return
                entry.coming = True
                self._coming_bytes += entry.nbytes
                entry.tier.fetch(entry.token)
            self._waiting.pop()


def contents_of(leaves: Iterable[Any]) -> Iterator[Any]:
    """Yield what a call is given; of PyG's data the names and the values."""
    for leaf in leaves:
        if not hasattr(leaf, "stores"):
            yield leaf
        for store in getattr(leaf, "stores", ()):
            for named in store.items():
                yield from named


def tensors_of(leaves: Iterable[Any]) -> list[Tensor]:
    """Return the tensors with memory of their own that a call is given, also within PyG's data."""
    return [one for one in contents_of(leaves) if isinstance(one, Tensor) and one.layout is torch.strided]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an ordinary dense tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _settings_of(layer: nn.Module) -> list[Any]:
    """Return what a recomputation of ``layer`` depends on beside its inputs: parameters, buffers and modes."""
    tensors = [*layer.parameters(), *layer.buffers()]
    places = [tensor.untyped_storage()._cdata if _is_plain(tensor) else 0 for tensor in tensors]
    return [
        [(id(one), one._version, place, one.requires_grad) for one, place in zip(tensors, places, strict=True)],
        [part.training for part in layer.modules()],
    ]


def _as_stored(tensor: Tensor, is_conj: bool, is_neg: bool) -> Tensor:
    """Return the tensor without torch's lazy conjugate and negative bits, or with them again."""
    tensor = tensor.conj() if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def _state_of(layer: nn.Module, given: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the versions of the layer's buffers and inputs, which change when the layer changes them."""
    tensors = [*layer.buffers(), *(leaf for leaf in given if isinstance(leaf, Tensor))]
    return [(id(tensor), tensor._version) for tensor in tensors]
