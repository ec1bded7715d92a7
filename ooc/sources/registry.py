# SPDX-License-Identifier: Apache-2.0
"""The known formats, and the choice of a source's format."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ooc.errors import OptionError, SourceError, as_error
from ooc.sources.files.lines import plain_suffix
from ooc.sources.formats import (
    graphbolt,
    igb,
    mag,
    npz_formats,
    ogb,
    planetoid,
    synthetic,
    tu_dataset,
    typed_tables,
)
from ooc.sources.formats.arrays import ARRAY_NAMES, ARRAY_OPTIONS, ArrayOptions, array_source, is_pyg_data, pyg_source
from ooc.sources.formats.edges import edge_table, webgraph
from ooc.sources.formats.held_graphs import held_source, is_held_graph
from ooc.sources.formats.many_graphs import is_many_graphs, many_graphs_source
from ooc.sources.names import DATASETS
from ooc.sources.reading import READING_OPTIONS, Reader, Request, check_taken
from ooc.sources.source import Source
from ooc.suggestions import check_choice, did_you_mean, did_you_mean_path

SYNTHETIC = "synthetic"
FORMATS: dict[str, Reader] = {
    SYNTHETIC: synthetic.READER,
    "ogb": ogb.READER,
    "mag240m": mag.READER,
    "igb": igb.READER,
    "dgl-reddit": npz_formats.REDDIT_READER,
    "graphbolt": graphbolt.READER,
    "webgraph": webgraph.READER,
    "planetoid": planetoid.READER,
    "tudataset": tu_dataset.READER,
    "heterophilous": npz_formats.HETEROPHILOUS_READER,
    "gnn-benchmark": npz_formats.BENCHMARK_READER,
    "npz": npz_formats.NPZ_READER,
    "table": edge_table.READER,
    "matrix-market": edge_table.MATRIX_READER,
    "snap": edge_table.SNAP_READER,
    "typed-tables": typed_tables.READER,
    "npy": npz_formats.NPY_READER,
}
"""Readers by the names that ``--format`` takes, in the order in which they are tried; the least specific are last."""


def open_source(source: Any, *, format: str | None, request: Request) -> Source:
    """Return the graph that ``source`` names or is; ``format`` overrides the recognised one.

    Raises OptionError for an unknown format, SourceError for a source that cannot be read.
    """
    for name in (*request.options, *request.arrays):
        if name not in READING_OPTIONS:
            raise OptionError(f"there is no option {name!r}")
    if wrong := [name for name in request.arrays if name not in ("features", "labels")]:
        raise OptionError(f"{wrong[0]}= is a {type(request.arrays[wrong[0]]).__name__}, not a text")
    if request.inputs and not (is_pyg_data(source) or is_many_graphs(source)):
        raise OptionError("inputs= names what PyG's data has beside x; elsewhere these are columns of x")
    if is_held_graph(source):
        return held_source(source, request)
    if isinstance(source, Mapping):
        for name, array in source.items():
            if np.ma.is_masked(array):
                raise SourceError(f"arrays: {name} has values that are masked; fill them, or leave these nodes out")
        check_taken(ARRAY_OPTIONS, "a dictionary of arrays", request)
        arrays = {name: np.asarray(array) for name, array in source.items() if name in ARRAY_NAMES}
        if others := [str(name) for name in source if name not in ARRAY_NAMES]:
            warnings.warn(f"arrays: not used: {', '.join(others)}", RuntimeWarning, stacklevel=3)
        return array_source(arrays, ArrayOptions(request=request, name="arrays", format="arrays"))
    if is_many_graphs(source):
        return many_graphs_source(source, request)
    if is_pyg_data(source):
        check_taken(ARRAY_OPTIONS, "PyG's data", request)
        return pyg_source(source, request)
    if not isinstance(source, str | Path):
        raise SourceError(
            f"a {type(source).__name__} is no path, PyG Data, dictionary of arrays or frames, networkx graph or "
            "sparse matrix"
        )
    path = Path(source)
    form = _recognise(path) if format is None else format
    check_choice("format", form, FORMATS)
    reader = FORMATS[form]
    if form != SYNTHETIC:
        _check_exists(path)
        if reader.folder not in (None, path.is_dir()):
            raise SourceError(f"{path} is a {'file' if reader.folder else 'folder'}; {form} wants the other")
    check_taken(reader.takes, form, request)
    return reader.open(path, request)


def _recognise(path: Path) -> str:
    if synthetic.READER.recognises(path):
        return SYNTHETIC
    _check_exists(path)
    fitting = {form: reader for form, reader in FORMATS.items() if reader.folder in (None, path.is_dir())}
    found = next((form for form, reader in fitting.items() if reader.recognises(path)), None)
    if found is None:
        kind = "folder" if path.is_dir() else "file"
        text = "; a list of edges has two whole numbers a line, names of columns and texts are for a .csv"
        more = text if plain_suffix(path) in edge_table.SNAP_SUFFIXES else ""
        if path.suffix in (".pt", ".pth", ".pkl"):
            more = "; what Python has saved is read there: ooc.convert(torch.load(…), 'my.ooc')"
        raise SourceError(
            f"the {kind} {path} is of no known format ({', '.join(fitting)}){more}; ooc convert --list says what each "
            "of them needs"
        )
    return found


def _check_exists(path: Path) -> None:
    with as_error(SourceError, f"{str(path)[:80]!r} cannot be read"):
        there = path.exists()
    if not there:
        hint = did_you_mean(str(path), DATASETS) or did_you_mean_path(path)
        raise SourceError(f"there is no file or folder {path}{hint}")
