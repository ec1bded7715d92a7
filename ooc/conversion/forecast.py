# SPDX-License-Identifier: Apache-2.0
"""The forecast of a conversion: stages, bytes read and written, disk, memory and time, before it begins.

It is made from an opened source or, where the files are not present, from what is known of a published dataset, and
from the speed of the disk. N nodes, E edges, F features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ooc.conversion.budget import Options, Sizes, cores, disk_bytes, least_budget_bytes
from ooc.sources.names import Dataset

_KEY_BYTES = 8
# Size of ogbn-papers100M's zip as ogb's downloader shows it, 56.17 GB of 2³⁰: github.com/snap-stanford/ogb, issue 506.
_PUBLISHED_BYTES = {"ogbn-papers100M": int(56.17 * 2**30)}
_FLOAT16_DATASETS = ("mag240m",)
_STORE_STAGES = ("labels", "writing in-edges", "writing out-edges", "writing features")
_PACKED_SHARE = 0.98  # Files smaller than that share of their arrays must be inflated.


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of the disk in bytes a second, and of one core, by default one that is a few years old.

    A core's rates are bytes a second of inflating ids and floats, and of checking and casting; keys a second of
    distributing over buckets, and of sorting a bucket.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    inflate_bytes_per_s: float = 1.5e8
    spread_keys_per_s: float = 3e7
    sort_keys_per_s: float = 4e7
    copy_bytes_per_s: float = 2e9


def sizes_of_dataset(dataset: Dataset) -> Sizes:
    """Return the known sizes of a published dataset."""
    return Sizes(
        name=dataset.name,
        num_nodes=dataset.nodes,
        num_edges=dataset.edges,
        num_features=dataset.features,
        feature_bytes=2 if dataset.name in _FLOAT16_DATASETS else 4,
        packed_bytes=_PUBLISHED_BYTES.get(dataset.name, 0),
        resident_bytes=dataset.nodes,  # Its splits.
    )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a conversion."""

    name: str
    read_bytes: int
    written_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """All stages; the most disk at a time, besides the source; the least ``--host-budget``; the store's size."""

    stages: tuple[Stage, ...]
    disk_bytes: int
    least_memory_bytes: int
    store_bytes: int

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def forecast(sizes: Sizes, rates: Rates, options: Options, *, ordered: bool) -> Forecast:
    """Return the forecast, an upper bound where duplicates are dropped, since their number is not known before."""
    stages = tuple(_stages(sizes, rates, options, ordered))
    return Forecast(
        stages=stages,
        disk_bytes=disk_bytes(sizes, options, ordered=ordered),
        least_memory_bytes=least_budget_bytes(sizes, ordering=ordered),
        store_bytes=sum(stage.written_bytes for stage in stages if stage.name in _STORE_STAGES),
    )


def _stages(sizes: Sizes, rates: Rates, options: Options, ordered: bool) -> Iterator[Stage]:
    nodes, edges, raw_edges = sizes.num_nodes, sizes.num_edges, sizes.raw_edge_bytes
    carried = sizes.edge_row_bytes(options.dtype)
    key_bytes = _KEY_BYTES + carried
    raw_features = sizes.raw_feature_bytes
    share = sizes.input_bytes / sizes.raw_bytes
    stored_features = sizes.stored_feature_bytes(options)

    def stage(name: str, read: int, written: int, *threads: float) -> Stage:
        """Return a stage, whose seconds are those of the disk or of the busiest thread, which work at the same time."""
        disk = read / rates.read_bytes_per_s + written / rates.write_bytes_per_s
        return Stage(name=name, read_bytes=read, written_bytes=written, seconds=max(disk, *threads))

    def inflating(raw: float) -> float:
        return raw / rates.inflate_bytes_per_s if share < _PACKED_SHARE else 0.0

    labels = nodes * (sizes.label_row_bytes + 8 + 3)
    yield stage("labels", int(4 * nodes * share), labels, inflating(4 * nodes), labels / rates.copy_bytes_per_s)
    keys = 2 * edges
    if sizes.prepare_bytes:
        yield stage("finding the edges' nodes", int(raw_edges * share), sizes.prepare_bytes, inflating(raw_edges))
        read, inflated = sizes.prepare_bytes, 0.0
    else:
        # As [2, E] is packed: what gives the targets has to go through the sources, too.
        read, inflated = int(raw_edges * share), 1.5 * raw_edges
    spreading = keys / rates.spread_keys_per_s + 4 * raw_edges / rates.copy_bytes_per_s
    yield stage("reading edges", read, keys * key_bytes, inflating(inflated), spreading)
    directions = ("in",) if options.symmetrize else ("in", "out")
    each = keys // len(directions) + nodes * options.self_loops
    written = each * (sizes.index_bytes + carried) + nodes * (8 + 4 * options.self_loops)
    sorting = each / rates.sort_keys_per_s / max(1, cores() - 1)
    deriving = 5 * each * key_bytes / rates.copy_bytes_per_s
    for direction in directions:
        yield stage(f"writing {direction}-edges", each * key_bytes, written, sorting, deriving)
    copying = raw_features / rates.copy_bytes_per_s
    if options.row_normalize:
        yield stage("scanning features", int(raw_features * share), 0, inflating(raw_features), copying)
    yield stage("writing features", int(raw_features * share), stored_features, inflating(raw_features), copying)
    if ordered:
        yield stage("following in-edges", 2 * written, 0, 2 * deriving)
        for direction in directions:
            moved = written + each * key_bytes
            yield stage(f"reordering {direction}-edges", moved, moved, sorting)
        yield stage("moving rows", stored_features + labels, stored_features + labels, 2 * copying)
