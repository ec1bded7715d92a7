# SPDX-License-Identifier: Apache-2.0
"""From a model, a store and two budgets to a plan: everything that is checked and decided before a byte moves."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from tempfile import gettempdir
from typing import Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ooc.errors import BudgetError, ModelError, OptionError, StoreError
from ooc.events import Listener, Note, ignore
from ooc.memory import budgets_within
from ooc.plan import UNMEASURED, Hardware, Limits, Plan, Workload
from ooc.plan.deals import GatheredRows
from ooc.plan.planner import choose_workload
from ooc.plan.verifier import verify_plan
from ooc.plan.workload import EdgeData
from ooc.prefetch.device import Device
from ooc.sizes import format_size, parse_size
from ooc.storage.array import Array
from ooc.storage.store import Store
from ooc.train.devices import check_hardware, find_device, hardware_for, place_of
from ooc.train.first_aggregation import find_aggregation
from ooc.train.gathered_rows import counted_gathers
from ooc.train.graph import ActiveRows, GraphRows, load_rows, rows_nbytes
from ooc.train.handed_rows import counted_rows
from ooc.train.lowering import Network, lower
from ooc.train.lowering.products import IN_FULL, Products
from ooc.train.objective import Objective
from ooc.train.stages import StageBuilder, Step
from ooc.train.workload import STORE_MATRICES, HandedRows, TileEdges, counted, describe_workload, matrix_columns

TILE_ROWS = 1024
"""Rows computed at once where the widest matrix has more than 128 columns, and twice as many otherwise. A tile of 1 MiB
keeps a stage's temporaries in the core's cache, and its products take several times as long as launching them; it is
also the unit in which gradients are summed, which makes results independent of block rows."""
_NARROW_COLUMNS = 128
_MORE_ON_A_GPU = 16
"""Times so many rows on a GPU, where a tile of 1,024 is computed in less time than it takes to launch its operators, as
long as there are so many tiles; on large graphs once more twice as many."""
_TILES_OF_LARGE_GRAPHS = 256

SPILL_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""What intermediates may be kept as."""

IGNORABLE = ("none", *(data.value for data in EdgeData), "all")
"""What may be left out of what edges carry."""

Programs = Callable[[StageBuilder], dict[str, list[Step]]]
"""The programs to be planned, by the names they are run by. The planner weighs ``train`` most."""


class Saving(Enum):
    """Work that may be left out without changing any result."""

    FIRST_AGGREGATION = "first aggregation once"
    """A(X) of constant features is computed once instead of in every epoch."""
    ACTIVE_ROWS = "active rows"
    """In a store in hop order, only rows that can reach a scored row are computed."""
    SHARED_FORWARD = "one forward pass to score and to train"
    """Without dropout, the forward pass that scores an epoch's weights is the next epoch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the work may use and whom it tells: budgets, disk, threads, listener, and the machine as the planner is to
    see it. None of it changes a result, but for
    ``spill_dtype``: the type that intermediates are rounded to between passes, wherever they wait (None: none);
    and ``device`` (None: the CPU), whose arithmetic rounds in its own way. On a device one thread launches everything.

    ``tile_rows``: 0 until the model is known (``for_model``), unless the user says.
    """

    limits: Limits
    tile_rows: int
    threads: int
    spill_dir: Path
    listener: Listener
    spill_dtype: torch.dtype | None = None
    hardware: Hardware = UNMEASURED
    device: Device | None = None

    @property
    def place(self) -> torch.device:
        """Where tensors are computed."""
        return place_of(self.device)

    def for_model(self, model: nn.Module, store: Store) -> Self:
        """With the rows of a tile settled, by the widths of the model, the store, and what kind of machine computes, so
        that no budget changes what is summed, and threads, of which a device needs one, be it here or only planned for.
        OptionError if blocks are to be no whole tiles."""
        widths = (max(p.shape, default=1) for p in model.parameters() if not is_lazy(p))
        columns = max([store.num_features, *widths])
        on_device = self.hardware.has_device_memory
        tile_rows = self.tile_rows or usual_tile_rows(columns, store.num_nodes, on_device=on_device)
        block_rows = self.limits.block_rows
        if block_rows is not None and (block_rows < 1 or block_rows % tile_rows):
            raise OptionError(f"block rows must be a multiple of {tile_rows}, not {block_rows}")
        return replace(self, tile_rows=tile_rows, threads=1 if on_device else self.threads)

    def within_memory(self) -> Self:
        """With budgets that this machine has the memory for, which is said where they are cut. Plans are then for what
        there is: a larger budget would only promise a plan that the system kills."""
        limits, free = self.limits, None
        if self.device is not None:
            free = int(torch.cuda.mem_get_info(self.place)[0]) if self.place.type == "cuda" else limits.device_bytes
        device, host = budgets_within(limits.device_bytes, limits.host_bytes, device_free_bytes=free)
        if (device, host) == (limits.device_bytes, limits.host_bytes):
            return self
        asked = f"{format_size(limits.device_bytes)} and {format_size(limits.host_bytes)}"
        text = f"budgets of {asked} are more than is free; planned for {format_size(device)} and {format_size(host)}"
        if self.listener is ignore:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        self.listener(Note(text))
        return replace(self, limits=replace(limits, device_bytes=device, host_bytes=host))

    @property
    def overhead_bytes(self) -> int:
        """What the device takes of its budget beside what is planned."""
        return 0 if self.device is None else self.device.overhead_bytes

    @classmethod
    def parse(
        cls,
        gpu_budget: str | int,
        host_budget: str | int,
        *,
        spill_dir: str | Path | None = None,
        block_rows: int | None = None,
        slab_columns: int | None = None,
        max_ssd_writes: str | int | None = None,
        tile_rows: int | None = None,
        threads: int | None = None,
        listener: Listener = ignore,
        spill_dtype: str | None = None,
        hardware: Hardware | None = None,
        device: str | Device = "cpu",
    ) -> Self:
        """As users give them; OptionError for what makes no sense.

        Without ``hardware``: this machine as ``ooc profile`` has measured it with this spill folder, or estimates.
        """
        computing = find_device(device)
        folder = Path(spill_dir) if spill_dir is not None else Path(gettempdir())
        if hardware is None:
            hardware = hardware_for(computing, folder)
        check_hardware(hardware, computing)
        return cls(
            limits=Limits(
                device_bytes=parse_size(gpu_budget, name="gpu budget"),
                host_bytes=parse_size(host_budget, name="host budget"),
                block_rows=block_rows,
                slab_columns=_checked_positive(slab_columns, "slab columns"),
                ssd_write_bytes=(
                    None if max_ssd_writes is None else parse_size(max_ssd_writes, name="max ssd writes", zero=True)
                ),
            ),
            tile_rows=_checked_positive(tile_rows, "tile rows") or 0,
            threads=_checked_positive(threads, "threads") or torch.get_num_threads(),
            spill_dir=folder,
            listener=listener,
            spill_dtype=_checked_dtype(spill_dtype),
            hardware=hardware,
            device=computing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The programs of a network, and what they ask of memory, before anybody has decided what is kept where."""

    builder: StageBuilder
    steps: dict[str, list[Step]]
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model taken apart, its programs, and the plan that runs them within the budgets."""

    network: Network
    arrays: dict[str, Array]
    builder: StageBuilder
    steps: dict[str, list[Step]]
    workload: Workload
    plan: Plan


def make_setup(
    network: Network,
    store: Store,
    resources: Resources,
    active: ActiveRows,
    objective: Objective,
    programs: Programs,
    *,
    seed: int,
    extra_host_bytes: int,
    extra_device_bytes: int,
) -> Setup:
    """Admit the per-row facts, read them, and plan the rest around them.

    ``extra_host_bytes`` and ``extra_device_bytes`` are needed besides. Raises BudgetError with the least budgets
    that would do.
    """
    on_device = resources.hardware.has_device_memory
    fixed = admit_rows(network, store, resources.limits, on_device=on_device, extra_host_bytes=extra_host_bytes)
    rows = load_rows(store, network.scalings, network.dtype, on_device=on_device)
    drafts = Drafts(
        network,
        store,
        resources,
        active,
        objective,
        programs,
        rows=rows,
        tile_edges=counted(rows),
        handed_rows=counted_rows(store),
        gathered_rows=counted_gathers(store),
        seed=seed,
        fixed_host_bytes=fixed,
        extra_device_bytes=extra_device_bytes + resources.overhead_bytes,
    )
    draft, plan = drafts.choose(resources.limits, resources.hardware)
    return Setup(
        network=network,
        arrays=drafts.arrays,
        builder=draft.builder,
        steps=draft.steps,
        workload=draft.workload,
        plan=plan,
    )


def usual_tile_rows(columns: int, nodes: int, *, on_device: bool) -> int:
    """Rows of a tile where the widest matrix has so many columns, and as many as suit the CPU times a power of two on
    a device with memory of its own."""
    rows = TILE_ROWS if columns > _NARROW_COLUMNS else 2 * TILE_ROWS
    if not on_device:
        return rows
    most = min(nodes // _MORE_ON_A_GPU, _MORE_ON_A_GPU * rows)
    most = max(most, min(nodes // _TILES_OF_LARGE_GRAPHS, 2 * _MORE_ON_A_GPU * rows))
    return rows << max(0, (most // rows).bit_length() - 1)


def training_programs(builder: StageBuilder, *, share_forward: bool) -> dict[str, list[Step]]:
    """The programs of training. ``share_forward``: where scoring and training compute the same, one pass does both."""
    programs = {"prepare": builder.prepare(), "train": builder.train(), "evaluate": builder.evaluate()}
    if share_forward and builder.scores_while_training:
        programs["train_and_score"] = builder.train_and_score()
    return programs


def admit_rows(network: Network, store: Store, limits: Limits, *, on_device: bool, extra_host_bytes: int) -> int:
    """Host bytes of what is known of every row and ``extra_host_bytes``; BudgetError where the budget is smaller."""
    fixed = rows_nbytes(store, network.scalings, network.dtype.itemsize, on_device=on_device) + extra_host_bytes
    if fixed > limits.host_bytes:
        raise BudgetError(
            f"row offsets, scalings and scores of {store.num_nodes:,} nodes need {format_size(fixed)} on the host, "
            f"the host budget is {format_size(limits.host_bytes)}; give host_budget='{-(-fixed // 1000)}K'"
        )
    return fixed


class Drafts:
    """The ways to train a network on a graph, and which of them suits a machine and its budgets.

    ``tile_edges``: how edges are spread over the rows, and ``handed_rows`` the gradients that are handed to them, and
    ``gathered_rows`` the rows that are gathered. Of the graph nothing else is read here.
    """

    def __init__(
        self,
        network: Network,
        store: Store,
        resources: Resources,
        active: ActiveRows,
        objective: Objective,
        programs: Programs,
        *,
        rows: GraphRows,
        tile_edges: TileEdges,
        handed_rows: HandedRows,
        gathered_rows: GatheredRows,
        seed: int,
        fixed_host_bytes: int,
        extra_device_bytes: int,
    ) -> None:
        self.arrays = _arrays(network, store)
        self._network = network
        self._store = store
        self._resources = resources
        self._active = active
        self._objective = objective
        self._programs = programs
        self._rows = rows
        self._tile_edges = tile_edges
        self._handed_rows = handed_rows
        self._gathered_rows = gathered_rows
        self._seed = seed
        self._fixed_host_bytes = fixed_host_bytes
        self._extra_device_bytes = extra_device_bytes
        self._made: dict[frozenset[int], Draft] = {}

    def choose(self, limits: Limits, hardware: Hardware) -> tuple[Draft, Plan]:
        """The draft and plan that make the shortest epoch; verified."""
        chosen = choose_workload(lambda forgotten: self.draft(forgotten).workload, limits, hardware)
        verify_plan(chosen.plan)
        return self.draft(chosen.recomputed), chosen.plan

    def draft(self, forgotten: frozenset[int] = frozenset()) -> Draft:
        """``forgotten``: the forward stages of which the backward pass finds nothing kept and computes it again."""
        if forgotten not in self._made:
            self._made[forgotten] = self._make(forgotten)
        return self._made[forgotten]

    def _make(self, forgotten: frozenset[int]) -> Draft:
        builder = StageBuilder(
            self._network,
            self._rows,
            undirected=self._store.undirected,
            objective=self._objective,
            num_columns=matrix_columns(self._network, self._store),
            aggregated=frozenset(self.arrays),
            forgotten=forgotten,
            active=self._active,
            seed=self._seed,
            place=self._resources.place,
            on_device=self._resources.hardware.has_device_memory,
        )
        steps = self._programs(builder)
        workload = describe_workload(
            self._network,
            builder,
            self._store,
            self.arrays,
            self._tile_edges,
            self._handed_rows,
            self._gathered_rows,
            tile_rows=self._resources.tile_rows,
            fixed_host_bytes=self._fixed_host_bytes,
            spill_dtype=spill_dtype(self._resources, self._network),
            threads=self._resources.threads,
            steps=steps,
        )
        kept = workload.kept
        if spill_dtype(self._resources, self._network) != self._network.dtype:
            # What is computed again comes of rounded values: then the plan would change results.
            kept = tuple(replace(one, recomputable=False) for one in kept)
        fixed = workload.fixed_device_bytes + self._extra_device_bytes
        return Draft(builder=builder, steps=steps, workload=replace(workload, fixed_device_bytes=fixed, kept=kept))


def spill_dtype(resources: Resources, network: Network) -> torch.dtype:
    """The type of what is kept between passes; OptionError for one wider than the model computes in."""
    wanted = resources.spill_dtype or network.dtype
    if wanted.itemsize > network.dtype.itemsize:
        names = str(wanted).removeprefix("torch."), str(network.dtype).removeprefix("torch.")
        raise OptionError(f"spill dtype {names[0]} is wider than the model's {names[1]}")
    if wanted != network.dtype and network.attends:
        raise OptionError(
            "attention keeps logarithms of sums of exponentials, from which a narrower type could not give its "
            "coefficients back; leave out the spill dtype"
        )
    return wanted


def _arrays(network: Network, store: Store) -> dict[str, Array]:
    """The store's matrices, with the first aggregations that were kept and are of use."""
    arrays = {name: store.array(name) for name in STORE_MATRICES}
    for scaling in network.aggregated_once:
        kept = find_aggregation(store, scaling, network.dtype)
        if kept is not None:
            arrays[network.first_aggregation(scaling)] = kept
    return arrays


def take_apart(
    model: nn.Module,
    store: Store,
    *,
    input_dropout: float,
    tile_rows: int,
    savings: Collection[Saving],
    ignore_edge_data: str = "none",
    compute_dtype: str = "float32",
) -> tuple[Network, ActiveRows]:
    """The network that ``model`` is on the store, and the rows to compute for it. ModelError for what cannot be.

    ``ignore_edge_data``: which of the edges' weights and features are left out (``IGNORABLE``). ``compute_dtype``: what
    the factors of dense products are rounded to, if it is narrower than the model's own type.
    """

    def active_rows(hops: int) -> ActiveRows:
        if Saving.ACTIVE_ROWS not in savings:
            return ActiveRows.everything(store.num_nodes, hops)
        return whole_tiles(ActiveRows.of_store(store, hops), tile_rows)

    network = lower(
        model,
        num_features=store.num_features,
        num_classes=store.num_classes,
        input_dropout=input_dropout,
        aggregate_once=Saving.FIRST_AGGREGATION in savings,
        active=active_rows,
        edges_per_row=store.num_edges / store.num_nodes,
        edge_data=edge_data_used(store, ignore_edge_data),
        product=_products(compute_dtype),
        num_edge_features=store.num_edge_features,
    )
    return network, active_rows(network.hops)


def edge_data_used(store: Store, ignore: str) -> frozenset[EdgeData]:
    """What the store's edges carry but for what is to be ignored; OptionError for what is none of ``IGNORABLE``."""
    if ignore not in IGNORABLE:
        raise OptionError(f"edge data to ignore, {ignore!r}, is not one of {', '.join(IGNORABLE)}")
    carried = {EdgeData.WEIGHT: store.has_edge_weight, EdgeData.FEATURES: store.num_edge_features > 0}
    return frozenset(data for data in EdgeData if carried[data] and ignore not in ("all", data.value))


def whole_tiles(active: ActiveRows, tile_rows: int) -> ActiveRows:
    """``active`` with rows added up to whole tiles, so that every program cuts the rows it shares into the same
    tiles and comes to the same bits. What is computed for the rows added is wrong, and reaches no other row.
    """

    def up(rows: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(active.nodes, -(-count // tile_rows) * tile_rows) for count in rows)

    return ActiveRows(active.nodes, up(active.training), up(active.scoring))


# ---- checks ------------------------------------------------------------------------------------------------


def _checked_positive(count: int | None, name: str) -> int | None:
    """``count``, unless it is none that counts something."""
    if count is not None and count < 1:
        raise OptionError(f"{name} must be positive, not {count}")
    return count


def checked_norm(norm: float | None) -> float | None:
    """``norm``, unless gradients cannot be clipped to it."""
    if norm is not None and not norm > 0:
        raise OptionError(f"clip norm must be positive, not {norm}")
    return norm


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """ModelError for an optimizer that could not step this model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("optimizer LBFGS evaluates the loss several times a step, which is not supported")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError("optimizer SparseAdam takes sparse gradients only, these are dense; use Adam")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ModelError(f"optimizer {type(optimizer).__name__} holds parameters that are not the model's")


def check_trainable(store: Store) -> None:
    """StoreError for a store without training nodes."""
    if not store.split_sizes["train"]:
        raise StoreError(f"{store.path} has no training nodes; convert it with a split")


def _products(name: str) -> Products:
    if name not in ("float32", "bfloat16"):
        raise OptionError(f"compute dtype {name!r} is not one of float32, bfloat16")
    return Products(torch.bfloat16) if name == "bfloat16" else IN_FULL


def _checked_dtype(name: str | None) -> torch.dtype | None:
    if name is None or name in SPILL_DTYPES:
        return None if name is None else SPILL_DTYPES[name]
    if name == "float16":
        raise OptionError("spill dtype float16 would lose small gradients; use bfloat16, which has float32's range")
    raise OptionError(f"spill dtype {name!r} is not one of {', '.join(SPILL_DTYPES)}")
