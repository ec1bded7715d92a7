# SPDX-License-Identifier: Apache-2.0
"""The resources a training may use: two budgets, disk, threads, the computing device, and the machine as it is planned
for.

A device of ``None`` is the CPU throughout.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from math import ceil, gcd
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ooc.errors import OptionError
from ooc.events import Listener, caution, ignore
from ooc.memory import budgets_within, check_memory_alone, default_budgets, divide_memory
from ooc.model.graph import LAPLACIANS, largest_edge_ratio
from ooc.model.lowering.network import Network, dtype_of
from ooc.plan import UNMEASURED, Hardware, Limits
from ooc.plan.program.capacity import ExchangeForm, ExchangeWay
from ooc.prefetch.cuda import Cuda
from ooc.prefetch.device import Device
from ooc.profile import known_hardware
from ooc.ranks import ALONE, Ranks
from ooc.sizes import check_whole, format_size, parse_size
from ooc.storage.store import Store
from ooc.suggestions import check_choice

_TRITON_BYTES = 80_000_000 if find_spec("triton") else 0
"""Memory of triton, which torch-geometric imports if it is installed, with or without a GPU."""
_NUMBA_BYTES = 130_000_000 if find_spec("numba") else 0
"""Memory of numba, which torch-geometric imports if it is installed; half of it is for compiled loops and the
compiler."""
OVERHEAD_BYTES = (500_000_000 + _TRITON_BYTES if torch.version.cuda is None else 900_000_000) + _NUMBA_BYTES
"""Resident memory besides the two budgets: the interpreter with torch (whose build for CUDA is larger and comes with
triton) and torch-geometric."""
CPU = torch.device("cpu")
NAMES = ("auto", "cpu", "cuda")


TILE_ROWS = 1024
"""Rows that the CPU computes at once, if both sides of the widest product have 512 to 896 columns together; up to twice
as many with fewer columns, and twice that on graphs of ``_MANY_NODES``. A tile of 1 to 2 MiB keeps a stage's
temporaries in the core's cache, and its products take several times as long as launching them. A tile is also the unit
in which gradients are summed, so results do not depend on block rows. In small graphs with few columns, in which so
many values are more than half of the rows, a tile is half of the rows: much of its time is calls of operators, and two
threads have one tile each."""
_USUAL_VALUES, _MOST_VALUES = 1 << 19, 7 << 17
"""Values of both sides of the widest product in a tile of the CPU, usually and at most: with more than 896 columns
there are fewer rows. If a matrix is read by rows, its blocks hold whole tiles in all columns, so this decides the least
memory for wide rows."""
_MANY_NODES = 400_000
"""From this many nodes on, the narrowest slab takes more than tiles do; tiles have twice the usual values, and half as
many calls."""
_PAGE_VALUES = 1 << 10
"""Blocks of whole tiles begin at the disk's pages if these are whole pages of float32."""
WORKING_BYTES = 32_000_000
"""Bytes in which a device computes a tile, whatever the widths, the layers and their number."""
BLOCKS_BYTES = 3 << 24
"""Bytes for the blocks of two such steps, and for a usual tile's edges."""
_FEWEST_ROWS = 16
_MOST_EDGE_BYTES = 8 << 20
"""Bytes of a matrix for a usual tile's edges, as wide as the widest one for nodes: in a layer that runs as it is, the
gradients of in-neighbours take this for each tile while they wait to be added."""
_MOST_ROWS = 1 << 16
"""The most rows of a tile on a GPU, which computes one of 1,024 rows faster than its operators are launched; half as
many on graphs of fewer tiles, and at most so many that there are sixteen tiles."""
_TILES, _TILES_OF_LARGE_GRAPHS = 16, 256

EXCHANGES = tuple(form.value for form in ExchangeForm)
"""What several processes may send each other."""
WAYS = tuple(way.value for way in ExchangeWay)
"""How data may go from GPU to GPU."""
SPILL_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types in which intermediates may be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a training may use and whom it tells: budgets, disk, threads, listener, and the machine as the planner sees
    it. None of it changes a result, except ``spill_dtype``, the type that intermediates are rounded to between passes,
    wherever they wait (None: not rounded), and ``device`` (None: the CPU), whose arithmetic rounds in its own way. On a
    device one thread launches everything.

    ``ranks``: the processes that share the rows of the graph; the machine with the least memory decides what all may
    use. They have ``threads_by_rank``, and all plan for the most of these. ``link``: bytes per second that each
    receives from the others (None: to be measured). ``tile_rows``: 0 until the model is known (``for_model``), unless
    the user sets it.
    """

    limits: Limits
    tile_rows: int
    threads: int
    spill_dir: Path
    listener: Listener
    spill_dtype: torch.dtype | None = None
    hardware: Hardware = UNMEASURED
    device: Device | None = None
    ranks: Ranks = ALONE
    threads_by_rank: Sequence[int] = ()
    link: int | None = None

    @property
    def place(self) -> torch.device:
        """The device on which tensors are computed."""
        return CPU if self.device is None else self.device.place

    @property
    def on_device(self) -> bool:
        """Whether the machine that is planned for has a device with memory of its own; it need not be this machine."""
        return self.hardware.has_device_memory

    def for_model(self, model: nn.Module, store: Store, network: Network | None, *, learnt: int = 0) -> Self:
        """Return the resources with the rows of a tile and threads settled. The rows depend on the widths of the model,
        the store and the kind of machine, so no budget changes what is summed; a device needs one thread. A device's
        tiles are lower if rows take more (``for_rows_of``). ``network``: the model's values, if known: the width of
        sparse features only counts if the model makes them dense, and edges only count if layers run as they are.
        ``learnt``: columns of the widest embedding."""
        shapes = [p.shape for p in model.parameters() if not is_lazy(p)]
        x, features, nodes = store.sparse_features, store.num_features, store.num_nodes
        if store.types is not None:
            features, nodes = max(store.types.features.values()), max(store.types.nodes.values())
        if x is not None and not (network and network.makes_dense):
            # These multiply the features.
            shapes = [shape[:-1] if shape[1:] == (features,) else shape for shape in shapes]
            features = 2 * ceil(x.entries / store.num_nodes)
        columns = max([features, learnt, *chain.from_iterable(shapes)])
        both_sides = max([features, learnt, *map(sum, shapes)])
        usual = usual_tile_rows(both_sides, nodes, features=features, on_device=self.on_device)
        if store.types is not None:  # features of all types may have been summed once, and are read side by side
            joined_features = Counter[str]()
            for relation in store.types.edges:
                joined_features[relation.target] += store.types.features[relation.source]
            usual = min(usual, _height_of(2 * _USUAL_VALUES, columns + max(joined_features.values(), default=0)))
        tile_rows = self.tile_rows or usual
        of_edges = network.columns_of_edges(columns) if network and not self.tile_rows else 0
        if of_edges and not self.on_device and (joined := largest_edge_ratio(store)):
            edge_bytes = dtype_of(model).itemsize * of_edges
            edges_per_row = max(1.0, joined)
            tile_rows = min(tile_rows, _height_of(_MOST_EDGE_BYTES, ceil(edges_per_row * edge_bytes)))
        return replace(self, tile_rows=tile_rows, threads=1 if self.on_device else self.threads)

    def for_rows_of(self, computed_bytes: int, moved_bytes: int) -> Self:
        """Return the resources with so few rows in a tile that ``WORKING_BYTES`` suffice for what is computed of them
        at a time, ``computed_bytes`` each, and ``BLOCKS_BYTES`` for ``moved_bytes``; the number is no power of two, or
        little more would halve it. Raises OptionError if blocks are set to no whole tiles."""
        heights = (_height_of(WORKING_BYTES, computed_bytes, digits=5), _height_of(BLOCKS_BYTES, moved_bytes, digits=5))
        tile_rows = min(self.tile_rows, *heights)
        block_rows = self.limits.block_rows
        if block_rows is not None and (block_rows < 1 or block_rows % tile_rows):
            raise OptionError(f"block rows must be a multiple of {tile_rows}, not {block_rows}")
        return replace(self, tile_rows=tile_rows)

    def within_memory(self) -> Self:
        """Return the resources with budgets that this machine has memory for; a note says if they are cut. A larger
        budget would only promise a plan that the system kills."""
        limits, free = self.limits, free_device_bytes(self.device)
        if self.device is not None and free is None:
            free = limits.device_bytes
        device, host = budgets_within(limits.device_bytes, limits.host_bytes, device_free_bytes=free)
        if (device, host) == (limits.device_bytes, limits.host_bytes):
            return self
        if limits.one_memory:
            asked, there = f"memory of {format_size(limits.memory_bytes)} is", format_size(device + host)
        else:
            asked = f"budgets of {format_size(limits.device_bytes)} and {format_size(limits.host_bytes)} are"
            there = f"{format_size(device)} and {format_size(host)}"
        caution(self.listener, f"{asked} more than is free; planned for {there}")
        return replace(self, limits=replace(limits, device_bytes=device, host_bytes=host))

    def shared_with(self, ranks: Ranks) -> Self:
        """Return this process's part, if ``ranks`` train one graph together: either all with a GPU each, of which all
        take as much as the smallest may, or all on the CPU."""
        if ranks.count == 1:
            return self
        own = self.limits.share(ranks.local_count)
        if len({bool(one) for one in ranks.gathered(torch.tensor([self.device is not None]))}) > 1:
            raise OptionError("some processes compute on a GPU and some on the CPU; give all of them the same device=")
        numbers = ranks.gathered(torch.tensor([own.device_bytes, own.host_bytes, self.threads]))
        (device_bytes, host_bytes, _), threads = torch.stack([*numbers]).amin(0).tolist(), [int(n[2]) for n in numbers]
        limits, hardware, link = ranks.from_first(
            lambda: (own, self.hardware, self.link)
        )  # so that all processes make the same plan
        limits = replace(limits, device_bytes=device_bytes, host_bytes=host_bytes, processes=ranks.most_on_a_machine)
        ranks, limits = self._linked(ranks, limits, hardware, link)
        shared: dict[str, Any] = {"limits": limits, "hardware": hardware, "ranks": ranks, "threads": max(threads)}
        return replace(self, **shared, threads_by_rank=threads)

    def _linked(self, ranks: Ranks, limits: Limits, hardware: Hardware, link: int | None) -> tuple[Ranks, Limits]:
        """Return how rows go from one process to another, and how fast: as given, or the faster way as measured."""
        by_host, wants_host = replace(limits, exchange_by=ExchangeWay.HOST), limits.exchange_by is ExchangeWay.HOST
        device, directly = self.device, None
        if device is not None and not wants_host:
            memory = device.place, limits.device_bytes
            ranks = ranks.linked(device.backend, device.unit, *memory, lambda: free_device_bytes(device) or 0)
            if ranks.direct is not None:
                directly = replace(limits, exchange_by=ExchangeWay.DEVICE)
        if limits.is_direct and directly is None:
            raise OptionError(
                "exchange_by='device' takes a GPU for every process and torch with NCCL; leave it out, or give 'host'"
            )
        if link is not None:
            return ranks, replace(directly or by_host, link_bytes_per_s=link)
        if directly is not None:
            directly = replace(directly, link_bytes_per_s=ranks.measured_link(self.place, directly.device_bytes))
        if not limits.is_direct:
            by_host = replace(by_host, link_bytes_per_s=ranks.measured_link())
        if directly is None:
            return ranks, by_host
        is_faster = limits.is_direct or directly.link_bytes_per_s >= by_host.received_bytes_per_s(hardware)
        return ranks, directly if is_faster else by_host

    @property
    def own_threads(self) -> int:
        """The threads of this process; ``threads`` are the most that any process has."""
        return min([self.threads, *self.threads_by_rank[self.ranks.rank : self.ranks.rank + 1]])

    @property
    def overhead_bytes(self) -> int:
        """Return what the device takes of its budget beside what is planned."""
        if self.device is None:
            return 0
        return self.device.overhead_bytes + (self.ranks.direct_bytes if self.limits.is_direct else 0)

    @classmethod
    def parse(
        cls,
        gpu_budget: str | float | None = None,
        host_budget: str | float | None = None,
        *,
        memory: str | float | None = None,
        spill_dir: str | Path | None = None,
        block_rows: int | None = None,
        slab_columns: int | None = None,
        exchange: str = ExchangeForm.AUTO.value,
        exchange_by: str = ExchangeWay.AUTO.value,
        link: str | int | None = None,
        max_ssd_writes: str | int | None = None,
        tile_rows: int | None = None,
        threads: int | None = None,
        listener: Listener = ignore,
        spill_dtype: str | None = None,
        hardware: Hardware | None = None,
        device: str | torch.device | Device = "cpu",
    ) -> Self:
        """Return the resources for a user's options. Raises OptionError for invalid ones. Budgets left out are shares
        of what is free. ``memory`` is both budgets together, if the CPU computes.

        Without ``hardware``: this machine as ``ooc profile`` has measured it with this spill folder, or estimates.
        """
        counts = {"block rows": block_rows, "slab columns": slab_columns, "tile rows": tile_rows, "threads": threads}
        for name, count in counts.items():
            if count is not None:
                check_whole(count, name=name)
        check_choice("exchange", exchange, EXCHANGES)
        check_choice("exchange by", exchange_by, WAYS)
        if spill_dtype == "float16":
            raise OptionError("spill dtype float16 would lose small gradients; use bfloat16, of float32's range")
        if spill_dtype is not None:
            check_choice("spill dtype", spill_dtype, SPILL_DTYPES)
        computing = find_device(device)
        folder = Path() if spill_dir is None else Path(spill_dir)
        hardware = hardware_for(computing, folder) if hardware is None else hardware
        if not isinstance(hardware, Hardware):
            raise OptionError(f"hardware {hardware!r} is none as ooc profile measures it; its names are for ooc plan")
        if hardware.has_device_memory and computing is None:
            raise OptionError(f"hardware {hardware.name} has a device with memory, and the CPU is to compute")
        if computing is not None and not hardware.has_device_memory:
            raise OptionError(f"hardware {hardware.name} has no wire to a device, and {computing.name} is to compute")
        writes = None if max_ssd_writes is None else parse_size(max_ssd_writes, name="max ssd writes", zero=True)
        sizes = {"gpu budget": gpu_budget, "host budget": host_budget}
        given = {name: parse_size(size, name=name) for name, size in sizes.items() if size is not None}
        if memory is None:
            device_bytes, host_bytes = default_budgets(free_device_bytes(computing))
        else:
            check_memory_alone(gpu_budget, host_budget, on_device=computing is not None)
            device_bytes, host_bytes = divide_memory(parse_size(memory, name="memory"))
        return cls(
            limits=Limits(
                device_bytes=given.get("gpu budget", device_bytes),
                host_bytes=given.get("host budget", host_bytes),
                one_memory=computing is None and not given,
                block_rows=block_rows,
                slab_columns=slab_columns,
                exchange=ExchangeForm(exchange),
                exchange_by=ExchangeWay(exchange_by),
                ssd_write_bytes=writes,
            ),
            tile_rows=tile_rows or 0,
            threads=threads or torch.get_num_threads(),
            spill_dir=folder,
            listener=listener,
            spill_dtype=None if spill_dtype is None else SPILL_DTYPES[spill_dtype],
            hardware=hardware,
            device=computing,
            link=None if link is None else parse_size(link, name="link"),
        )


def usual_tile_rows(columns: int, nodes: int, *, features: int, on_device: bool) -> int:
    """Return the rows of a tile, if both sides of the widest product have ``columns`` columns and x has ``features``.
    On a device with memory of its own, return the most rows of which the graph has enough tiles, whatever the columns
    (``for_rows_of``)."""
    if not on_device:
        values, whole_pages = min(TILE_ROWS * columns, _MOST_VALUES), _PAGE_VALUES // gcd(_PAGE_VALUES, features)
        times = 2 if nodes >= _MANY_NODES else 1
        fitting = _height_of(max(values, times * _USUAL_VALUES), columns, digits=5, unit=whole_pages)
        half = TILE_ROWS // 2 * ceil(nodes / TILE_ROWS)
        return min(fitting, max(2 * times * TILE_ROWS, half if half <= fitting else 0))
    most = max(min(nodes // _TILES, _MOST_ROWS // 2), min(nodes // _TILES_OF_LARGE_GRAPHS, _MOST_ROWS))
    return 1 << max(TILE_ROWS, most).bit_length() - 1


def _height_of(values: int, columns: int, digits: int = 1, unit: int = _FEWEST_ROWS) -> int:
    """Return the most rows with this many values, rounded down to a number with few significant binary digits. It is a
    multiple of ``unit``, or of half of it, and so on, if there is one between an eighth fewer and a sixteenth more; and
    at least as many rows as are worth a tile."""
    rows = max(_FEWEST_ROWS, values // columns)
    fine = max(_FEWEST_ROWS, 1 << rows.bit_length() - digits)
    while unit > fine:
        whole = (rows + rows // 16) // unit * unit
        if 8 * whole >= 7 * rows:
            return whole
        unit //= 2
    return rows // fine * fine


def unrounded(network: Network, store: Store) -> str:
    """Return why data cannot be kept between passes in a narrower type than the model's; empty if it can."""
    if network.attends:
        return (
            "attention keeps logarithms of sums of exponentials, from which a narrower type could not give its "
            "coefficients back"
        )
    if store.num_self_loops and set(LAPLACIANS) & set(network.scalings):
        return "ChebConv on a graph with self-loops keeps intermediates in its own type"
    return ""


def spill_dtype(resources: Resources, network: Network, store: Store) -> torch.dtype:
    """Return the type in which data is kept between passes. Raises OptionError if that cannot be."""
    wanted = resources.spill_dtype or network.dtype
    if wanted.itemsize > network.dtype.itemsize:
        names = str(wanted).removeprefix("torch."), str(network.dtype).removeprefix("torch.")
        raise OptionError(f"spill dtype {names[0]} is wider than the model's {names[1]}")
    if wanted != network.dtype and (why := unrounded(network, store)):
        raise OptionError(f"{why}; leave out the spill dtype")
    return wanted


# ---- devices and folders --------------------------------------------------------------------------------------


def find_device(name: str | torch.device | Device) -> Device | None:
    """Return the device of that name: ``auto`` is the CPU; ``cuda`` is torch's current GPU, or, with several processes
    on a machine, each one's own; other names are torch's. A device is returned as it is. Raises OptionError if it
    cannot be used."""
    if isinstance(name, Device):
        return name
    if isinstance(name, torch.device):
        name = str(name)
    check_choice("device", name, NAMES)
    if name != "cuda":
        return None
    if not torch.cuda.is_available():
        raise OptionError("device cuda is not available on this machine; use device='cpu'")
    if find_spec("triton") is None:
        raise OptionError("device cuda sums neighbours by triton, which is not installed; pip install triton")
    _take_own_gpu()
    return Cuda(torch.cuda.current_device())  # Triton launches kernels there, wherever tensors are


def _take_own_gpu() -> None:
    """Make a GPU of its own torch's current one, for each process that torchrun has started on this machine. Raises
    OptionError if there are too few, unless CUDA shows each process a single one."""
    count, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if count == 1 or (gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES")):
        return
    if gpus < count:
        there = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        how = "start as many, or give each process one by CUDA_VISIBLE_DEVICES"
        raise OptionError(f"{count} processes are to compute on a GPU each, and this machine has {there}; {how}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def free_device_bytes(device: Device | None) -> int | None:
    """Return the free bytes of a device with memory of its own; None if there is none, or they are unknown."""
    if device is None or device.place.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device.place)[0])


def hardware_for(device: Device | None, folder: Path) -> Hardware:
    """Return this machine as measured with the disk of ``folder``, or estimates."""
    return known_hardware(folder, device="cpu" if device is None else device.place.type)


def spill_folder(given: str | Path | None, run: str | Path | None, graph: object) -> Path:
    """Return the folder for scratch data: as ``given``, else on the disk of the ``run`` folder, else on that of a store
    or its path.

    For a graph that is neither it is the current folder. If nothing can be written to that, it is the system's
    temporary folder, which is often in memory.
    """
    if given is not None:
        return Path(given)
    if run is not None:
        path = Path(run)
        folder = next(above for above in (path, *path.absolute().parents) if above.is_dir())
    else:
        named = graph.path if isinstance(graph, Store) else graph
        folder = Path(named).absolute().parent if isinstance(named, str | Path) else Path.cwd()
    return folder if os.access(folder, os.W_OK) else Path(gettempdir())
