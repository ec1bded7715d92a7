# SPDX-License-Identifier: Apache-2.0
"""What ``--edge-weight`` and ``--edge-features`` ask for: columns beside the edges, or npy files in their order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ooc.errors import OptionError, SourceError
from ooc.sources.files.npy import NpyFile
from ooc.sources.reading import Request
from ooc.sources.source import EdgeBlock, with_data

EDGE_OPTIONS = frozenset({"edge_weight", "edge_features"})
EDGE_COLUMNS_REMEDY = (
    "say with edge_weight= and edge_features= which of that is to be kept, or give drop_edge_data=True to convert "
    "without"
)


@dataclass(frozen=True)
class EdgeColumns:
    """Names of columns: of the weight, if one is, and of features."""

    weight: str | None
    features: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.weight is not None or bool(self.features)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*((self.weight,) if self.weight is not None else ()), *self.features)


@dataclass(frozen=True)
class EdgeFiles:
    """Files with a row for each edge."""

    weight: NpyFile | None
    features: NpyFile | None

    def __bool__(self) -> bool:
        return self.weight is not None or self.features is not None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in (self.weight, self.features) if file is not None)

    @property
    def num_features(self) -> int:
        return self.features.shape[1] if self.features is not None else 0

    def joined(self, edges: Callable[[int], Iterator[EdgeBlock]], size: int) -> Iterator[EdgeBlock]:
        """``edges(size)`` with what the files hold for them. SourceError where those have not as many rows."""
        return with_data(
            edges(size),
            weight=(rows.reshape(-1) for rows in self.weight.row_blocks(size)) if self.weight is not None else None,
            features=self.features.row_blocks(size) if self.features is not None else None,
            name=" and ".join(str(path) for path in self.paths),
        )


def asks_for_edge_data(request: Request) -> bool:
    """Whether the caller says which of the edges' data is to be kept."""
    return any(request.option(option) is not None for option in EDGE_OPTIONS)


def asked_columns(request: Request, columns: tuple[str, ...], where: str) -> EdgeColumns:
    """Those of ``columns`` that the request names. OptionError for others."""
    found: dict[str, tuple[str, ...]] = {}
    for option in sorted(EDGE_OPTIONS):
        text = _asked(request, option)
        names = tuple(name.strip() for name in text.split(",")) if text is not None and not _is_file(text) else ()
        for name in names:
            if name not in columns:
                there = f"it has {', '.join(columns[:20])}" if columns else "there are none"
                raise OptionError(f"{where} has no column {name!r} beside its edges; {there}")
        found[option] = names
    if len(found["edge_weight"]) > 1:
        raise OptionError(f"edge-weight {request.option('edge_weight')!r}: one column is wanted")
    every = (*found["edge_weight"], *found["edge_features"])
    if len(set(every)) < len(every):
        raise OptionError(f"edge-weight and edge-features name a column twice: {', '.join(every)}")
    return EdgeColumns(next(iter(found["edge_weight"]), None), found["edge_features"])


def asked_files(request: Request, num_edges: int | None) -> EdgeFiles:
    """The npy files that the request names; see :func:`edge_files`."""
    weight, features = (
        Path(text) if (text := _asked(request, option)) is not None and _is_file(text) else None
        for option in ("edge_weight", "edge_features")
    )
    return edge_files(weight, features, num_edges)


def edge_files(weight_path: Path | None, features_path: Path | None, num_edges: int | None) -> EdgeFiles:
    """The npy files at these paths; SourceError for those of another number of edges, where that is known."""
    weight, features = (NpyFile(path) if path is not None else None for path in (weight_path, features_path))
    if features is not None and (len(features.shape) != 2 or not features.shape[1]):
        raise SourceError(f"{features.name} has the shape {list(features.shape)}, not [edges, features]")
    if weight is not None and weight.shape not in (weight.shape[:1], (*weight.shape[:1], 1)):
        raise SourceError(f"{weight.name} has the shape {list(weight.shape)}, not one number for each edge")
    for file in (weight, features):
        if file is not None and num_edges is not None and file.shape[0] != num_edges:
            raise SourceError(f"{file.name} has {file.shape[0]} rows for {num_edges} edges")
    return EdgeFiles(weight, features)


def _asked(request: Request, option: str) -> str | None:
    text = request.option(option)
    if text is not None and request.drop_edge_data:
        raise OptionError(f"drop_edge_data=True leaves out what {option}= asks for; give one of them")
    return text


def _is_file(text: str) -> bool:
    return text.endswith(".npy")
