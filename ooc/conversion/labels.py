# SPDX-License-Identifier: Apache-2.0
"""A source's labels and splits → ``y``, ``split/*`` and ``perm``, checked on the way."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ooc.conversion.source import LabelBlock, Source
from ooc.errors import SourceError
from ooc.storage.array import create_array
from ooc.storage.store import SPLITS


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What was written."""

    num_classes: int
    split_sizes: dict[str, int]


def write_labels(source: Source, store: Path, *, block_rows: int) -> Labels:
    """Write labels, splits and original ids (nothing is reordered: row i is node i).

    SourceError for labels outside the classes, nodes in two splits or in one without a label, and an
    empty train split.
    """
    nodes = source.num_nodes
    sizes = dict.fromkeys(SPLITS, 0)
    largest = -1
    with ExitStack() as stack:
        y = stack.enter_context(create_array(store, "y", (nodes,), np.int64))
        perm = stack.enter_context(create_array(store, "perm", (nodes,), np.int64))
        splits = {
            name: stack.enter_context(create_array(store, f"split/{name}", (nodes,), np.bool_)) for name in SPLITS
        }
        for row, block in _checked(source, block_rows):
            y.append(block.y)
            perm.append(np.arange(row, row + len(block.y), dtype=np.int64))
            for name in SPLITS:
                splits[name].append(getattr(block, name))
                sizes[name] += int(getattr(block, name).sum())
            largest = max(largest, int(block.y.max()))
        if not sizes["train"]:
            raise SourceError(f"{source.name} has an empty train split: no node to train on")
    return Labels(num_classes=source.num_classes or largest + 1, split_sizes=sizes)


def _checked(source: Source, block_rows: int) -> Iterator[tuple[int, LabelBlock]]:
    row = 0
    most = np.iinfo(np.int32).max if source.num_classes is None else source.num_classes
    for block in source.labels(block_rows):
        outside = (block.y < -1) | (block.y >= most)
        if outside.any():
            at = int(outside.argmax())
            classes = f"0 to {most - 1}, -1 for none"
            raise SourceError(f"node {row + at} has the label {block.y[at]}; the classes are {classes}")
        twice = block.train.astype(np.int8) + block.valid + block.test > 1
        if twice.any():
            at = int(twice.argmax())
            names = " and ".join(name for name in SPLITS if getattr(block, name)[at])
            raise SourceError(f"the splits overlap: node {row + at} is in {names}")
        for name in SPLITS:
            bare = getattr(block, name) & (block.y < 0)
            if bare.any():
                raise SourceError(f"node {row + int(bare.argmax())} of the {name} split has no label")
        yield row, block
        row += len(block.y)
