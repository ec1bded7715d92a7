# SPDX-License-Identifier: Apache-2.0
"""What ``--edge-weight`` and ``--edge-features`` ask for: columns beside the edges, or npy files in their order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ooc.errors import OptionError, SourceError
from ooc.sources.files.npy import NpyArray
from ooc.sources.reading import Request
from ooc.sources.source import EdgeBlock, with_data

EDGE_OPTIONS = ("edge_weight", "edge_features")
EDGE_COLUMNS_REMEDY = (
    "say with edge_weight= and edge_features= which of that is to be kept, or give drop_edge_data=True to convert "
    "without"
)


@dataclass(frozen=True)
class EdgeColumns:
    """Names of columns: of the weight, if one is, and of features."""

    weight: str | None = None
    features: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.features if self.weight is None else (self.weight, *self.features)


@dataclass(frozen=True)
class EdgeFiles:
    """Files with a row for each edge."""

    weight: NpyArray | None
    features: NpyArray | None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in (self.weight, self.features) if file is not None)

    @property
    def num_features(self) -> int:
        return self.features.shape[1] if self.features is not None else 0

    def joined(self, edges: Iterator[EdgeBlock], size: int) -> Iterator[EdgeBlock]:
        """``edges`` with what the files hold for them. SourceError where those have not as many rows."""
        return with_data(
            edges,
            weight=(rows.reshape(-1) for rows in self.weight.row_blocks(size)) if self.weight is not None else None,
            features=self.features.row_blocks(size) if self.features is not None else None,
            name=" and ".join(str(path) for path in self.paths),
        )


def asks_for_edge_data(request: Request) -> bool:
    """Whether the caller says which of the edges' data is to be kept."""
    return any(request.option(option) is not None for option in EDGE_OPTIONS)


def asked_columns(request: Request, columns: tuple[str, ...], where: str) -> EdgeColumns:
    """Those of ``columns`` that the request names. OptionError for others."""
    weight, features = (
        tuple(name.strip() for name in text.split(",")) if text is not None and not _is_file(text) else ()
        for text in _asked(request)
    )
    names = (*weight, *features)
    for name in names:
        if name not in columns:
            there = f"it has {', '.join(columns[:20])}" if columns else "there are none"
            raise OptionError(f"{where} has no column {name!r} beside its edges; {there}")
    if len(weight) > 1:
        raise OptionError(f"edge-weight {request.option('edge_weight')!r}: one column is wanted")
    if len(set(names)) < len(names):
        raise OptionError(f"edge-weight and edge-features name a column twice: {', '.join(names)}")
    return EdgeColumns(weight[0] if weight else None, features)


def asked_files(request: Request, num_edges: int | None) -> EdgeFiles:
    """The npy files that the request names; see :func:`edge_files`."""
    paths = (Path(text) if text is not None and _is_file(text) else None for text in _asked(request))
    return edge_files(*paths, num_edges=num_edges)


def edge_files(weight_path: Path | None, features_path: Path | None, *, num_edges: int | None) -> EdgeFiles:
    """The npy files at these paths; SourceError for those of another number of edges, where that is known."""
    weight, features = (NpyArray(path) if path is not None else None for path in (weight_path, features_path))
    if features is not None and (len(features.shape) != 2 or not features.shape[1]):
        raise SourceError(f"{features.name} has the shape {list(features.shape)}, not [edges, features]")
    if weight is not None and weight.shape not in (weight.shape[:1], (*weight.shape[:1], 1)):
        raise SourceError(f"{weight.name} has the shape {list(weight.shape)}, not one number for each edge")
    for file in (weight, features):
        if file is not None and num_edges is not None and file.shape[0] != num_edges:
            raise SourceError(f"{file.name} has {file.shape[0]} rows for {num_edges} edges")
    return EdgeFiles(weight, features)


def _asked(request: Request) -> list[str | None]:
    """What is asked for as weight and as features."""
    found = [request.option(option) for option in EDGE_OPTIONS]
    for option, text in zip(EDGE_OPTIONS, found, strict=True):
        if text is not None and request.drop_edge_data:
            raise OptionError(f"drop_edge_data=True leaves out what {option}= asks for; give one of them")
    return found


def _is_file(text: str) -> bool:
    return text.endswith(".npy")
