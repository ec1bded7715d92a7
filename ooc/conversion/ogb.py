# SPDX-License-Identifier: Apache-2.0
"""Node datasets as the ``ogb`` package lays them out: a folder, or the zip it is downloaded as, which stays packed.

The layout is that of ``ogb/nodeproppred/dataset.py``, ``ogb/io/read_graph_raw.py`` and ``master.csv`` of
https://github.com/snap-stanford/ogb: ``raw/data.npz`` and ``raw/node-label.npz`` (papers100M: see
``ogb_binary``) or ``raw/*.csv.gz`` (the others: see ``ogb_csv``), and ``split/KIND/``.
"""

from pathlib import Path

from ooc.conversion.ogb_binary import binary_source
from ooc.conversion.ogb_csv import csv_source
from ooc.conversion.ogb_files import OgbFiles, has_ogb_files
from ooc.conversion.reading import Reader, Request
from ooc.conversion.source import Source


def ogb_source(path: Path, request: Request) -> Source:
    """The graph in the folder or zip ``path``."""
    files = OgbFiles(path)
    if files.has("raw/data.npz"):
        return binary_source(files, request)
    return csv_source(files, request)


READER = Reader(
    needs="an ogbn dataset's folder or .zip, as ogb downloads it (raw/data.npz or raw/*.csv.gz, split/)",
    folder=None,
    recognises=has_ogb_files,
    open=ogb_source,
)
