# SPDX-License-Identifier: Apache-2.0
"""Where a search can begin, and the single steps that lead from one choice to others, in the order they are tried."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby, product
from operator import itemgetter
from typing import NamedTuple

from ooc.plan.forecast import TIE
from ooc.plan.layout.bucketing import bucketable, leaner_bucketed
from ooc.plan.layout.layout import Choice, Layout, SlabChoice, widths_and_frame_bytes
from ooc.plan.layout.passes import STEPS_AT_ONCE
from ooc.plan.layout.temporaries import opaque_nbytes
from ooc.plan.problem import WHOLE, Problem
from ooc.plan.program.capacity import ExchangeForm

BLOCK_BYTES = 4 << 20
"""The largest block: large enough for the disk's full rate, small enough to keep several."""
BLOCK_BYTES_OF_TIERS = 64 << 20
"""The same where a device has memory of its own: a step there must be long beside what it costs to start one."""
FEW_STEPS = 4096
"""Steps of a row pass beyond which blocks grow with the matrix, whatever their size: planning takes time by the block,
and what it unrolls memory. Where nothing else fits, blocks are lower again."""
MOST_STEPS = 4 * FEW_STEPS
"""Steps of a row pass beyond which lower blocks are tried only where nothing fits without them: most of the memory is
then the narrowest slab's."""
_LAST_STEPS = 4 * MOST_STEPS
"""Steps of a row pass beyond which no lower blocks are tried: a plan takes a minute to make. Where rows are wide and
slabs narrow, one block of every slab is a part of the memory that lower blocks make small."""
NARROW_COLUMNS = 8
"""Columns of the narrowest slab: 32 bytes of float32, half a cache line a gathered row."""
_FEW_COLUMNS = NARROW_COLUMNS, 12, 16, 24, 32, 40, 48, 64
"""Of slabs where memory is scarce: of wider ones there are fewer, a block of each of which is in memory where they are
computed, and fewer blocks in the plan. Of a device powers of two: with others, and with frames of parts that are no
powers of four, epochs of little more memory were a third longer, simulated."""
LINE_BYTES = 64
"""Rows of a slab that begin within a cache line fetch one more than they fill: 43 columns of float32 took a processor
a third longer to gather than 48. On a device with memory of its own that was not measured, and narrower slabs leave
more of its memory: there, widths are tried as they are, too. Of 47 columns an edge took a compiled sum 27 ns, and 13
with a spare one behind each row."""
_SHARES_OF_BUCKETS = (16, 8, 4, 2)
"""What buckets may take of memory: parts of their source. The more they take, the fewer rows are written several
times."""


class Beginning(NamedTuple):
    """Where a search begins: with the least memory that ``most_steps`` steps of a row pass can do with. Whether the
    first slabs are computed right into their buffers; how many blocks a step's rows of the widest matrix are; whether
    some passes have one step at a time; and what is gathered by buckets."""

    most_steps: int
    direct: bool = True
    parts: int = 1
    alone: bool = False
    bucketed: frozenset[str] = frozenset()


Steps = Callable[[Choice], list[Choice]]
"""What single steps of one kind lead to from a choice, in the order in which they are tried."""


class Moves:
    """The choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.workload, self.limits = problem.workload, problem.limits
        self.on_device, self.sources = problem.on_device, problem.sources
        self.spillable = frozenset() if self.on_device else frozenset(self.workload.scatter_counts)
        self.bucketable = frozenset() if self.on_device else bucketable(self.workload)

    # ---- single steps --------------------------------------------------------------------------------------

    def in_order(self) -> Iterator[tuple[Steps, float]]:
        """The kinds of steps of a descent, and the part of an epoch that each has to gain."""
        for group in self.groups():
            yield partial(self.cuts, group), 0.0
            yield partial(self.direct, group), 0.0
            yield partial(self.shard, group), TIE
            if self.on_device:  # not on the CPU, which computes longer than it moves blocks: no epoch became shorter
                yield partial(self.overlap_last, group), TIE
        yield from ((kind, 0.0) for kind in (self.spills, self.buckets, self.parts, self.tall_pulls, self.heights_of))
        if self.on_device:
            yield lambda choice: [replace(choice, spare_writes=True)], 0.0

    def groups(self) -> list[list[str]]:
        """Sources of one shape and role, which are held alike: the search is as long as there are shapes."""
        groups: dict[tuple[int, int, int, bool, bool], list[str]] = {}
        for name in self.sources:
            matrix = self.workload.matrices[name]
            loaded = any(name in stage.loads for stage in self.workload.stages)
            shardable = name in self.workload.shardable
            groups.setdefault((matrix.rows, matrix.columns, matrix.itemsize, loaded, shardable), []).append(name)
        return list(groups.values())

    def in_memory(self, choice: Choice) -> list[Choice]:
        """The same with nothing gathered by buckets, or spilled."""
        in_memory = replace(choice, spilled_sums=frozenset())
        return [replace(in_memory, bucketed={}), replace(choice, bucketed={}), in_memory]

    def whole(self, choice: Choice) -> list[Choice]:
        """The same with every source in memory whole."""
        if self.limits.slab_columns is not None:
            return []
        return [replace(one, cuts=dict.fromkeys(self.sources, WHOLE)) for one in (*self.in_memory(choice), choice)]

    def cuts(self, group: list[str], choice: Choice) -> list[Choice]:
        """Other ways to hold the sources of ``group``: whole, or in more and more slabs."""
        held = choice.cuts[group[0]]
        ways = [replace(way, direct=held.direct, overlap_last=held.overlap_last) for way in self._ways(group[0])]
        return [_held(choice, group, way) for way in ways]

    def direct(self, group: list[str], choice: Choice) -> list[Choice]:
        """The first slabs computed into their buffers, or by way of blocks."""
        cut = choice.cuts[group[0]]
        if not (cut.columns or cut.sharded) or (cut.direct and not self.on_device):
            return []
        return [_held(choice, group, replace(cut, direct=not cut.direct))]

    def overlap_last(self, group: list[str], choice: Choice) -> list[Choice]:
        """The last slab pulled by the row pass, or not."""
        cut = choice.cuts[group[0]]
        return [_held(choice, group, replace(cut, overlap_last=not cut.overlap_last))] if cut.columns else []

    def shard(self, group: list[str], choice: Choice) -> list[Choice]:
        """Slabs of all of ``group``, or of one source, sharded among the processes, as wide as they can be or as they
        are; or sharded no longer."""
        if self.limits.exchange is not ExchangeForm.AUTO or group[0] not in self.workload.shardable:
            return []
        found = []
        for names in (group, *([name] for name in group if len(group) > 1)):
            other = replace(choice.cuts[names[0]], sharded=not choice.cuts[names[0]].sharded)
            widths = self._widths(names[0]) if other.sharded and self.limits.slab_columns is None else []
            for cut in dict.fromkeys((other, *(replace(other, columns=columns) for columns in (0, *widths)))):
                found.append(replace(choice, cuts={**choice.cuts, **dict.fromkeys(names, cut)}))
        return found

    def spills(self, choice: Choice) -> list[Choice]:
        """The sums of one matrix more, or one less, spilled."""
        return [replace(choice, spilled_sums=choice.spilled_sums ^ {name}) for name in sorted(self.spillable)]

    def buckets(self, choice: Choice) -> list[Choice]:
        """One source more or one less gathered by buckets, or one by larger ones; none where all are whole."""
        if not choice.bucketed and all(cut == WHOLE for cut in choice.cuts.values()):
            return []
        found = []
        for name in sorted(self.bucketable):
            if name in choice.bucketed:
                others = {other: nbytes for other, nbytes in choice.bucketed.items() if other != name}
                found.append(replace(choice, bucketed=others))
                found.append(replace(choice, bucketed=others, cuts={**choice.cuts, name: WHOLE}))
            whole = self.workload.matrices[name].nbytes
            for part in (0, *(whole // share for share in _SHARES_OF_BUCKETS)):
                found.append(replace(choice, bucketed={**choice.bucketed, name: part}))
        return found

    def parts(self, choice: Choice) -> list[Choice]:
        """Larger frames, where a step's rows of the widest matrix are several blocks."""
        return [replace(choice, parts=choice.parts // fewer) for fewer in (2, 4, 16, 64) if choice.parts % fewer == 0]

    def of_one_source(self, choice: Choice) -> list[Choice]:
        """One source that an epoch pulls held otherwise, though there may be others of its shape; first of all what is
        given up, or no longer, to spare writes."""
        pulls = filter(None, (stage.pull for stage in self.workload.programs["train"]))
        groups = [[name] for name in sorted({pull.source for pull in pulls})]
        held = [[*self.direct(group, choice), *self.overlap_last(group, choice)] for group in groups]
        return [replace(choice, spare_writes=not choice.spare_writes), *chain(*held)]

    def heights_of(self, choice: Choice) -> list[Choice]:
        """Steps of other heights."""
        layout = self.problem.layout(choice)
        heights = self.heights(FEW_STEPS, choice.parts * layout.frame_bytes // layout.step_rows)
        return [replace(choice, step_rows=height) for height in heights]

    def tall_pulls(self, choice: Choice) -> list[Choice]:
        """More rows pulled at once, in memory of their own; on the CPU no longer so, either."""
        return [replace(choice, lean=not choice.lean)] if choice.lean or not self.on_device else []

    # ---- where to begin ------------------------------------------------------------------------------------

    def of_one_width(self, like: Choice) -> Iterator[Choice]:
        """All sources in slabs of the same width."""
        widest = max(self.sources.values(), default=1)
        for parts, buffers, direct in product((2, 3, 4, 6, 8), (1, 2), (True, False)):
            cut = SlabChoice(-(-widest // parts), buffers, direct, overlap_last=True)
            cuts = {name: replace(cut, columns=min(columns, cut.columns)) for name, columns in self.sources.items()}
            yield replace(like, cuts=cuts)

    @cached_property
    def beginnings(self) -> list[Beginning]:
        """In the order in which they are tried, the first that fits is taken: smaller blocks where nothing fits
        without, and on the CPU one step at a time where not even that fits."""
        powers = [power for power in range(9) if power % 2 == 0 or not self.on_device]
        either = True, False
        kinds = [
            [Beginning(FEW_STEPS), *(Beginning(*one) for one in product((MOST_STEPS, _LAST_STEPS), either))],
            [Beginning(_LAST_STEPS, direct, 1 << power) for power, direct in product(powers[1:], either)],
            [Beginning(_LAST_STEPS, direct, 1 << power, alone=True) for power, direct in product(powers, either)],
        ]
        buckets = dict.fromkeys((frozenset[str](), self.bucketable))  # which have to be counted first
        every = product(kinds[:2] if self.on_device else kinds, buckets)
        return [one._replace(bucketed=bucketed) for kind, bucketed in every for one in kind]

    def minimum_memory(self, height: int, beginning: Beginning, most: float) -> tuple[Choice, Layout] | None:
        """Steps of ``height`` rows in the least memory: slabs as narrow as they go, but where blocks of many slabs take
        more; None where that is more than ``most`` bytes. Found once for all budgets of a workload; of small graphs,
        every beginning tries the same heights, too."""
        known, limits, spare_writes = self.workload.leanest, self.limits, self.problem.most_written is not None
        asked = height, *beginning[1:], spare_writes, self.on_device, limits.slab_columns, limits.exchange
        found = known.get(asked, -1)  # or than how much it is more
        if not isinstance(found, Choice) and found < most:
            found = known[asked] = self._minimum_memory(height, beginning, most) or most
        return (found, self.problem.layout(found)) if isinstance(found, Choice) else None

    def _minimum_memory(self, height: int, beginning: Beginning, limit: float) -> Choice | None:
        _, direct, parts, alone, bucketed = beginning
        widest = max(self.sources.values(), default=1)
        of_frame = -(-widest // parts)  # in a slab of which a step fills a frame
        few = [width for width in _FEW_COLUMNS if not self.on_device or width & (width - 1) == 0]
        narrow = (min(width, widest) for width in (*few, max(NARROW_COLUMNS, of_frame)))
        widths = [width for width, _ in groupby(narrow)]
        if self.limits.slab_columns is not None:
            widths = [self.limits.slab_columns]
        spare_writes = self.problem.most_written is not None
        choices = [
            Choice(
                height,
                {name: SlabChoice(min(columns, width), 1, direct) for name, columns in self.sources.items()},
                spare_writes,
                bucketed=dict.fromkeys(bucketed, 0),
                parts=parts,
                lean=True,
                alone=alone,
            )
            for width in widths
        ]
        if self.limits.slab_columns is None:
            choices.append(replace(choices[0], cuts=dict.fromkeys(self.sources, WHOLE)))
        if self.spillable:
            choices += [replace(choice, spilled_sums=self.spillable) for choice in choices]
        tried: dict[int, tuple[tuple[int, int], Choice, Layout]] = {}
        least, most = self.problem.capacity.least, limit
        for choice in choices:
            if self._bound_bytes(choice) <= most:
                layout = self.problem.layout(choice)
                known = tried.pop(id(layout)) if id(layout) in tried else (least(layout, most), choice, layout)
                tried[id(layout)] = known
                most = min(most, known[0][0])
        layouts = [*tried.values()]
        for _, choice, layout in layouts[:] if bucketed else ():
            passes = (item for program in layout.programs.values() for item in program)
            smaller = replace(choice, bucketed=dict.fromkeys(leaner_bucketed(passes, layout.matrices), 0))
            layout = self.problem.layout(smaller)
            layouts.append((least(layout), smaller, layout))
        found = min(layouts, key=itemgetter(0), default=None)
        return None if found is None or found[0][0] > limit else found[1]

    def _bound_bytes(self, choice: Choice) -> int:
        """No layout of ``choice`` takes less memory, nor where fewer sources are gathered by buckets: what is always
        there, a tile of rows or what an opaque layer makes of edges, and one source that is gathered from, whole or a
        slab of it, with what is added to, or a block of each slab that a stage loads and stores."""
        work, cuts = self.workload, choice.cuts
        if self.limits.exchange is ExchangeForm.COLUMNS:  # of some slabs a process has its own rows alone
            return 0
        widths, frame_bytes = widths_and_frame_bytes(work, choice)
        nbytes = {name: work.matrices[name].rows * widths[name] * work.matrices[name].itemsize for name in cuts}
        gathered = 0
        for one in work.pulls:
            added = () if choice.spilled_sums.intersection(one.added_to) else one.added_to
            source = 0 if one.source in choice.bucketed else nbytes[one.source]
            gathered = max(gathered, source + sum(work.matrices[name].nbytes for name in added))
        whole = {name for name, cut in cuts.items() if cut == WHOLE}.union(*(pull.added_to for pull in work.pulls))
        direct = whole.union(name for name, cut in cuts.items() if cut.direct)
        slabs = {name: -(-matrix.columns // widths[name]) for name, matrix in work.matrices.items()}
        most = 0
        for stage in work.stages:
            names, pull = {*stage.loads}.difference(whole).union({*stage.stores}.difference(direct)), stage.pull
            blocks = 0
            if pull is not None and pull.source not in whole:
                blocks = slabs[pull.source] * (pull.source not in choice.bucketed)  # of what is pulled
                names.discard(pull.kept or "")
            most = max(most, blocks + sum(slabs[name] for name in names))
        frames_bytes = (1 if choice.alone else STEPS_AT_ONCE) * most * frame_bytes
        always = work.fixed_device_bytes + (0 if self.on_device else work.fixed_host_bytes)
        return always + max(work.tile_bytes, self._opaque_bytes) + max(gathered, frames_bytes)

    @cached_property
    def _opaque_bytes(self) -> int:
        return opaque_nbytes(self.workload)

    def heights(self, most_steps: int, row_bytes: int = 0) -> Iterator[int]:
        """Heights of a step to try, tallest first: tiles times powers of two with which a row pass has so many steps at
        most; or the one that was asked for. ``row_bytes``: of the widest row that a block has (0: of any matrix)."""
        if self.limits.block_rows:
            yield self.limits.block_rows
            return
        tile, rows = self.workload.tile_rows, self.workload.rows
        widest = row_bytes or max(m.columns * m.itemsize for m in self.workload.matrices.values())
        largest = BLOCK_BYTES_OF_TIERS if self.on_device else BLOCK_BYTES
        height = tile
        while height < rows and (height * widest * 2 <= largest or height * FEW_STEPS < rows):
            height *= 2
        while height >= tile and height * most_steps >= rows:
            yield height
            height //= 2

    def _ways(self, name: str) -> Iterator[SlabChoice]:
        columns = self.sources[name]
        if self.limits.slab_columns is not None:
            for buffers in (1, 2):
                yield SlabChoice(min(columns, self.limits.slab_columns), buffers)
            return
        yield WHOLE
        for width in self._widths(name):
            for buffers in range(1, min(3, -(-columns // width)) + 1):
                yield SlabChoice(width, buffers)

    def _widths(self, name: str) -> list[int]:
        """Of slabs, from the widest to the narrowest: columns in equal parts, rounded up to whole cache lines; on a
        device as they are, too."""
        columns = self.sources[name]
        line = max(1, LINE_BYTES // self.workload.matrices[name].itemsize)
        widths = [-(-columns // count) for count in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)]
        rounded = [min(columns, -(-width // line) * line) if width > line else width for width in widths]
        tried = {*rounded, *widths} if self.on_device else {*rounded}
        return sorted((width for width in tried if width >= min(columns, NARROW_COLUMNS)), reverse=True)


def _held(choice: Choice, group: list[str], cut: SlabChoice) -> Choice:
    """The same, but for how the sources of ``group`` are held; sharded as they were."""
    cuts = {name: replace(cut, sharded=choice.cuts[name].sharded) for name in group}
    return replace(choice, cuts={**choice.cuts, **cuts})
