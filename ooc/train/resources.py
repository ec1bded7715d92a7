# SPDX-License-Identifier: Apache-2.0
"""What the work may use: two budgets, the disk, threads, which device computes, and the machine as it is planned for.

A device that is ``None`` is the CPU throughout.
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
from ooc.model.graph import most_joined
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
"""torch-geometric imports a part of torch that imports triton where it is installed, GPU or not."""
_NUMBA_BYTES = 130_000_000 if find_spec("numba") else 0
"""torch-geometric imports numba where it is installed; as much again are loops that it compiles, and its compiler."""
OVERHEAD_BYTES = (500_000_000 + _TRITON_BYTES if torch.version.cuda is None else 800_000_000) + _NUMBA_BYTES
"""Resident memory of the interpreter with torch, whose build for CUDA is larger and comes with triton, and
torch-geometric, besides the two budgets."""
CPU = torch.device("cpu")
NAMES = ("auto", "cpu", "cuda")


TILE_ROWS = 1024
"""Rows that the CPU computes at once where both sides of the widest product have 512 to 896 columns together, up to
twice as many with fewer, and twice that on graphs of ``_MANY_NODES``. A tile of 1 to 2 MiB keeps a stage's temporaries
in the core's cache, and its products take several times as long as launching them; it is also the unit in which
gradients are summed, which makes results independent of block rows. Where so many values are a half of a graph's rows,
as they are in small graphs with few columns, a tile is that: much of the time of one is the calls of its operators
then, and two threads have one each."""
_USUAL_VALUES, _MOST_VALUES = 1 << 19, 7 << 17
"""Of both sides of the widest product in a tile of the CPU: with more than 896 columns there are fewer rows. A block
holds whole tiles of all columns of a matrix that is read by rows, so this decides the least memory for wide rows."""
_MANY_NODES = 400_000
"""Of so many, the narrowest slab takes more than tiles do; they have twice the usual values, and half as many calls."""
_PAGE_VALUES = 1 << 10
"""Blocks of whole tiles begin where the disk's pages do if these are whole pages of float32."""
WORKING_BYTES = 32_000_000
"""Of what a device computes a tile in, whatever the widths, the layers and their number."""
BLOCKS_BYTES = 3 << 24
"""Of the blocks of two such steps, and of what is known of a usual tile's edges."""
_FEWEST_ROWS = 16
_MOST_EDGE_BYTES = 8 << 20
"""Of a matrix of a usual tile's edges, as wide as the widest of nodes: gradients of in-neighbours take as much of each
tile of a layer that is run as it is, while they wait to be added."""
_MOST_ROWS = 1 << 16
"""Of a tile on a GPU, where one of 1,024 rows is computed in less time than it takes to launch its operators; half of
that on graphs of fewer tiles, and no more than there are sixteen tiles of."""
_TILES, _TILES_OF_LARGE_GRAPHS = 16, 256

EXCHANGES = tuple(form.value for form in ExchangeForm)
"""What several processes may send each other."""
WAYS = tuple(way.value for way in ExchangeWay)
"""How that may go from GPU to GPU."""
SPILL_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""What intermediates may be kept as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the work may use and whom it tells: budgets, disk, threads, listener, and the machine as the planner is to
    see it. None of it changes a result, but for
    ``spill_dtype``: the type that intermediates are rounded to between passes, wherever they wait (None: none);
    and ``device`` (None: the CPU), whose arithmetic rounds in its own way. On a device one thread launches everything.

    ``ranks``: the processes that share the rows of the graph, of which the machine with the least memory settles what
    all may use; they have ``threads_by_rank``, and all plan for the most of these; ``link``: bytes a second that each
    receives of the others (None: to be measured).

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
    ranks: Ranks = ALONE
    threads_by_rank: Sequence[int] = ()
    link: int | None = None

    @property
    def place(self) -> torch.device:
        """Where tensors are computed."""
        return CPU if self.device is None else self.device.place

    @property
    def on_device(self) -> bool:
        """Whether the machine that is planned for has a device with memory of its own; it need not be here."""
        return self.hardware.has_device_memory

    def for_model(self, model: nn.Module, store: Store, network: Network | None, *, learnt: int = 0) -> Self:
        """With the rows of a tile settled, by the widths of the model, the store, and what kind of machine computes, so
        that no budget changes what is summed, and threads, of which a device needs one, be it here or only planned for;
        a device's tiles are lower where rows take more (``for_rows_of``). ``network``: what the model is, where that is
        known: only where it makes rows of features that come without their zeros does the width of these count, and
        only where it runs layers as they are do edges. ``learnt``: columns of the widest embedding that is trained
        along."""
        shapes = [p.shape for p in model.parameters() if not is_lazy(p)]
        x, features, nodes = store.sparse_features, store.num_features, store.num_nodes
        if store.types is not None:
            features, nodes = max(store.types.features.values()), max(store.types.nodes.values())
        if x is not None and not (network and network.makes_dense):
            shapes = [shape[:-1] if shape[1:] == (features,) else shape for shape in shapes]  # what multiplies them
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
        if of_edges and not self.on_device and (joined := most_joined(store)):
            edge_bytes = dtype_of(model).itemsize * of_edges
            edges_per_row = max(1.0, joined)
            tile_rows = min(tile_rows, _height_of(_MOST_EDGE_BYTES, ceil(edges_per_row * edge_bytes)))
        return replace(self, tile_rows=tile_rows, threads=1 if self.on_device else self.threads)

    def for_rows_of(self, computed_bytes: int, moved_bytes: int) -> Self:
        """With so few rows in a tile that ``WORKING_BYTES`` do for what is computed of them at a time,
        ``computed_bytes`` of each, and ``BLOCKS_BYTES`` for ``moved_bytes``: no power of two, or a little more would
        take half as much. OptionError if blocks are to be no whole tiles."""
        heights = (_height_of(WORKING_BYTES, computed_bytes, digits=5), _height_of(BLOCKS_BYTES, moved_bytes, digits=5))
        tile_rows = min(self.tile_rows, *heights)
        block_rows = self.limits.block_rows
        if block_rows is not None and (block_rows < 1 or block_rows % tile_rows):
            raise OptionError(f"block rows must be a multiple of {tile_rows}, not {block_rows}")
        return replace(self, tile_rows=tile_rows)

    def within_memory(self) -> Self:
        """With budgets that this machine has the memory for, which is said where they are cut. Plans are then for what
        there is: a larger budget would only promise a plan that the system kills."""
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
        """What is this process's of it, where ``ranks`` train one graph together, all with a GPU each, of which all
        take as much as the one that may take least, or all on the CPU."""
        if ranks.count == 1:
            return self
        limits, count = self.limits, ranks.local_count
        device_bytes = limits.device_bytes // count if limits.one_memory else limits.device_bytes
        own = replace(limits, device_bytes=device_bytes, host_bytes=limits.host_bytes // count)
        if len({bool(one) for one in ranks.gathered(torch.tensor([self.device is not None]))}) > 1:
            raise OptionError("some processes compute on a GPU and some on the CPU; give all of them the same device=")
        numbers = ranks.gathered(torch.tensor([own.device_bytes, own.host_bytes, self.threads]))
        (device_bytes, host_bytes, _), threads = torch.stack([*numbers]).amin(0).tolist(), [int(n[2]) for n in numbers]
        limits, hardware, link = ranks.told(lambda: (own, self.hardware, self.link))  # then all of them plan alike
        limits = replace(limits, device_bytes=device_bytes, host_bytes=host_bytes, processes=ranks.most_on_a_machine)
        ranks, limits = self._linked(ranks, limits, hardware, link)
        shared: dict[str, Any] = {"limits": limits, "hardware": hardware, "ranks": ranks, "threads": max(threads)}
        return replace(self, **shared, threads_by_rank=threads)

    def _linked(self, ranks: Ranks, limits: Limits, hardware: Hardware, link: int | None) -> tuple[Ranks, Limits]:
        """How rows go from one process to another, and how fast, as given, or as measured whichever way is faster."""
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
        """How many threads this process has, where ``threads`` are the most that any has."""
        return min([self.threads, *self.threads_by_rank[self.ranks.rank : self.ranks.rank + 1]])

    @property
    def overhead_bytes(self) -> int:
        """What the device takes of its budget beside what is planned."""
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
        """As users give them; OptionError for what makes no sense. Budgets left out are shares of what is free.
        ``memory`` is both together, where the CPU computes.

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
    """Rows of a tile where both sides of the widest product have so many columns, and x has ``features``; on a device
    with memory of its own as many as the graph has enough tiles of, whatever the columns (``for_rows_of``)."""
    if not on_device:
        values, whole_pages = min(TILE_ROWS * columns, _MOST_VALUES), _PAGE_VALUES // gcd(_PAGE_VALUES, features)
        times = 2 if nodes >= _MANY_NODES else 1
        fitting = _height_of(max(values, times * _USUAL_VALUES), columns, digits=5, unit=whole_pages)
        half = TILE_ROWS // 2 * ceil(nodes / TILE_ROWS)
        return min(fitting, max(2 * times * TILE_ROWS, half if half <= fitting else 0))
    most = max(min(nodes // _TILES, _MOST_ROWS // 2), min(nodes // _TILES_OF_LARGE_GRAPHS, _MOST_ROWS))
    return 1 << max(TILE_ROWS, most).bit_length() - 1


def _height_of(values: int, columns: int, digits: int = 1, unit: int = _FEWEST_ROWS) -> int:
    """The most rows that have so many values, a number of so many binary digits with zeros behind them; a multiple of
    ``unit``, or of a half of it, and so on, where there is one between an eighth fewer and a sixteenth more. No fewer
    than are worth a tile."""
    rows = max(_FEWEST_ROWS, values // columns)
    fine = max(_FEWEST_ROWS, 1 << rows.bit_length() - digits)
    while unit > fine:
        whole = (rows + rows // 16) // unit * unit
        if 8 * whole >= 7 * rows:
            return whole
        unit //= 2
    return rows // fine * fine


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


# ---- devices and folders --------------------------------------------------------------------------------------


def find_device(name: str | torch.device | Device) -> Device | None:
    """The device of that name; ``auto`` is the CPU, ``cuda`` torch's current GPU, or of several processes on a machine
    each one's own. So is torch's of that name. OptionError for one that cannot be used. A device is itself."""
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
    return Cuda(torch.cuda.current_device())  # kernels of Triton are launched there, wherever their tensors are


def _take_own_gpu() -> None:
    """Of the processes that torchrun has started on this machine each computes on a GPU of its own: make that torch's
    current one. OptionError where there are not as many, unless CUDA shows each process one alone."""
    count, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if count == 1 or (gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES")):
        return
    if gpus < count:
        there = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        how = "start as many, or give each process one by CUDA_VISIBLE_DEVICES"
        raise OptionError(f"{count} processes are to compute on a GPU each, and this machine has {there}; {how}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def free_device_bytes(device: Device | None) -> int | None:
    """What is free on a device with memory of its own; None where there is none, or nobody can say."""
    if device is None or device.place.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device.place)[0])


def hardware_for(device: Device | None, folder: Path) -> Hardware:
    """This machine as it has been measured with the disk of ``folder``; estimates where nobody has."""
    return known_hardware(folder, device="cpu" if device is None else device.place.type)


def spill_folder(given: str | Path | None, run: str | Path | None, graph: object) -> Path:
    """Where scratch data goes: as ``given``, else the disk of the ``run`` folder, else that of a store or its path.

    Of a graph that is neither: the current folder. A folder where nothing may be written is no such place; then it is
    the system's temporary folder, which is often in memory.
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
