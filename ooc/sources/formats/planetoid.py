# SPDX-License-Identifier: Apache-2.0
"""Planetoid's raw folders (Cora, CiteSeer, PubMed): the graph that PyG's ``Planetoid`` makes of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ooc.errors import SourceError, as_error
from ooc.sources.files.pickles import read_array, read_csr, read_neighbours
from ooc.sources.formats.arrays import ArrayOptions, SparseRows, array_source
from ooc.sources.reading import Reader, Request
from ooc.sources.source import Source, fingerprint_of
from ooc.storage.array import AnyArray

_VALID_NODES = 500


def planetoid_folder(path: Path) -> Path | None:
    """Return the folder of the raw files: ``path`` itself or its ``raw``; None if neither has them."""
    return next((folder for folder in (path, path / "raw") if list(folder.glob("ind.*.graph"))), None)


def planetoid_source(path: Path, request: Request) -> Source:
    """Return the graph in the folder ``path``; its files are small and held in memory.

    Test nodes that no file describes (CiteSeer's isolated ones) get zero features and class 0, as in PyG.
    """
    folder = planetoid_folder(path)
    names = sorted(file.name.split(".")[1] for file in folder.glob("ind.*.graph")) if folder else []
    if folder is None or len(names) != 1:
        raise SourceError(f"{path} holds {len(names)} Planetoid data sets (ind.NAME.graph), not one")
    name = names[0]
    if others := [file for file in folder.glob(f"ind.{name}.*") if not file.is_file()]:
        raise SourceError(f"{others[0]} cannot be read: it is no file")
    if name.startswith("nell"):
        raise SourceError("NELL cannot be converted from Planetoid's files: it needs made-up features")
    features, y, test = _rows(folder, name)
    sources, targets = read_neighbours(folder / f"ind.{name}.graph")
    nodes, train = len(y), len(read_array(folder / f"ind.{name}.y"))
    if train + _VALID_NODES > nodes:
        raise SourceError(f"{folder}: {nodes} nodes cannot hold {train} training and 500 validation nodes")
    node = np.arange(nodes)
    arrays = features | {
        "edge_index": np.stack([sources, targets]),
        "y": y,
        "train_mask": node < train,
        "val_mask": (node >= train) & (node < train + _VALID_NODES),
        "test_mask": np.isin(node, test),
    }
    return replace(
        array_source(arrays, ArrayOptions(request=request, name=name, format="planetoid")),
        symmetrize=True,
        drop_self_loops=True,
        resident_bytes=sum(array.nbytes for array in arrays.values()),
        fingerprint=fingerprint_of(*folder.glob(f"ind.{name}.*")),
    )


def _rows(folder: Path, name: str) -> tuple[dict[str, AnyArray], AnyArray, AnyArray]:
    """Return the arrays of the generic form for features, with the number of classes; classes [N]; and the test nodes.

    Files list the test nodes' rows in the order of ``test.index``, after all others.
    """
    test = _test_index(folder / f"ind.{name}.test.index")
    data, indices, indptr, (others, columns) = read_csr(folder / f"ind.{name}.allx")
    tail_data, tail_indices, tail_indptr, (rows, tail_columns) = read_csr(folder / f"ind.{name}.tx")
    first, last = int(test.min()), int(test.max())
    if rows != len(test) or tail_columns != columns or first != others or len(np.unique(test)) != rows:
        raise SourceError(f"{folder}: allx, tx and test.index of {name} do not fit one another")
    # Checked before its rows are put in order.
    SparseRows(tail_data, tail_indices, tail_indptr, np.array([rows, columns]), name=f"{folder}: tx of {name}")
    lengths = np.zeros(last + 1 - others, dtype=np.int64)
    lengths[test - others] = np.diff(tail_indptr)
    order = np.argsort(np.repeat(test, np.diff(tail_indptr)), kind="stable")
    known, tested = (read_array(folder / f"ind.{name}.{part}") for part in ("ally", "ty"))
    if len(known) != others or len(tested) != rows or known.shape[1:] != tested.shape[1:] or known.ndim != 2:
        raise SourceError(f"{folder}: labels and features of {name} do not fit one another")
    for part, array in (("ally", known), ("ty", tested)):
        _check_one_hot(array, folder / f"ind.{name}.{part}")
    y = np.zeros(last + 1, dtype=np.int64)
    y[:others], y[test] = known.argmax(axis=1), tested.argmax(axis=1)
    arrays = {
        "x_data": np.concatenate([data, tail_data[order]]),
        "x_indices": np.concatenate([indices, tail_indices[order]]),
        "x_indptr": np.concatenate([indptr, indptr[-1:] + np.cumsum(lengths)]),
        "x_shape": np.array([last + 1, columns]),
        "num_classes": np.array(known.shape[1]),
    }
    return arrays, y, test


def _check_one_hot(labels: AnyArray, path: Path) -> None:
    """Raise SourceError unless each row has a single 1, or none: PyG takes the largest entry, whatever it is."""
    wrong = ((labels != 0) & (labels != 1)).any(axis=1) | ((labels != 0).sum(axis=1) > 1)
    if wrong.any():
        raise SourceError(f"{path} is damaged: row {int(wrong.argmax())} is no one-hot class")


def _test_index(path: Path) -> AnyArray:
    try:
        with as_error(SourceError, f"{path} cannot be read"):
            found = np.array(path.read_text().split(), dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise SourceError(f"{path} holds something else than node ids: {str(error)[:200]}") from error
    if not len(found):
        raise SourceError(f"{path} names no test node: it is damaged or incomplete")
    return found


READER = Reader(
    needs="folder of Planetoid's raw files (ind.NAME.*), or the one above its raw/",
    folder=True,
    recognises=lambda path: planetoid_folder(path) is not None,
    open=planetoid_source,
)
