# SPDX-License-Identifier: Apache-2.0
"""A training epoch as a chain of phases with nested lifetimes: what has to be decided when fates are chosen.

A model of L layers has 2L phases: forward 0…L-1, backward L…2L-1 in reverse order. Intermediate i is written in
phase i, may be read in the next, and is read again in the phase that mirrors its writer, 2L-1-i. So the lifetimes
are nested: whatever is alive with intermediate i and was written before it outlives it. At *depth* k, that is in
phases k and 2L-1-k, intermediates 0…k are alive and no others.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What a phase does: seconds of computing, bytes from host to device (up) and back (down), bytes of the SSD."""

    compute_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    ssd_read_bytes: int = 0
    ssd_write_bytes: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.compute_s + other.compute_s,
            self.up_bytes + other.up_bytes,
            self.down_bytes + other.down_bytes,
            self.ssd_read_bytes + other.ssd_read_bytes,
            self.ssd_write_bytes + other.ssd_write_bytes,
        )


NOTHING = Load()


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the machine is. ``math.inf`` where there is nothing to cross, as between host and device of a CPU.

    ``ssd_both_bytes_per_s`` is what the SSD moves when it reads and writes at once. ``overlap`` is the measured part
    of the shorter work that hides behind the longest, 0 to 1. ``written_byte_s`` is what one would wait to spare the
    SSD a written byte: 0 where only time counts; a tiny value prefers, of equally fast plans, the one that writes less.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    ssd_both_bytes_per_s: float
    overlap: float
    written_byte_s: float = 0.0

    def busy_s(self, load: Load) -> tuple[float, float, float, float]:
        """Seconds that computing, the way up, the way down and the SSD are each busy with ``load``."""
        read, written = load.ssd_read_bytes, load.ssd_write_bytes
        ssd_s = max(
            read / self.ssd_read_bytes_per_s,
            written / self.ssd_write_bytes_per_s,
            (read + written) / self.ssd_both_bytes_per_s,
        )
        return load.compute_s, load.up_bytes / self.up_bytes_per_s, load.down_bytes / self.down_bytes_per_s, ssd_s

    def seconds(self, load: Load) -> float:
        """Seconds of a phase: its longest work, and what of the other work does not hide behind it."""
        busy = self.busy_s(load)
        longest = max(busy)
        return longest + (1 - self.overlap) * (sum(busy) - longest)

    def cost(self, load: Load) -> float:
        """What is minimised: seconds, and what sparing the SSD is worth."""
        return self.seconds(load) + self.written_byte_s * load.ssd_write_bytes


@dataclass(frozen=True, slots=True)
class Phase:
    """``load`` and memory of a phase whatever becomes of the intermediates: inputs, topology, slabs, staging."""

    name: str
    load: Load
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What it takes to compute an intermediate again from the one before it, once that is at hand.

    ``load`` has no traffic of the two matrices themselves, but the topology's, for instance; it writes nothing to the
    SSD. The memory is taken beside the phase's own, while this one is recomputed.
    """

    load: Load
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Intermediate:
    """``blocks`` blocks of ``block_bytes`` bytes, each of which may wait elsewhere.

    ``read_next``: the phase after its writer reads it. ``recomputation``: None where it cannot be had again.
    """

    name: str
    blocks: int
    block_bytes: int
    read_next: bool
    recomputation: Recomputation | None

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """L intermediates and 2L phases. ``source`` is one read of the input, where recomputation starts from it."""

    intermediates: tuple[Intermediate, ...]
    phases: tuple[Phase, ...]
    source: Load
    rates: Rates

    def __post_init__(self) -> None:
        assert len(self.phases) == 2 * len(self.intermediates) > 0, "two phases an intermediate"
        assert not self.intermediates[-1].read_next, "the phase after the last one's writer is its backward phase"
        assert all(i.blocks > 0 and i.block_bytes > 0 for i in self.intermediates), "an intermediate has bytes"
        again = [i.recomputation.load for i in self.intermediates if i.recomputation is not None]
        assert not any(load.ssd_write_bytes for load in (self.source, *again)), "recomputing writes nothing to the SSD"
        assert 0 <= self.rates.overlap <= 1, "overlap is a fraction"

    @property
    def depth(self) -> int:
        """L: the number of intermediates."""
        return len(self.intermediates)

    def mirror(self, phase: int) -> int:
        """The backward phase of a forward one, and the other way round."""
        return len(self.phases) - 1 - phase


@dataclass(frozen=True, slots=True)
class Budgets:
    """What may be used. Memory and written bytes are counted in units: sizes are rounded up, budgets down.

    A ``unit_bytes`` of 1 rounds nothing. ``ssd_write_bytes`` is per epoch; None: no limit.
    """

    device_bytes: int
    host_bytes: int
    ssd_write_bytes: int | None = None
    unit_bytes: int = 1

    @property
    def device_units(self) -> int:
        return self.device_bytes // self.unit_bytes

    @property
    def host_units(self) -> int:
        return self.host_bytes // self.unit_bytes

    @property
    def ssd_write_units(self) -> int | None:
        return None if self.ssd_write_bytes is None else self.ssd_write_bytes // self.unit_bytes

    def units(self, nbytes: int) -> int:
        """Units that ``nbytes`` take."""
        return -(-nbytes // self.unit_bytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of one intermediate: how many of its blocks wait on the device, on the host and on the SSD.

    ``recompute``: they wait there for the next phase only, if that reads them, and the backward phase computes the
    matrix again. A recomputed intermediate that the next phase does not read is stored nowhere (0, 0, 0).
    """

    device: int
    host: int
    ssd: int
    recompute: bool = False

    def written(self, block_bytes: int) -> Load:
        """The traffic of writing it."""
        return Load(down_bytes=(self.host + self.ssd) * block_bytes, ssd_write_bytes=self.ssd * block_bytes)

    def read(self, block_bytes: int) -> Load:
        """The traffic of reading it once."""
        return Load(up_bytes=(self.host + self.ssd) * block_bytes, ssd_read_bytes=self.ssd * block_bytes)
