# SPDX-License-Identifier: Apache-2.0
"""ogb's text layout: ``raw/*.csv.gz`` without headers, for ogbn-products, ogbn-arxiv and ogbn-proteins.

Which of ogb's datasets it is shows in its kind of split; that decides, as ogb's ``master.csv`` does, whether the
file has each edge once for both directions. Then every edge is followed by its reverse, as
``read_csv_graph_raw`` has it: nothing is dropped, a self-loop comes twice.

ogbn-proteins has no node features. What stands in for them is the species of each protein, one-hot in
ascending order of the species' ids. Its edges have features, which an edge's reverse has too.
"""

from collections.abc import Iterator

import numpy as np

from ooc.conversion.edge_values import with_data
from ooc.conversion.lines import CsvForm, csv_columns, csv_rows
from ooc.conversion.ogb_files import OgbFiles
from ooc.conversion.reading import Request
from ooc.conversion.source import EdgeBlock, EdgeData, LabelBlock, Mask, Source, ranges
from ooc.conversion.splits import IndexSplits, whole_labels
from ooc.errors import SourceError
from ooc.storage.array import AnyArray
from ooc.storage.store import Task

_ADD_INVERSE_EDGE = frozenset(("sales_ranking", "species"))
"""The kinds of split of ogbn-products and ogbn-proteins."""
_EDGE_FEATURES = "raw/edge-feat.csv.gz"
_SPECIES = ("raw/node_species.csv.gz", "raw/species.csv.gz")
_MOST_SPECIES = 1 << 16
_MOST_GRAPHS = 1 << 16


def csv_source(files: OgbFiles, request: Request) -> Source:
    """The graph in ``files``; splits and species are held in memory, the rest is streamed."""
    nodes, listed_edges = (_single(files, f"raw/num-{what}-list.csv.gz") for what in ("node", "edge"))
    if not 0 < nodes <= 2**32 or listed_edges < 0:
        raise SourceError(f"{files.label('raw')}: {nodes} nodes with {listed_edges} edges cannot be converted")
    edge_features = 0
    if files.has(_EDGE_FEATURES) and not request.drop_edge_data:
        edge_features = csv_columns(files.text(_EDGE_FEATURES), files.label(_EDGE_FEATURES))
    kind = files.only_split()
    both_ways = kind in _ADD_INVERSE_EDGE
    splits = files.splits(kind, nodes)
    tasks = csv_columns(files.text("raw/node-label.csv.gz"), files.label("raw/node-label.csv.gz"))
    features = _Features(files, nodes)

    def edges(size: int) -> Iterator[EdgeBlock]:
        form = CsvForm(rows=listed_edges, columns=2, dtype=np.int64)
        rows = max(1, size // 2 if both_ways else size)
        pairs = _pieces(_read(files, "raw/edge.csv.gz", form), rows)
        blocks: Iterator[EdgeBlock] = (EdgeBlock(ends[:, 0].copy(), ends[:, 1].copy()) for ends in pairs)
        if edge_features:
            carried = CsvForm(rows=listed_edges, columns=edge_features, dtype=np.float64)
            features = _pieces(_read(files, _EDGE_FEATURES, carried), rows)
            blocks = with_data(blocks, features=features, name=files.label(_EDGE_FEATURES))
        yield from map(_with_reverse, blocks) if both_ways else blocks

    return Source(
        name=files.name,
        format="ogb",
        num_nodes=nodes,
        num_edges=listed_edges * (2 if both_ways else 1),
        num_features=features.columns,
        num_classes=None if tasks == 1 else tasks,
        task=Task.CLASSES if tasks == 1 else Task.MULTILABEL,
        edges=edges,
        num_edge_features=edge_features,
        features=features.blocks,
        labels=lambda size: _labels(files, splits, CsvForm(rows=nodes, columns=tasks, dtype=np.float64), size),
        resident_bytes=splits.nbytes,
        fingerprint=files.fingerprint,
        description={"split": kind, **features.description},
        notes=features.notes,
    )


class _Features:
    """Rows of ``node-feat.csv.gz``, or the one-hot species where there is none."""

    def __init__(self, files: OgbFiles, nodes: int) -> None:
        self._files, self._nodes = files, nodes
        self.description: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self._name = "raw/node-feat.csv.gz"
        self._species: AnyArray | None = None
        if files.has(self._name):
            self.columns = csv_columns(files.text(self._name), files.label(self._name))
            return
        found = [name for name in _SPECIES if files.has(name)]
        if not found:
            raise SourceError(f"{files.name} has no node features ({files.label(self._name)} is missing)")
        self._name = found[0]
        self._species = np.unique(np.concatenate([np.unique(block) for block in self._read(np.int64)]))
        self.columns = len(self._species)
        if self.columns > _MOST_SPECIES:
            raise SourceError(f"{files.label(self._name)} names {self.columns} species, which cannot be features")
        self.description = {"features": f"one-hot of {self._name}"}
        self.notes = (f"{files.name} has no node features: the {self.columns} species, one-hot, stand in for them",)

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """float32 [n, columns], as ogb reads them."""
        if self._species is None:
            for rows in _pieces(self._read(np.float64), size):
                with np.errstate(over="ignore"):  # Becomes infinite, which is refused by whoever stores it.
                    yield rows.astype(np.float32)
            return
        for ids in _pieces(self._read(np.int64), size):
            yield (ids == self._species).astype(np.float32)

    def _read(self, dtype: type[np.float64] | type[np.int64]) -> Iterator[AnyArray]:
        columns = 1 if self._species is not None or self._name in _SPECIES else self.columns
        return _read(self._files, self._name, CsvForm(rows=self._nodes, columns=columns, dtype=dtype))


def _read(files: OgbFiles, name: str, form: CsvForm) -> Iterator[AnyArray]:
    return csv_rows(files.text(name), form, files.label(name))


def _pieces(blocks: Iterator[AnyArray], rows: int) -> Iterator[AnyArray]:
    """The same rows, at most ``rows`` at a time."""
    for block in blocks:
        for start, stop in ranges(len(block), rows):
            yield block[start:stop]


def _with_reverse(block: EdgeBlock) -> EdgeBlock:
    """Each edge, followed by its reverse, which has the same features."""
    pairs = np.stack([block.sources, block.targets], axis=1)
    features = block.data.features if block.data is not None else None
    data = EdgeData(features=features.repeat(2, axis=0)) if features is not None else None
    return EdgeBlock(pairs.reshape(-1), pairs[:, ::-1].reshape(-1), data)


def _labels(files: OgbFiles, splits: IndexSplits, form: CsvForm, size: int) -> Iterator[LabelBlock]:
    name, row = "raw/node-label.csv.gz", 0
    for values in _pieces(_read(files, name, form), size):
        y: AnyArray
        if form.columns == 1:
            y = whole_labels(values[:, 0], row, files.label(name))
        else:
            y = _answers(values, row, files.label(name))
        yield LabelBlock(y, *splits.masks(row, row + len(values)))
        row += len(values)


def _answers(values: AnyArray, row: int, name: str) -> AnyArray:
    """0 or 1 for each task as int8 [n, tasks]; a row of NaN, no label, as -1."""
    none: Mask = np.asarray(np.isnan(values).all(axis=1))
    wrong: Mask = ~none & ~np.asarray(((values == 0) | (values == 1)).all(axis=1))
    if wrong.any():
        raise SourceError(f"{name}: node {row + int(wrong.argmax())} has other labels than 0 and 1 for each task")
    return np.where(none[:, None], -1, np.nan_to_num(values)).astype(np.int8)


def _single(files: OgbFiles, name: str) -> int:
    """The one number in a file that lists one for each graph."""
    numbers = files.numbers(name, most=_MOST_GRAPHS)
    if len(numbers) != 1:
        raise SourceError(f"{files.label(name)} lists {len(numbers)} graphs, not one")
    return int(numbers[0])
