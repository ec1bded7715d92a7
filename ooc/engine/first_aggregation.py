# SPDX-License-Identifier: Apache-2.0
"""t · A(s · X), computed once and kept in the store under ``agg/`` for all later runs.

The array is stamped with checksums of all it depends on: features, in-edges, self-loops and relevant weights. An array
with another stamp is ignored and replaced. It is written beside its place and renamed, so that a half-written one is
never found. Where the store is not writable, nothing is kept.
"""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ooc.errors import StoreError
from ooc.model.graph import AnyScaling, RelationScaling, ends_of
from ooc.plan.workload import Direction, RelationEdges
from ooc.storage.array import Array, flush, flush_all, open_array
from ooc.storage.store import EDGE_WEIGHT, Store, write_group
from ooc.storage.types import features_name
from ooc.storage.writer import ArrayWriter
from ooc.storage.zarr_json import METADATA_FILE

GROUP = "agg"
_STAMP = "stamp.json"
_STAMP_VERSION = 1
"""The stamp's version. Aggregations without one may have been rounded by a run that kept its intermediates in
bfloat16."""
_FREE_SHARE = 2
"""The free space required, in sizes of the array: a cache must not fill a disk."""


def find_aggregation(store: Store, scaling: AnyScaling, dtype: torch.dtype) -> Array | None:
    """Return the kept aggregation, [N, F] in ``dtype``, or None if none matches the store."""
    name = _name(scaling, dtype)
    try:
        stamp = json.loads((store.path / name / _STAMP).read_text())
        if stamp != _stamp(store, scaling):
            return None
        return open_array(store.path, name)
    except (OSError, ValueError, StoreError):
        return None


def keep_aggregation(
    store: Store, scaling: AnyScaling, dtype: torch.dtype, shape: tuple[int, int], blocks: Iterable[Tensor]
) -> bool:
    """Write what the run has just computed, [N, F] of this ``shape``, to the store; return False without space or
    permission."""
    name = _name(scaling, dtype)
    rows, columns = shape
    if shutil.disk_usage(store.path).free < _FREE_SHARE * rows * columns * dtype.itemsize:
        return False
    _remove_abandoned(store)
    temporary = f"{name}{_partial(os.getpid())}"
    try:
        stamp = _stamp(store, scaling)
        store.check_unreplaced()
        write_group(store.path / GROUP, {})
        with ArrayWriter(store.path, temporary, (rows, columns), str(dtype).removeprefix("torch.")) as writer:
            for block in blocks:
                writer.append(np.ascontiguousarray(block.numpy()))
        (store.path / temporary / _STAMP).write_text(json.dumps(stamp))
        if find_aggregation(store, scaling, dtype) is not None:
            return True  # another run has kept it meanwhile, and a third may be reading it
        flush_all([store.path / temporary, store.path / GROUP / METADATA_FILE])
        store.check_unreplaced()  # another store must not get this aggregation
        shutil.rmtree(store.path / name, ignore_errors=True)
        (store.path / temporary).rename(store.path / name)
        for folder in (store.path / GROUP, store.path):
            flush(folder)
    except (OSError, StoreError):
        return False
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(store.path / temporary)
    return True


def _remove_abandoned(store: Store) -> None:
    """Remove half-written arrays of this machine's processes that no longer exist."""
    for left in (store.path / GROUP).glob(f"*{_partial('*')}"):
        if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _partial(process: int | str) -> str:
    """Return the suffix of what a process writes, which names the machine, since others may use the same store."""
    return f".partial-{socket.gethostname()}-{process}"


def _name(scaling: AnyScaling, dtype: torch.dtype) -> str:
    return f"{GROUP}/{scaling.label}_{str(dtype).removeprefix('torch.')}"


def _stamp(store: Store, scaling: AnyScaling) -> dict[str, int]:
    """Return a checksum over the chunk checksums of each array that the aggregation is made from."""
    side, x = Direction.IN.value, features_name(ends_of(scaling)[0])
    if isinstance(scaling, RelationScaling):
        side = RelationEdges(scaling.relation.folder, Direction.IN).value
    names = [x, f"{side}/indptr", f"{side}/indices"]
    names += [f"{side}/self_loops"] if store.self_loops(side) else []
    if scaling.basic.weighted:
        names.append(f"{side}/{EDGE_WEIGHT}")
    return {"form": _STAMP_VERSION, **{name: store.checksum(name) for name in names}}
