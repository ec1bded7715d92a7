# SPDX-License-Identifier: Apache-2.0
"""SNAP's edge lists (https://snap.stanford.edu/data): two ids a line, tab or spaces, comments with ``#``.

More numbers on a line are data of the edge, in columns counted from 0. The ids are sparse; the comments at the start
say how many nodes and edges there are and whether the graph is undirected, in which case each edge is listed once.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from ooc.sources.columns import SOURCE_END, TARGET_END
from ooc.sources.edge_options import EDGE_OPTIONS
from ooc.sources.files.lines import leading_comments, line_blocks, plain_suffix, text_block_bytes
from ooc.sources.files.text_table import TextTable
from ooc.sources.formats.edges.bare_graph import NODE_OPTIONS, bare_source
from ooc.sources.formats.edges.edge_table import table_graph
from ooc.sources.reading import Reader, Request
from ooc.sources.source import Source

_SUFFIXES = (".txt", ".el", ".edges", ".edgelist")
_COUNTS = re.compile(r"\b(nodes|edges):\s*(\d+)", re.IGNORECASE)
_ENDS = {"0": SOURCE_END, "1": TARGET_END}


def _open(path: Path, request: Request) -> Source:
    comments, first = leading_comments(path)
    said = {word.lower(): int(number) for line in comments for word, number in _COUNTS.findall(line)}
    lines = partial(line_blocks, path, text_block_bytes(request.budget_bytes))
    table = TextTable(path, lines, delimiter=None, columns=max(2, len(first.split())))
    name = Path(path.stem).stem if path.suffix in (".gz", ".zst") else path.stem
    graph = replace(
        table_graph(table, name, replace(request, columns={**request.columns, **_ENDS})),
        format="snap",
        num_edges=said.get("edges") or table.rows_about,
        said=said,
        symmetrize=any(line.lower().startswith("undirected") for line in comments),
        text_ids=(False, False),
        notes=(),
    )
    return bare_source(graph, request)


def _recognises(path: Path) -> bool:
    """Text of any kind ends in .txt: the first line that is no comment must start with two ids."""
    if plain_suffix(path) not in _SUFFIXES:
        return False
    words = leading_comments(path)[1].split()
    return len(words) >= 2 and all(word.isascii() and word.isdecimal() for word in words[:2])


READER = Reader(
    needs="SNAP edge list: .txt (.el, .edges), also .gz or .zst; features and labels by options",
    folder=False,
    recognises=_recognises,
    open=_open,
    takes=NODE_OPTIONS.union(EDGE_OPTIONS),
)
