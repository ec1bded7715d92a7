# SPDX-License-Identifier: Apache-2.0
"""Where the planner's search begins, and the moves that lead from one choice to its neighbours, in the order they are
tried."""

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
"""The largest block where the CPU computes: large enough to read at the disk's full rate, small enough to hold
several."""
BLOCK_BYTES_OF_TIERS = 64 << 20
"""The largest block where a device has memory of its own. A step there must last long beside the time it takes to
launch."""
FEW_STEPS = 4096
"""Steps of a row pass beyond which blocks grow with the matrix, whatever their size in bytes: planning time and the
length of the program both go by the number of blocks. Blocks are made lower again where nothing else fits."""
MOST_STEPS = 4 * FEW_STEPS
"""Steps of a row pass beyond which lower blocks are tried only if nothing fits without them: by then the narrowest slab
takes most of the memory, and lower blocks save little."""
_LAST_STEPS = 4 * MOST_STEPS
"""Steps of a row pass beyond which no lower blocks are tried, since such a plan takes a minute to make. Lower blocks
help where rows are wide and slabs narrow: one block of every slab is then a large part of the memory."""
NARROW_COLUMNS = 8
"""Columns of the narrowest slab: 32 bytes of float32, so a gathered row uses half a cache line."""
_FEW_COLUMNS = NARROW_COLUMNS, 12, 16, 24, 32, 40, 48, 64
"""Slab widths to try where memory is scarce. Wider slabs are fewer, and a pass holds one block of each slab it
computes; the plan has fewer blocks, too. On a device only the powers of two are tried: with other widths, and with
frames cut in parts that are no powers of four, a slightly larger budget made simulated epochs a third longer."""
LINE_BYTES = 64
"""Bytes of a cache line. A slab's rows that begin within a line fetch one line more than they fill: gathering 43
columns of float32 took a processor a third longer than gathering 48, and a compiled sum of 47 columns took 27 ns an
edge, against 13 ns with one spare column behind each row. On a device this was not measured, and narrower slabs leave
more memory, so unrounded widths are tried there as well."""
_SHARES_OF_BUCKETS = (16, 8, 4, 2)
"""Memory for the buckets of one source, as fractions 1/16 to 1/2 of that source. The more memory they have, the fewer
rows are written several times."""


class Beginning(NamedTuple):
    """A starting point of the search: the layout with the least memory whose row passes have at most ``most_steps``
    steps. ``direct``: a source's first slabs are computed right into their buffers; ``parts``: into how many blocks a
    step's rows of the widest matrix are cut; ``alone``: some passes hold one step at a time; ``bucketed``: the sources
    that are gathered by buckets."""

    most_steps: int
    direct: bool = True
    parts: int = 1
    alone: bool = False
    bucketed: frozenset[str] = frozenset()


Steps = Callable[[Choice], list[Choice]]
"""One kind of move: the choices that it leads to from a given choice, in the order they are tried."""


class Moves:
    """The moves between the choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.workload, self.limits = problem.workload, problem.limits
        self.on_device, self.sources = problem.on_device, problem.sources
        self.spillable = frozenset() if self.on_device else frozenset(self.workload.scatter_counts)
        self.bucketable = frozenset() if self.on_device else bucketable(self.workload)

    # ---- single steps --------------------------------------------------------------------------------------

    def in_order(self) -> Iterator[tuple[Steps, float]]:
        """Yield the kinds of moves that a descent tries in turn, each with the fraction of an epoch that it must save
        to be taken."""
        for group in self.groups():
            yield partial(self.cuts, group), 0.0
            yield partial(self.direct, group), 0.0
            yield partial(self.shard, group), TIE
            if self.on_device:  # not on the CPU, which computes longer than it moves blocks: no epoch improved
                yield partial(self.overlap_last, group), TIE
        yield from ((kind, 0.0) for kind in (self.spills, self.buckets, self.parts, self.tall_pulls, self.heights_of))
        if self.on_device:
            yield lambda choice: [replace(choice, spare_writes=True)], 0.0

    def groups(self) -> list[list[str]]:
        """Group the sources that have the same shape and role. They are moved together, so the search grows with the
        number of shapes, not of sources."""
        groups: dict[tuple[int, int, int, bool, bool], list[str]] = {}
        for name in self.sources:
            matrix = self.workload.matrices[name]
            loaded = any(name in stage.loads for stage in self.workload.stages)
            shardable = name in self.workload.shardable
            groups.setdefault((matrix.rows, matrix.columns, matrix.itemsize, loaded, shardable), []).append(name)
        return list(groups.values())

    def in_memory(self, choice: Choice) -> list[Choice]:
        """Return ``choice`` without buckets, without spilled sums, and without both."""
        in_memory = replace(choice, spilled_sums=frozenset())
        return [replace(in_memory, bucketed={}), replace(choice, bucketed={}), in_memory]

    def whole(self, choice: Choice) -> list[Choice]:
        """Return ``choice`` with every source whole in memory."""
        if self.limits.slab_columns is not None:
            return []
        return [replace(one, cuts=dict.fromkeys(self.sources, WHOLE)) for one in (*self.in_memory(choice), choice)]

    def cuts(self, group: list[str], choice: Choice) -> list[Choice]:
        """Return the other ways to hold the sources of ``group``: whole, then in more and more slabs."""
        held = choice.cuts[group[0]]
        ways = [replace(way, direct=held.direct, overlap_last=held.overlap_last) for way in self._list_cuts(group[0])]
        return [_hold_group(choice, group, way) for way in ways]

    def direct(self, group: list[str], choice: Choice) -> list[Choice]:
        """Return ``choice`` with the first slabs of ``group`` computed into their buffers, or, if they are now, written
        as blocks first."""
        cut = choice.cuts[group[0]]
        if not (cut.columns or cut.sharded) or (cut.direct and not self.on_device):
            return []
        return [_hold_group(choice, group, replace(cut, direct=not cut.direct))]

    def overlap_last(self, group: list[str], choice: Choice) -> list[Choice]:
        """Return ``choice`` with the last slab of ``group`` pulled by the row pass that follows, or no longer so."""
        cut = choice.cuts[group[0]]
        return [_hold_group(choice, group, replace(cut, overlap_last=not cut.overlap_last))] if cut.columns else []

    def shard(self, group: list[str], choice: Choice) -> list[Choice]:
        """Return the choices that shard the slabs of ``group``, or of one source in it, among the processes, with their
        present width and with all others; or that stop sharding them."""
        if self.limits.exchange is not ExchangeForm.AUTO or group[0] not in self.workload.shardable:
            return []
        found = []
        for names in (group, *([name] for name in group if len(group) > 1)):
            other = replace(choice.cuts[names[0]], sharded=not choice.cuts[names[0]].sharded)
            widths = self._slab_widths(names[0]) if other.sharded and self.limits.slab_columns is None else []
            for cut in dict.fromkeys((other, *(replace(other, columns=columns) for columns in (0, *widths)))):
                found.append(replace(choice, cuts={**choice.cuts, **dict.fromkeys(names, cut)}))
        return found

    def spills(self, choice: Choice) -> list[Choice]:
        """Return the choices that spill the sums of one matrix more, or of one less."""
        return [replace(choice, spilled_sums=choice.spilled_sums ^ {name}) for name in sorted(self.spillable)]

    def buckets(self, choice: Choice) -> list[Choice]:
        """Return the choices that gather one source more or one less by buckets, or one by larger buckets; none if
        every source is whole in memory."""
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
        """Return choices with larger frames, if a step's rows of the widest matrix are cut into several blocks."""
        return [replace(choice, parts=choice.parts // fewer) for fewer in (2, 4, 16, 64) if choice.parts % fewer == 0]

    def of_one_source(self, choice: Choice) -> list[Choice]:
        """Return the choices that change how a single source is held, even if others have its shape; first, the one
        that no longer gives up blocks early to save writes, or begins to."""
        pulls = filter(None, (stage.pull for stage in self.workload.programs["train"]))
        groups = [[name] for name in sorted({pull.source for pull in pulls})]
        held = [[*self.direct(group, choice), *self.overlap_last(group, choice)] for group in groups]
        return [replace(choice, spare_writes=not choice.spare_writes), *chain(*held)]

    def heights_of(self, choice: Choice) -> list[Choice]:
        """Return ``choice`` with steps of every other height."""
        layout = self.problem.layout(choice)
        heights = self.heights(FEW_STEPS, choice.parts * layout.frame_bytes // layout.step_rows)
        return [replace(choice, step_rows=height) for height in heights]

    def tall_pulls(self, choice: Choice) -> list[Choice]:
        """Return ``choice`` with more rows pulled at once, in memory of their own, if it does not do so; on a device
        also the reverse."""
        return [replace(choice, lean=not choice.lean)] if choice.lean or not self.on_device else []

    # ---- where to begin ------------------------------------------------------------------------------------

    def of_one_width(self, like: Choice) -> Iterator[Choice]:
        """Yield choices that cut all sources into slabs of one width."""
        widest = max(self.sources.values(), default=1)
        for parts, buffers, direct in product((2, 3, 4, 6, 8), (1, 2), (True, False)):
            cut = SlabChoice(-(-widest // parts), buffers, direct, overlap_last=True)
            cuts = {name: replace(cut, columns=min(columns, cut.columns)) for name, columns in self.sources.items()}
            yield replace(like, cuts=cuts)

    @cached_property
    def beginnings(self) -> list[Beginning]:
        """The starting points in the order they are tried; the first that fits is taken. Smaller blocks come after
        those that need none, and on the CPU passes of one step at a time come last."""
        powers = [power for power in range(9) if power % 2 == 0 or not self.on_device]
        either = True, False
        kinds = [
            [Beginning(FEW_STEPS), *(Beginning(*one) for one in product((MOST_STEPS, _LAST_STEPS), either))],
            [Beginning(_LAST_STEPS, direct, 1 << power) for power, direct in product(powers[1:], either)],
            [Beginning(_LAST_STEPS, direct, 1 << power, alone=True) for power, direct in product(powers, either)],
        ]
        buckets = dict.fromkeys((frozenset[str](), self.bucketable))  # their entries have to be counted first
        every = product(kinds[:2] if self.on_device else kinds, buckets)
        return [one._replace(bucketed=bucketed) for kind, bucketed in every for one in kind]

    def minimum_memory(self, height: int, beginning: Beginning, most: float) -> tuple[Choice, Layout] | None:
        """Return the choice with the least memory for steps of ``height`` rows, and its layout; None if that takes more
        than ``most`` bytes. It has the narrowest slabs, unless the blocks of many slabs take more than wider slabs do.
        Results are kept for all budgets of a workload, and for all starting points, which try the same heights on small
        graphs."""
        known, limits, spare_writes = self.workload.leanest, self.limits, self.problem.most_written is not None
        asked = height, *beginning[1:], spare_writes, self.on_device, limits.slab_columns, limits.exchange
        found = known.get(asked, -1)  # or than the increase
        if not isinstance(found, Choice) and found < most:
            found = known[asked] = self._minimum_memory(height, beginning, most) or most
        return (found, self.problem.layout(found)) if isinstance(found, Choice) else None

    def _minimum_memory(self, height: int, beginning: Beginning, limit: float) -> Choice | None:
        _, direct, parts, alone, bucketed = beginning
        widest = max(self.sources.values(), default=1)
        of_frame = -(-widest // parts)  # a step fills a frame with one of its slabs
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
        """Return a lower bound for the memory of ``choice``, in bytes, also with fewer sources gathered by buckets. It
        counts what is always there, then one tile of rows or the edge tensors of an opaque layer, and the larger of two
        things: one gathered source (whole or a slab) with the sums it is added to, or one block of each slab that a
        stage loads and stores."""
        work, cuts = self.workload, choice.cuts
        if self.limits.exchange is ExchangeForm.COLUMNS:  # of some slabs a process has only its own rows
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
                blocks = slabs[pull.source] * (pull.source not in choice.bucketed)  # bytes of what is pulled
                names.discard(pull.kept or "")
            most = max(most, blocks + sum(slabs[name] for name in names))
        frames_bytes = (1 if choice.alone else STEPS_AT_ONCE) * most * frame_bytes
        always = work.fixed_device_bytes + (0 if self.on_device else work.fixed_host_bytes)
        return always + max(work.tile_bytes, self._opaque_bytes) + max(gathered, frames_bytes)

    @cached_property
    def _opaque_bytes(self) -> int:
        return opaque_nbytes(self.workload)

    def heights(self, most_steps: int, row_bytes: int = 0) -> Iterator[int]:
        """Yield the heights of a step to try, in rows, the tallest first: tiles times powers of two for which a row
        pass has at most ``most_steps`` steps, or only the height that the user asked for. ``row_bytes``: bytes of the
        widest row of a block (0: the widest of any matrix, if there is one)."""
        if self.limits.block_rows:
            yield self.limits.block_rows
            return
        tile, rows = self.workload.tile_rows, self.workload.rows
        widest = row_bytes or max((m.columns * m.itemsize for m in self.workload.matrices.values()), default=1)
        largest = BLOCK_BYTES_OF_TIERS if self.on_device else BLOCK_BYTES
        height = tile
        while height < rows and (height * widest * 2 <= largest or height * FEW_STEPS < rows):
            height *= 2
        while height >= tile and height * most_steps >= rows:
            yield height
            height //= 2

    def _list_cuts(self, name: str) -> Iterator[SlabChoice]:
        columns = self.sources[name]
        if self.limits.slab_columns is not None:
            for buffers in (1, 2):
                yield SlabChoice(min(columns, self.limits.slab_columns), buffers)
            return
        yield WHOLE
        for width in self._slab_widths(name):
            for buffers in range(1, min(3, -(-columns // width)) + 1):
                yield SlabChoice(width, buffers)

    def _slab_widths(self, name: str) -> list[int]:
        """Return the widths of slabs to try, from the widest to the narrowest: the columns in equal parts, rounded up
        to whole cache lines; on a device also unrounded."""
        columns = self.sources[name]
        line = max(1, LINE_BYTES // self.workload.matrices[name].itemsize)
        widths = [-(-columns // count) for count in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)]
        rounded = [min(columns, -(-width // line) * line) if width > line else width for width in widths]
        tried = {*rounded, *widths} if self.on_device else {*rounded}
        return sorted((width for width in tried if width >= min(columns, NARROW_COLUMNS)), reverse=True)


def _hold_group(choice: Choice, group: list[str], cut: SlabChoice) -> Choice:
    """Return ``choice`` with the sources of ``group`` held as ``cut`` says, and sharded as before."""
    cuts = {name: replace(cut, sharded=choice.cuts[name].sharded) for name in group}
    return replace(choice, cuts={**choice.cuts, **cuts})
