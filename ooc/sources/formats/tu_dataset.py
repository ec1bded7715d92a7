# SPDX-License-Identifier: Apache-2.0
"""Graphs as TUDataset publishes them (C. Morris et al., https://chrsmrrs.github.io/datasets/docs/format/): a folder of
texts ``DS_A.txt``, ``DS_graph_indicator.txt``, ``DS_graph_labels.txt`` and others, numbered from 1.

Features are those of PyG's reader: of a node and of an edge, its attributes, then its labels one-hot from the least on.
Self-loops are left out, and one of repeated edges is kept. Graphs' values are preferred to their classes.
"""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np

from ooc.errors import SourceError
from ooc.sources.files.cells import Cells
from ooc.sources.files.dataset_files import DatasetFiles
from ooc.sources.formats.arrays import ARRAY_OPTIONS
from ooc.sources.formats.many_graphs import graph_labels, graphs_source
from ooc.sources.labels import LabelForm, only_answers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, Rows, Source, fingerprint_of, ranges, with_data
from ooc.storage.array import AnyArray
from ooc.storage.store import Task

_MARK = "_graph_indicator.txt"


def _open(path: Path, request: Request) -> Source:
    name = next(iter(path.glob(f"*{_MARK}"))).name.removesuffix(_MARK)
    files = DatasetFiles(path, (), request.budget_bytes, prefix=f"{name}_")
    sizes = _sizes(files)
    nodes, edges = _Columns(files, "node"), _Columns(files, "edge")
    values = files.has("graph_attributes.txt")
    labels = "graph_attributes.txt" if values else "graph_labels.txt"
    names, width = np.empty(0, dtype=np.int64), files.columns(labels)
    if not values:
        names = np.unique(np.concatenate([np.unique(block) for block in files.numbers(labels)]))
    form = LabelForm(name=name, task=Task.CLASSES, width=None)
    if values:
        scan = lambda: only_answers(files.numbers(labels, Cells.REAL))  # noqa: E731
        form = graph_labels(name, width, np.dtype(np.float64), request, scan)

    def found(size: int) -> Iterator[AnyArray]:
        for rows in files.numbers(labels, Cells.REAL if values else Cells.WHOLE, size=size):
            yield rows if values else np.searchsorted(names, rows[:, 0])

    def edge_blocks(size: int) -> Iterator[EdgeBlock]:
        blocks = (EdgeBlock(ends[:, 0] - 1, ends[:, 1] - 1) for ends in files.numbers("A.txt", size=size))
        if not edges.columns:
            return blocks
        return with_data(blocks, features=edges.blocks(size), name=f"what edges of {name} carry")

    def features(size: int) -> Iterator[AnyArray]:
        if nodes.columns:
            return nodes.blocks(size)
        return (np.ones((stop - start, 1), dtype=np.float32) for start, stop in ranges(int(sizes.sum()), size))

    if request.drop_edge_data:
        edges.columns = 0
    return graphs_source(
        name=name,
        format="tudataset",
        sizes=sizes,
        values=found,
        form=form,
        request=request,
        classes=None if values else len(names),
        num_edges=sum(len(block) for block in files.numbers("A.txt")),
        num_features=nodes.columns or 1,
        num_edge_features=edges.columns,
        features=features,
        edges=edge_blocks,
        drop_self_loops=True,
        drop_duplicates=True,
        class_names=tuple(map(str, names.tolist())),
        fingerprint=fingerprint_of(*sorted(path.glob(f"{name}_*.txt"))),
    )


def _sizes(files: DatasetFiles) -> AnyArray:
    """Return the number of nodes of each graph [G]; raise SourceError where graphs are not numbered in order."""
    counts, last = np.zeros(0, dtype=np.int64), 1
    for block in files.numbers("graph_indicator.txt"):
        graphs = block[:, 0]
        if not np.isin(np.diff(graphs, prepend=last), (0, 1)).all():  # One far off would take as much memory.
            raise SourceError(f"{files.label('graph_indicator.txt')}: the graphs of nodes are not 1, 1, …, 2, 2, …")
        more = np.bincount(graphs - 1, minlength=len(counts))
        more[: len(counts)] += counts
        counts, last = more, int(graphs[-1])
    return counts


class _Columns:
    """The attributes and labels of nodes or of edges as one matrix of ``columns``; none where there are neither."""

    def __init__(self, files: DatasetFiles, of: str) -> None:
        self._files, self._names = files, [f"{of}_{what}.txt" for what in ("attributes", "labels")]
        self._least = np.zeros(0, dtype=np.int64)
        self._widths: list[int] = []
        attributes, labels = (files.has(name) for name in self._names)
        self.columns = files.columns(self._names[0]) if attributes else 0
        self._has = attributes, labels
        if labels:
            ends = [(block.min(axis=0), block.max(axis=0)) for block in files.numbers(self._names[1])]
            self._least = np.min([low for low, _ in ends], axis=0)
            self._widths = (np.max([high for _, high in ends], axis=0) - self._least + 1).tolist()
            self.columns += sum(self._widths)

    def blocks(self, size: int) -> Iterator[AnyArray]:
        """Yield float32 [n, columns]."""
        attributes, labels = self._has
        names = [name for name, there in zip(self._names, self._has, strict=True) if there]
        kinds = [Cells.REAL] * attributes + [Cells.WHOLE] * labels
        read = [Rows(self._files.numbers(name, kind)).blocks(size) for name, kind in zip(names, kinds, strict=True)]
        for parts in zip_longest(*read, fillvalue=np.empty((0, 0))):
            if len({len(part) for part in parts}) > 1:
                raise SourceError(f"{' and '.join(map(self._files.label, names))} differ in length")
            found = [parts[0].astype(np.float32)] if attributes else []
            if labels:
                from_least = parts[-1] - self._least
                found += [
                    (from_least[:, k, None] == np.arange(width)).astype(np.float32)
                    for k, width in enumerate(self._widths)
                ]
            yield np.concatenate(found, axis=1)


READER = Reader(
    needs="a folder of TUDataset's texts (DS_A.txt, DS_graph_indicator.txt, DS_graph_labels.txt, ...): many graphs",
    folder=True,
    recognises=lambda path: any(path.glob(f"*{_MARK}")),
    open=_open,
    takes=ARRAY_OPTIONS,
)
