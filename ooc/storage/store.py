# SPDX-License-Identifier: Apache-2.0
"""A converted dataset on disk: a Zarr v3 group of arrays (see ``docs/formats.md`` for its form)."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from ooc.errors import OocError, StoreError
from ooc.storage.array import AnyArray, Array, damaged, open_array
from ooc.storage.sparse_array import PARTS, SparseArray
from ooc.storage.types import EDGE_FEATURES as EDGE_FEATURES
from ooc.storage.types import EDGE_WEIGHT as EDGE_WEIGHT
from ooc.storage.types import EDGES, NODES, Types, features_name, ids_shape, of_nodes
from ooc.storage.zarr_json import METADATA_FILE, group_document, read_group
from ooc.suggestions import did_you_mean_path

FORMAT_VERSION = 7
"""The version of new stores. Stores of earlier versions, which have fewer features, are read as they are."""
PARTIAL_SUFFIX = ".partial"
SPLITS = ("train", "valid", "test")
_BLOCK_ROWS, _BLOCK_BYTES = 1 << 16, 4 << 20
_PROVENANCE = ("name", "created", "source")
"""Attributes in which stores of the same contents may differ."""
_COUNTS = ("num_nodes", "num_edges", "num_features", "num_classes", "num_self_loops")


class Task(Enum):
    """The kind of a store's labels. N nodes, L = ``num_classes``; no node may be scored without a label.

    In a store of many graphs, labels belong to graphs: then N counts graphs, and "node" below means graph. ``CLASSES``:
    ``y`` [N] int64, a class of each node, -1: none. ``MULTILABEL``: ``y`` [N, L] int8, 0 or 1 for each of L questions,
    -1: unknown. ``VALUES``: ``y`` [N, L] float32, or float64 beside features of that dtype, NaN: unknown. A row of only
    unknown entries has no label.
    """

    CLASSES = "classes"
    MULTILABEL = "multilabel"
    VALUES = "values"

    def dtype(self, features: str) -> np.dtype[Any]:
        """Return the dtype of ``y`` beside features of dtype ``features``."""
        values = "float64" if features == "float64" else "float32"
        return np.dtype({Task.CLASSES: "int64", Task.MULTILABEL: "int8", Task.VALUES: values}[self])

    def labelled(self, y: AnyArray) -> npt.NDArray[np.bool_]:
        """Return which rows of ``y`` [n] or [n, L] have a label, or some of their labels, [n]; for :meth:`valid`
        rows."""
        known = self.known(y)
        return known if self is Task.CLASSES else np.asarray(known.any(axis=1))

    def known(self, y: AnyArray) -> npt.NDArray[np.bool_]:
        """Return which entries of ``y`` are known, in its shape."""
        return np.asarray(~np.isnan(y) if self is Task.VALUES else y >= 0)

    def incomplete(self, y: AnyArray) -> npt.NDArray[np.bool_]:
        """Return which rows of ``y`` [n] or [n, L] have some of their labels, but not all, [n]."""
        if self is Task.CLASSES:
            return np.zeros(len(y), dtype=np.bool_)
        known = self.known(y)
        return np.asarray(known.any(axis=1) & ~known.all(axis=1))

    def valid(self, y: AnyArray, num_classes: int) -> npt.NDArray[np.bool_]:
        """Return which rows of ``y`` [n] or [n, L] are valid labels of this task, or none, [n]."""
        if self is Task.CLASSES:
            return np.asarray((y >= -1) & (y < num_classes))
        if self is Task.MULTILABEL:
            return np.asarray(((y == 0) | (y == 1) | (y == -1)).all(axis=1))
        return np.asarray((~np.isinf(y)).all(axis=1))

    def meaning(self, num_classes: int) -> str:
        """The meaning of a valid label, for messages."""
        return {
            Task.CLASSES: f"the classes are 0 to {num_classes - 1}, -1 for none",
            Task.MULTILABEL: "labels are 0 or 1, or -1 where they are missing",
            Task.VALUES: "values are finite, or NaN where they are missing",
        }[self]


class Store:
    """A store opened for reading. Holds metadata only, no open file; made by :func:`open_store`.

    Attributes: ``path``, ``name``, ``num_nodes``, ``num_edges`` (entries of ``in/indices``), ``num_features`` (0:
    none), ``num_classes``, ``task`` (the kind of labels), ``undirected`` (each edge exists in both directions, with the
    same data), ``num_self_loops``, ``has_edge_weight``, ``num_edge_features`` (0: none), ``source`` (what was converted
    and how), ``attributes`` (all of the group's metadata), ``ids`` and ``class_names`` (the source's names of nodes and
    classes). ``num_incomplete``: nodes with only some of their labels. ``sparse_features``: the features, if they are
    sparse, else None. ``num_graphs``: in a store of many graphs, G; graph g has the rows ``graphs/indptr[g]`` to
    ``graphs/indptr[g + 1]``, and labels and splits belong to graphs; otherwise 0. ``types``: the types of a
    heterogeneous graph, else None. Then ``num_nodes``, ``num_features``, labels, splits and ids are those of the
    labelled type, ``num_edges`` counts the edges of all types, and some types' edges may have weights; the number of
    features is by type. ``parts``: the types, or one of each ("", ``ONLY``). ``node_counts``: nodes by type.
    ``identity``: distinguishes the opened folder from another one of the same name; None without a folder.
    """

    def __init__(
        self, path: Path, attributes: dict[str, Any], arrays: dict[str, Array], *, identity: "Identity | None" = None
    ) -> None:
        self.path = path
        self._identity = identity
        self.attributes = attributes
        self.name = str(attributes["name"])
        self.num_nodes = int(attributes["num_nodes"])
        self.num_edges = int(attributes["num_edges"])
        self.num_features = int(attributes["num_features"])
        self.num_classes = int(attributes["num_classes"])
        self.task = task_of(attributes)
        self.num_self_loops = int(attributes["num_self_loops"])
        self.undirected = bool(attributes["undirected"])
        self.types, self.parts = Types.of(attributes), Types.of_any(attributes)
        self.node_counts = self.parts.nodes
        self._edge_types = {f"{kind.group}{side}": kind for kind in self.parts.edges for side in ("in", "out")}
        labelled = dict.fromkeys(("", self.parts.labelled), int(attributes.get("id_bytes", 0)))
        self._id_bytes = {**self.parts.id_bytes, **labelled}
        self.has_edge_weight = bool(self.parts.weighted)
        self.num_edge_features = int(attributes.get("num_edge_features", 0))
        self.num_incomplete = int(attributes.get("incomplete_labels", 0))
        self.num_graphs = int(attributes.get("num_graphs", 0))
        self.source: dict[str, Any] = dict(attributes["source"])
        self._arrays, self._neighbours = arrays, self.num_nodes
        self.sparse_features: SparseArray | None = None
        if "num_feature_entries" in attributes:
            self.sparse_features = SparseArray("x", path / "x", self.num_features, arrays)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges})"

    def check_one_graph(self, what: str, *, takes_types: bool = False) -> None:
        """Raise StoreError for a store of many graphs, or for a heterogeneous one unless it ``takes_types``.

        ``what``: the operation on the nodes of one graph, for the message.
        """
        if self.types is not None and not takes_types:
            raise StoreError(
                f"{self.path} has {len(self.types.nodes)} types of nodes and {len(self.types.edges)} of edges, and "
                f"{what} is for graphs with one of each"
            )
        if self.num_graphs:
            raise StoreError(
                f"{self.path} holds {self.num_graphs:,} graphs, which have the labels, and {what} is for nodes of one "
                "graph; ooc train, ooc.GraphTrainer and ooc.GraphLoader are for many"
            )

    def check_unreplaced(self) -> None:
        """Raise StoreError where the path leads to another store than the one that was opened.

        Whatever was read since the last check may then not belong to this store. Aggregations kept in it (``agg/``) do
        not count.
        """
        if self._identity is not None and _identity(self.path) != self._identity:
            raise StoreError(f"the store {self.path} was replaced or changed while it was in use; start again")

    @contextlib.contextmanager
    def unreplaced(self) -> Iterator[None]:
        """Within this context, reads belong to this store: StoreError at the end if it was replaced meanwhile.

        The error replaces any other error that follows from the replacement, such as a wrong checksum.
        """
        self.check_unreplaced()
        try:
            yield
        except OocError:
            self.check_unreplaced()  # then the replacement is the reason
            raise
        self.check_unreplaced()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder open within this context, so that its inode number cannot be reused.

        StoreError where it has been replaced already.
        """
        descriptor = -1
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the check reports it
                descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.check_unreplaced()
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def array(self, name: str) -> Array:
        """Return the array ``name``: ``"x"``, ``"y"``, ``"split/train"``, … StoreError if absent."""
        if name == "x" and self.sparse_features is not None:
            return self.sparse_features
        if name == "x":
            name = features_name(self.parts.labelled)
        if name not in self._arrays:
            present = ", ".join(self.arrays())
            raise StoreError(f"the store {self.path} has no array {name!r}; it has {present}")
        return self._arrays[name]

    def has(self, name: str) -> bool:
        """Return whether the store has the array ``name``."""
        return name in self._arrays

    def arrays(self) -> list[str]:
        """Return the names of all arrays, sorted."""
        return sorted(self._arrays)

    def topology(self, direction: str) -> tuple[Array, Array]:
        """Return ``(indptr, indices)`` of the ``"in"`` or ``"out"`` edges, the same arrays if undirected.

        ``"x"``: of sparse features, whose values are their :meth:`edge_data`. In a heterogeneous store by
        ``"edges/author__writes__paper/in"``.
        """
        folder = self._folder(direction)
        return self.array(f"{folder}/indptr"), self.array(f"{folder}/indices")

    def neighbours(self, direction: str) -> int:
        """Return the number that the ``indices`` of a topology are below: nodes at the other end, or columns of
        features."""
        if direction == "x":
            return self.num_features
        if (kind := self._edge_types.get(direction)) is None:
            return self._neighbours
        return self.node_counts[kind.source if direction.endswith("in") else kind.target]

    def edge_weight(self, direction: str) -> Array:
        """Return the weights [E] of the edges, in the order of that direction's indices. StoreError if they have
        none."""
        return self.array(f"{self._folder(direction)}/{EDGE_WEIGHT}")

    def edge_features(self, direction: str) -> Array:
        """Return the features [E, F] of the edges, in the order of that direction's indices. StoreError if they have
        none."""
        return self.array(f"{self._folder(direction)}/{EDGE_FEATURES}")

    def edge_data(self, direction: str) -> list[Array]:
        """Return all edge data in that direction: weights, then features; empty for most stores."""
        folder = self._folder(direction)
        names = ["values"] if folder == "x" else self.parts.edge_data_shapes(self._edge_types[folder])
        return [self.array(f"{folder}/{name}") for name in names]

    def self_loops(self, direction: str) -> int | None:
        """Return how many edges of a topology are self-loops; None between two node types, and where they were not
        counted.

        ``in/self_loops`` has those of each row, if there are any.
        """
        return self.parts.self_loops.get(self._edge_types[direction])

    def _folder(self, direction: str) -> str:
        if direction not in ("in", "out", "x") and not self.has(f"{direction}/indptr"):
            raise ValueError(f"direction {direction!r} is neither 'in' nor 'out'")
        return "in" if self.undirected and direction == "out" else direction

    def with_arrays(self, arrays: Mapping[str, Array], *, neighbours: int) -> "Store":
        """Return the same store with further ``arrays`` from elsewhere; the indices of their topologies are below
        ``neighbours``."""
        joined = Store(self.path, self.attributes, {**self._arrays, **arrays}, identity=self._identity)
        joined._neighbours = neighbours
        return joined

    @property
    def id_type(self) -> np.dtype[Any]:
        """The dtype of the source's ids: int64, or bytes (``S``) of UTF-8 as long as the longest."""
        return self.id_type_of("")

    def id_type_of(self, node_type: str) -> np.dtype[Any]:
        """Return the dtype of the ids of a node type; "": of the labelled type."""
        width = self._id_bytes.get(node_type, 0)
        return np.dtype(f"S{width}") if width else np.dtype(np.int64)

    def _array_name(self, node_type: str, name: str) -> str:
        """Return the array ``name`` of a node type; "" is the labelled type, whose arrays have short names."""
        return of_nodes("" if node_type == self.parts.labelled else node_type, name)

    def ids_of_rows(self) -> Iterator[tuple[int, AnyArray]]:
        """Yield ``(first row, ids)``: the source's ids of the nodes in the store's rows, some at a time."""
        size = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // self.id_type.itemsize))
        for start in range(0, self.num_nodes, size):
            yield start, self.read_ids(start, min(start + size, self.num_nodes))

    def read_ids(self, start: int, stop: int, node_type: str = "") -> AnyArray:
        """Return the source's ids of the nodes in the rows ``[start, stop)``, [n] with the dtype of
        :meth:`id_type_of`."""
        name = self._array_name(node_type, "ids")
        if not self.has(name):
            return self.read_numbers(start, stop, node_type)
        ids = self.array(name).read(start, stop)
        return ids if ids.ndim == 1 else ids.view(self.id_type_of(node_type)).reshape(-1)

    def read_numbers(self, start: int, stop: int, node_type: str = "") -> AnyArray:
        """Return the numbers before conversion of a type's nodes in the rows ``[start, stop)``, int64 [n]."""
        name = self._array_name(node_type, "perm")
        return self.array(name).read(start, stop) if self.has(name) else np.arange(start, stop)

    @property
    def ids(self) -> AnyArray | None:
        """The source's ids of all nodes, [N] in the order of predictions, read on each access: int64, or texts (``str``
        objects).

        None where they are 0 … N-1.
        """
        if not self.has("ids"):
            return None
        texts = self.id_type.kind == "S"
        ids: AnyArray = np.empty(self.num_nodes, dtype=np.object_ if texts else np.int64)
        for start, called in self.ids_of_rows():
            numbers = self.array("perm").read(start, start + len(called))
            ids[numbers] = [text.decode() for text in called.tolist()] if texts else called
        return ids

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The source's names of the classes, by their numbers in ``y``; None where they are numbers."""
        names = self.attributes.get("class_names")
        return tuple(str(name) for name in names) if names else None

    @property
    def nbytes(self) -> int:
        """The bytes of all files of the store on disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the contents: attributes, and by array a checksum over those of its chunks.

        It is equal for a copy, and for another conversion to the same bytes.
        """
        said = {name: value for name, value in self.attributes.items() if name not in _PROVENANCE}
        return said | {name: self.checksum(name) if self.array(name).has_checksums else None for name in self.arrays()}

    def checksum(self, name: str) -> int:
        """Return a checksum over the checksums of an array's chunks."""
        return int(google_crc32c.value(self.array(name).checksums().tobytes()))

    @property
    def split_sizes(self) -> dict[str, int]:
        """The numbers of nodes, or graphs, in ``train``, ``valid``, ``test``."""
        return {split: int(self.attributes["split_sizes"][split]) for split in SPLITS}


Identity = tuple[tuple[int, ...], ...]


def _identity(path: Path) -> Identity | None:
    """Return the identity of the folder at ``path`` and of its metadata file; None without a store.

    The inode of a removed folder is reused; therefore the file's size and time are included.
    """
    try:
        folder, file = path.stat(), (path / METADATA_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"the store {path} cannot be read: {error.strerror or error}") from error
    return (folder.st_dev, folder.st_ino), (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns)


def task_of(attributes: dict[str, Any]) -> Task:
    """Return the task that a group's ``attributes`` name; raise ValueError for an unknown one."""
    return Task(attributes.get("task", Task.CLASSES.value))


def array_shapes(attributes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the arrays that a store with these attributes must have, with their shapes."""
    nodes, graphs = int(attributes["num_nodes"]), int(attributes.get("num_graphs", 0))
    labelled = graphs or nodes
    classes = () if task_of(attributes) is Task.CLASSES else (int(attributes["num_classes"]),)
    shapes = Types.of_any(attributes).array_shapes(undirected=bool(attributes["undirected"]))
    if "num_feature_entries" in attributes:
        entries = int(attributes["num_feature_entries"])
        shapes.pop("x", None)
        shapes |= {f"x/{part}": (nodes + 1,) if part == "indptr" else (entries,) for part in PARTS}
    shapes |= {"y": (labelled, *classes), "perm": (nodes,), **{f"split/{split}": (labelled,) for split in SPLITS}}
    if attributes.get("has_ids", False):
        shapes["ids"] = ids_shape(nodes, int(attributes.get("id_bytes", 0)))
    if graphs:
        shapes["graphs/indptr"] = (graphs + 1,)
    return shapes


def array_path(attributes: dict[str, Any], name: str) -> str:
    """Return the path of the array ``name`` in a store with these attributes; in a heterogeneous one, labels are in the
    group of their type."""
    return name if name.startswith((f"{NODES}/", f"{EDGES}/")) else of_nodes(attributes.get("labelled", ""), name)


def open_store(path: str | Path) -> Store:
    """Open the store at ``path``. Reads metadata only.

    Raises StoreError, in one line, for a missing, interrupted, damaged or too new store.
    """
    if not isinstance(path, str | Path):
        raise StoreError(f"a {type(path).__name__} is no path of a store; ooc.convert(data, 'my.ooc') makes one")
    path = Path(path)
    identity = _identity(path)  # taken before anything is read, to detect a replacement meanwhile
    attributes = _read_attributes(path)
    try:
        version = attributes["ooc_format"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"ooc_format is {version!r}")
        if version > FORMAT_VERSION:
            raise StoreError(
                f"the store {path} has format version {version}, newer than the {FORMAT_VERSION} "
                f"this ooc reads; upgrade ooc or convert again"
            )
        if attributes["complete"] is not True:
            raise _interrupted_error(path)
        if any(not isinstance(attributes[count], int) or attributes[count] < 0 for count in _COUNTS):
            raise ValueError("a count is no number")
        for reached in (attributes[name] for name in ("hops", "train_hops") if attributes.get("order") == "hop"):
            if not reached or any(not isinstance(rows, int) for rows in reached):
                raise ValueError("rows by hops are no numbers")
        shapes = array_shapes(attributes)
        arrays = {name: open_array(path, array_path(attributes, name)) for name in shapes}
        store = Store(path, attributes, arrays, identity=identity)
        if any(not 0 <= size <= (store.num_graphs or store.num_nodes) for size in store.split_sizes.values()):
            raise ValueError("a split is larger than what there is")
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise damaged(path, error) from error
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise StoreError(f"the store {path} has {name} of shape {arrays[name].shape}, not {shape}")
    return store


def write_groups(path: Path, attributes: dict[str, Any]) -> None:
    """Write the metadata of all groups of the store with these attributes at the folder ``path``, its own last."""
    names = [array_path(attributes, name) for name in array_shapes(attributes)]
    names += map(features_name, Types.of_any(attributes).nodes)  # some of these may have no array
    for group in {parent for name in names for parent in PurePath(name).parents if parent.name}:
        write_group(path / group, {})
    write_group(path, attributes)


def write_group(path: Path, attributes: dict[str, Any]) -> None:
    """Write the metadata of a Zarr v3 group at the folder ``path``, made if needed."""
    path.mkdir(parents=True, exist_ok=True)
    (path / METADATA_FILE).write_bytes(group_document(attributes))


def _read_attributes(path: Path) -> dict[str, Any]:
    partial = path.parent / (path.name + PARTIAL_SUFFIX)
    if path.name.endswith(PARTIAL_SUFFIX) or (partial.exists() and not path.exists()):
        raise _interrupted_error(path)
    if not path.exists():
        raise StoreError(f"there is no store at {path}{did_you_mean_path(path)}")
    if not (path / METADATA_FILE).is_file():
        raise StoreError(f"{path} is not a store: it has no {METADATA_FILE}")
    try:
        attributes = read_group(path)
    except (MemoryError, StoreError):
        raise
    except Exception as error:  # zarr may raise anything for an invalid document
        raise damaged(path, error) from error
    if "ooc_format" not in attributes:
        raise StoreError(f"{path} is a Zarr group, but no store made by ooc convert")
    return attributes


def _interrupted_error(path: Path) -> StoreError:
    return StoreError(f"the conversion of {path} was interrupted; convert again: it goes on from there")
