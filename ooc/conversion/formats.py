# SPDX-License-Identifier: Apache-2.0
"""Which format a source has, and the reader for it."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from ooc.conversion.archive import map_npy_folder, npz_names, read_npz
from ooc.conversion.arrays import ARRAY_NAMES, ArrayOptions, array_source
from ooc.conversion.npz_formats import (
    BENCHMARK,
    HETEROPHILOUS,
    benchmark_arrays,
    heterophilous_arrays,
    is_benchmark,
    is_heterophilous,
)
from ooc.conversion.planetoid import planetoid_folder, planetoid_source
from ooc.conversion.pyg_data import is_pyg_data, pyg_source
from ooc.conversion.source import Source
from ooc.conversion.synthetic import PREFIX, synthetic_source
from ooc.errors import OptionError, SourceError


class Format(Enum):
    """Forms of source on disk, by the names ``--format`` takes."""

    SYNTHETIC = "synthetic"
    PLANETOID = "planetoid"
    HETEROPHILOUS = "heterophilous"
    BENCHMARK = "gnn-benchmark"
    NPZ = "npz"
    NPY = "npy"


def open_source(source: Any, *, format: str | None, split: int | str | None, budget_bytes: int) -> Source:
    """The graph ``source`` names or is; ``format`` overrides what a path looks like.

    Raises OptionError for an unknown format, SourceError for a source that cannot be read.
    """
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(array) for name, array in source.items() if name in ARRAY_NAMES}
        return array_source(arrays, ArrayOptions(name="arrays", format="arrays", split=split))
    if is_pyg_data(source):
        return pyg_source(source, split=split)
    if not isinstance(source, str | Path):
        raise SourceError(f"a {type(source).__name__} is neither a path, nor PyG Data, nor a dictionary of arrays")
    known = {form.value: form for form in Format}
    if format is not None and format not in known:
        raise OptionError(f"format {format!r} is not one of {', '.join(known)}")
    form = _recognised(str(source)) if format is None else known[format]
    path = Path(source)
    if form is not Format.SYNTHETIC:
        _check_kind(path, form)
    match form:
        case Format.SYNTHETIC:
            _refuse_split(form, split)
            return synthetic_source(str(source))
        case Format.PLANETOID:
            _refuse_split(form, split)
            return planetoid_source(path)
        case Format.NPY:
            mapped, release = map_npy_folder(path, ARRAY_NAMES)
            name = path.resolve().name
            return array_source(mapped, ArrayOptions(name=name, format=form.value, split=split, release=release))
        case Format.HETEROPHILOUS | Format.BENCHMARK | Format.NPZ:
            return _npz_source(path, form, split=split, budget_bytes=budget_bytes)
        case _:
            assert_never(form)


def _npz_source(path: Path, form: Format, *, split: int | str | None, budget_bytes: int) -> Source:
    wanted = {Format.HETEROPHILOUS: HETEROPHILOUS, Format.BENCHMARK: BENCHMARK}.get(form, ARRAY_NAMES)
    arrays, held = read_npz(path, wanted, budget_bytes=budget_bytes)
    special = form is not Format.NPZ
    if form is Format.HETEROPHILOUS:
        arrays = heterophilous_arrays(arrays, path.stem)
    elif form is Format.BENCHMARK:
        arrays = benchmark_arrays(arrays, path.stem)
        split = "random" if split is None else split  # The format has none.
    options = ArrayOptions(
        name=path.stem,
        format=form.value,
        symmetrize=special,
        drop_self_loops=form is Format.BENCHMARK,
        split=split,
        resident_bytes=held,
    )
    return array_source(arrays, options)


def _recognised(source: str) -> Format:
    if source.startswith(PREFIX):
        return Format.SYNTHETIC
    path = Path(source)
    if not path.exists():
        raise SourceError(f"there is no file or folder {path}")
    if path.is_dir():
        if planetoid_folder(path):
            return Format.PLANETOID
        if list(path.glob("*.npy")):
            return Format.NPY
        raise SourceError(f"the folder {path} holds neither Planetoid's ind.* nor npy files")
    if path.suffix != ".npz":
        raise SourceError(f"{path} is of no known format; known are npz files, npy folders and Planetoid's")
    names = npz_names(path)
    if is_heterophilous(names):
        return Format.HETEROPHILOUS
    return Format.BENCHMARK if is_benchmark(names) else Format.NPZ


def _check_kind(path: Path, form: Format) -> None:
    if not path.exists():
        raise SourceError(f"there is no file or folder {path}")
    folder = form in (Format.PLANETOID, Format.NPY)
    if path.is_dir() != folder:
        raise SourceError(f"{path} is a {'file' if folder else 'folder'}; {form.value} wants the other")


def _refuse_split(form: Format, split: int | str | None) -> None:
    if split is not None:
        raise OptionError(f"{form.value} has a split of its own; split={split} cannot be chosen")
