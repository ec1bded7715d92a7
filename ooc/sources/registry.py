# SPDX-License-Identifier: Apache-2.0
"""Which format a source has, and the reader for it."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import OptionError, SourceError
from ooc.sources.formats import (
    dgl_reddit,
    edge_table,
    graphbolt,
    igb,
    mag,
    matrix_market,
    npz_formats,
    ogb,
    planetoid,
    snap,
    synthetic,
    webgraph,
)
from ooc.sources.formats.arrays import ARRAY_NAMES, ArrayOptions, array_source
from ooc.sources.formats.pyg_data import is_pyg_data, pyg_source
from ooc.sources.reading import READING_OPTIONS, Reader, Request
from ooc.sources.source import Source


class Format(Enum):
    """Forms of source on disk, by the names ``--format`` takes."""

    SYNTHETIC = "synthetic"
    OGB = "ogb"
    MAG240M = "mag240m"
    IGB = "igb"
    DGL_REDDIT = "dgl-reddit"
    GRAPHBOLT = "graphbolt"
    WEBGRAPH = "webgraph"
    PLANETOID = "planetoid"
    HETEROPHILOUS = "heterophilous"
    BENCHMARK = "gnn-benchmark"
    NPZ = "npz"
    TABLE = "table"
    MATRIX_MARKET = "matrix-market"
    SNAP = "snap"
    NPY = "npy"


FORMATS: dict[Format, Reader] = {
    Format.SYNTHETIC: synthetic.READER,
    Format.OGB: ogb.READER,
    Format.MAG240M: mag.READER,
    Format.IGB: igb.READER,
    Format.DGL_REDDIT: dgl_reddit.READER,
    Format.GRAPHBOLT: graphbolt.READER,
    Format.WEBGRAPH: webgraph.READER,
    Format.PLANETOID: planetoid.READER,
    Format.HETEROPHILOUS: npz_formats.HETEROPHILOUS_READER,
    Format.BENCHMARK: npz_formats.BENCHMARK_READER,
    Format.NPZ: npz_formats.NPZ_READER,
    Format.TABLE: edge_table.READER,
    Format.MATRIX_MARKET: matrix_market.READER,
    Format.SNAP: snap.READER,
    Format.NPY: npz_formats.NPY_READER,
}
"""Asked in this order whether a path is theirs: the particular ones first, those that take anything last."""


def open_source(source: Any, *, format: str | None, request: Request) -> Source:
    """The graph ``source`` names or is; ``format`` overrides what a path looks like.

    Raises OptionError for an unknown format, SourceError for a source that cannot be read.
    """
    for name in request.options:
        if name not in READING_OPTIONS:
            raise OptionError(f"there is no option {name!r}")
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(array) for name, array in source.items() if name in ARRAY_NAMES}
        return array_source(arrays, ArrayOptions(request=request, name="arrays", format="arrays"))
    if is_pyg_data(source):
        return pyg_source(source, request)
    if not isinstance(source, str | Path):
        raise SourceError(f"a {type(source).__name__} is neither a path, nor PyG Data, nor a dictionary of arrays")
    path = Path(source)
    form = _recognised(path) if format is None else _named(format)
    reader = FORMATS[form]
    if form is not Format.SYNTHETIC:
        _check_kind(path, form, reader)
    reader.check(form.value, request)
    return reader.open(path, request)


def _named(format: str) -> Format:
    known = {form.value: form for form in Format}
    if format not in known:
        raise OptionError(f"format {format!r} is not one of {', '.join(known)}")
    return known[format]


def _recognised(path: Path) -> Format:
    if synthetic.READER.recognises(path):
        return Format.SYNTHETIC
    if not path.exists():
        raise SourceError(f"there is no file or folder {path}")
    for form, reader in FORMATS.items():
        if reader.folder in (None, path.is_dir()) and reader.recognises(path):
            return form
    kind = "folder" if path.is_dir() else "file"
    wanted = ", ".join(form.value for form, reader in FORMATS.items() if reader.folder in (None, path.is_dir()))
    raise SourceError(
        f"the {kind} {path} is of no known format ({wanted}); ooc convert --list says what each of them needs"
    )


def _check_kind(path: Path, form: Format, reader: Reader) -> None:
    if not path.exists():
        raise SourceError(f"there is no file or folder {path}")
    if reader.folder is not None and path.is_dir() != reader.folder:
        raise SourceError(f"{path} is a {'file' if reader.folder else 'folder'}; {form.value} wants the other")
