# SPDX-License-Identifier: Apache-2.0
"""WebGraph's BVGraph: ``NAME.graph`` and ``NAME.properties`` (Boldi and Vigna, "The WebGraph framework I: compression
techniques", WWW 2004), read from the first node to the last; ``NAME.offsets`` is not needed.

A node's successors are blocks copied from those of an earlier node within the window, intervals of consecutive ids, and
the rest as gaps. The properties count all of these, and the counts are compared at the end. So are the sizes of the
gaps between successors, which differ where a list was replaced by another one of the same length.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ooc.errors import SourceError, as_error
from ooc.sources.formats.edges.bare_graph import EDGE_OPTIONS, NODE_OPTIONS, bare_source
from ooc.sources.formats.edges.bvgraph import Code, Family, Layout, Successors
from ooc.sources.numbered import BareGraph, of_numbers
from ooc.sources.reading import Reader, Request
from ooc.sources.source import EdgeBlock, Source

_CLASS = "it.unimi.dsi.webgraph.BVGraph"
_MOST_PROPERTY_BYTES = 1 << 20
_MOST_WINDOW = 1 << 10
_MOST_K = 16
_MOST_GAP_BITS = 64
_ROLES = {
    "OUTDEGREES": "outdegree",
    "REFERENCES": "reference",
    "BLOCK_COUNT": "block_count",
    "BLOCKS": "block",
    "RESIDUALS": "residual",
}
_ARCS = {"copied arcs": "copiedarcs", "arcs in intervals": "intervalisedarcs", "residual arcs": "residualarcs"}
_BITS = ("outdegrees", "references", "blocks", "intervals", "residuals")


@dataclass(frozen=True, kw_only=True)
class _Properties:
    nodes: int
    arcs: int
    layout: Layout
    counts: dict[str, int]
    """The counts given in the file, by the names of :meth:`Successors.check_end`."""
    gaps: tuple[int, ...] | None
    """The numbers of successors that are 2^k to 2^(k+1) - 1 past the one before, by k; see :class:`_Gaps`."""


def _open(path: Path, request: Request) -> Source:
    base = _base(path)
    stream, described = base.with_name(base.name + ".graph"), base.with_name(base.name + ".properties")
    for part in (stream, described):
        if not part.is_file():
            raise SourceError(f"{path}: the graph {base.name} needs {part}, which is not there")
    properties = _read_properties(described, stream)

    def edges(size: int) -> Iterator[EdgeBlock]:
        layout, gaps = properties.layout, _Gaps()
        successors = Successors(stream, nodes=properties.nodes, layout=layout, budget_bytes=request.budget_bytes)
        for block in _blocks(successors, size, stream):
            gaps.add(block)
            yield block
        successors.check_end(properties.counts)
        gaps.check_end(properties.gaps, stream)

    return bare_source(
        BareGraph(
            name=base.name,
            format="webgraph",
            files=(stream, described),
            edges=of_numbers(edges),
            num_edges=properties.arcs,
            counted=True,
            num_nodes=properties.nodes,
        ),
        request,
    )


class _Gaps:
    """A histogram of the gaps between successors by their powers of two, as WebGraph's writer makes it.

    The first successor of a list counts by its distance from the node: twice the distance, or one less if it lies
    before the node (0 is not counted): ``BVGraph.updateBins``.
    """

    def __init__(self) -> None:
        self._found = np.zeros(_MOST_GAP_BITS, dtype=np.int64)

    def add(self, block: EdgeBlock) -> None:
        """Count the gaps in ``block``, the complete ascending lists of some nodes."""
        sources, found = block.sources, block.targets
        first = np.ones(len(found), dtype=np.bool_)
        first[1:] = sources[1:] != sources[:-1]
        gaps = np.diff(found, prepend=0)
        ahead = found[first] - sources[first]
        gaps[first] = np.where(ahead < 0, -2 * ahead - 1, 2 * ahead)
        # The exponent of a float64 is exact: ids are below 2^53.
        bits = np.frexp(gaps.astype(np.float64))[1] - 1
        self._found += np.bincount(bits[gaps > 0], minlength=_MOST_GAP_BITS)

    def check_end(self, wanted: tuple[int, ...] | None, stream: Path) -> None:
        """Raise SourceError where the histogram differs from ``wanted``."""
        found = np.trim_zeros(self._found, "b").tolist()
        if wanted is not None and list(wanted) != found:
            raise SourceError(f"{stream} has other gaps between successors than its properties count: it is damaged")


def _blocks(successors: Successors, size: int, stream: Path) -> Iterator[EdgeBlock]:
    targets, degrees, first = array("q"), array("q"), 0
    for found in successors:
        targets.extend(found)
        degrees.append(len(found))
        if len(targets) >= size or len(degrees) >= size:
            yield _block(targets, degrees, first, stream)
            first += len(degrees)
            targets, degrees = array("q"), array("q")
    yield _block(targets, degrees, first, stream)


def _block(targets: "array[int]", degrees: "array[int]", first: int, stream: Path) -> EdgeBlock:
    counts, found = np.frombuffer(degrees, dtype=np.int64), np.frombuffer(targets, dtype=np.int64)
    sources = np.repeat(np.arange(first, first + len(counts)), counts)
    twice = (found[1:] == found[:-1]) & (sources[1:] == sources[:-1])
    if twice.any():
        at = int(twice.argmax())
        raise SourceError(f"{stream} is damaged: node {sources[at]} has the successor {found[at]} twice")
    return EdgeBlock(sources, found)


def _base(path: Path) -> Path:
    """Return the graph's path without suffix; ``path`` may be one of its files, that path, or their folder."""
    if path.is_dir():
        found = _graphs(path)
        if len(found) != 1:
            raise SourceError(f"the folder {path} holds {len(found)} WebGraph graphs (NAME.graph), not one")
        return found[0].with_suffix("")
    return path.with_suffix("") if path.suffix in (".graph", ".properties") else path


def _graphs(folder: Path) -> list[Path]:
    """Return the graphs in ``folder``; other formats' ``.graph`` files have no properties beside them."""
    return sorted(path for path in folder.glob("*.graph") if path.with_suffix(".properties").is_file())


def _read_properties(path: Path, stream: Path) -> _Properties:
    values = _pairs(path)
    kind = values.get("graphclass", "").removeprefix("class ").strip()
    if kind != _CLASS:
        raise SourceError(f"{path} describes a {kind or 'graph of no class'}; only {_CLASS} can be read")
    if values.get("endianness", "big") != "big" or values.get("version", "0") != "0":
        raise SourceError(f"{path}: only big-endian graphs of version 0 can be read")
    nodes, arcs = _number(values, "nodes", path), _number(values, "arcs", path)
    # A node takes a bit at the least: its outdegree.
    if not 0 < nodes <= 8 * stream.stat().st_size:
        raise SourceError(f"{stream} is too short for {nodes} nodes, or {path} is damaged")
    window, k = _number(values, "windowsize", path), _number(values, "zetak", path)
    if window > _MOST_WINDOW or not 1 <= k <= _MOST_K:
        raise SourceError(f"{path} says windowsize={window}, zetak={k}, which cannot be")
    layout = Layout(
        window=window,
        least_interval=_number(values, "minintervallength", path),
        **_codes(values.get("compressionflags", ""), k, path),
    )
    bits = [f"bitsfor{part}" for part in _BITS]
    return _Properties(
        nodes=nodes,
        arcs=arcs,
        layout=layout,
        counts={
            **({"bits": sum(_number(values, name, path) for name in bits)} if set(bits) <= set(values) else {}),
            "arcs": arcs,
            **{name: _number(values, key, path) for name, key in _ARCS.items() if key in values},
        },
        gaps=_gap_counts(values, path),
    )


def _codes(flags: str, k: int, path: Path) -> dict[str, Code]:
    """Return the code of each role: the published one, or as ``flags`` (``RESIDUALS_GAMMA|…``) say."""
    found = {role: Code(Family.GAMMA) for role in _ROLES.values()}
    found |= {"reference": Code(Family.UNARY), "residual": Code(Family.ZETA, k)}
    for flag in filter(None, (part.strip() for part in flags.split("|"))):
        part, _, name = flag.rpartition("_")
        family = next((family for family in Family if family.name == name), None)
        if part == "OFFSETS":
            continue
        if part not in _ROLES or family is None:
            raise SourceError(f"{path} asks for the code {flag}, which cannot be read")
        found[_ROLES[part]] = Code(family, k if family is Family.ZETA else 0)
    return found


def _pairs(path: Path) -> dict[str, str]:
    """Yield the lines ``key=value`` of a Java properties file."""
    with as_error(SourceError, f"{path} cannot be read"):
        if path.stat().st_size > _MOST_PROPERTY_BYTES:
            raise SourceError(f"{path} is no properties file: it is too large")
        lines = path.read_text("latin-1").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith(("#", "!")))
    return {key.strip(): value.strip() for key, _, value in pairs}


def _number(values: dict[str, str], name: str, path: Path) -> int:
    text = values.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise SourceError(f"{path} says {name}={text!r}" if text else f"{path} lacks {name}")
    return int(text)


def _gap_counts(values: dict[str, str], path: Path) -> tuple[int, ...] | None:
    """Return the histogram of gaps, without zeros at the end; None where the file does not give it."""
    if "successorexpstats" not in values:
        return None
    texts = values["successorexpstats"].split(",")
    if len(texts) > _MOST_GAP_BITS or not all(text.isascii() and text.isdecimal() for text in texts):
        raise SourceError(f"{path} says successorexpstats={','.join(texts)[:60]!r}, which are no counts")
    return tuple(np.trim_zeros([int(text) for text in texts], "b"))


READER = Reader(
    needs="WebGraph NAME.graph beside NAME.properties (either, or their folder); features and labels by options",
    folder=None,
    recognises=lambda path: bool(_graphs(path)) if path.is_dir() else path.suffix in (".graph", ".properties"),
    open=_open,
    takes=NODE_OPTIONS.union(EDGE_OPTIONS),
)
