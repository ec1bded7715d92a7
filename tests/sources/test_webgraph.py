# SPDX-License-Identifier: Apache-2.0
"""BVGraph: every code against another implementation, a published graph node for node, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.errors import BudgetError, SourceError
from ooc.sources.formats.edges import bvgraph, webgraph
from ooc.sources.formats.edges.bvgraph import KNOWN_BITS, Code, Family, Layout, Successors
from ooc.sources.formats.edges.webgraph import READER, _read_properties
from ooc.sources.reading import Request
from tests.conversion.arrays import edges_of, in_order
from tests.sources.fixtures import FIXTURES, Made, random_graph
from tests.sources.fixtures.webgraph import delta, gamma, unary, zeta

_WITHOUT_K = (Family.UNARY, Family.GAMMA, Family.DELTA)
_MADE_UP = {"features": "random:4", "labels": "random:3"}


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, 5000), st.integers(0, 2**40)), min_size=1),
    st.sampled_from(
        [*((Family.ZETA, k) for k in range(1, 8)), (Family.GAMMA, 0), (Family.DELTA, 0), (Family.UNARY, 0)]
    ),
    st.integers(0, 15),
)
def test_codes_read_what_was_written(values: list[int], kind: tuple[Family, int], skipped: int) -> None:
    """One after the other from any bit on; short ones are known the second time."""
    family, k = kind
    if family is Family.UNARY:
        values = [value % 300 for value in values]
    write = {Family.ZETA: lambda value: zeta(value, k), Family.GAMMA: gamma, Family.DELTA: delta, Family.UNARY: unary}
    words = [write[family](value) for value in values]
    bits, code = "1" * skipped + "".join(words) + "0" * KNOWN_BITS, Code(family, k)
    for _ in range(2):
        at = skipped
        for value, word in zip(values, words, strict=True):
            assert code.read(bits, at) == (value, at + len(word))
            assert (bits[at : at + KNOWN_BITS] in code.known) == (len(word) <= KNOWN_BITS)
            at += len(word)


def test_codewords_past_the_end_are_noticed() -> None:
    """At any bit in which one stops, though a shorter one would be there."""
    for family in Family:
        code, word = (
            Code(family, 3),
            {Family.UNARY: unary(20), Family.GAMMA: gamma(40), Family.DELTA: delta(40)}.get(family, zeta(40, 3)),
        )
        assert code.read(word, 0)[1] == len(word)
        for stop in range(len(word)):
            with pytest.raises(IndexError):
                code.read(word[:stop], 0)
    with pytest.raises(ValueError, match="62 bits"):
        Code(Family.GAMMA).read("0" * 70 + "1" * 71, 0)


def test_cnr_2000_is_the_published_graph(real_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many arcs as its properties say, the first rows of the text form, every list where its offset says."""
    base = real_graphs / "cnr-2000" / "cnr-2000"
    starts, rows, arcs = [0], list[list[int]](), 0

    class Watched(Successors):
        def __iter__(self) -> Iterator[list[int]]:
            nonlocal arcs
            for found in super().__iter__():
                starts.append(self._bits)
                arcs += len(found)
                if len(rows) < 5:
                    rows.append(found)
                yield found

    monkeypatch.setattr(webgraph, "Successors", Watched)
    store = ooc.convert(base.parent, tmp_path / "c.ooc", host_budget="200M", **_MADE_UP)
    properties = _read_properties(base.with_suffix(".properties"), base.with_suffix(".graph"))
    assert arcs == properties.arcs == 3_216_152 and len(starts) == 325_557 + 1
    assert rows[0] == [1, 4, 8, 219, 220] and rows[1][:3] == [0, 7, 8]
    assert starts == _offsets(base.with_suffix(".offsets"), len(starts))
    assert store.num_edges == 3_216_152 and store.name == "c"
    targets, sources = store.array("out/indices").read(0, 5), store.array("out/indptr").read(0, 3)
    assert targets.tolist() == rows[0] and sources.tolist() == [0, 5, 5 + len(rows[1])]


def _offsets(path: Path, count: int) -> list[int]:
    """The file of bit offsets, γ-coded differences, read with nothing of the decoder's."""
    text = "".join(format(byte, "08b") for byte in path.read_bytes())
    found, at, total = [], 0, 0
    for _ in range(count):
        one = text.index("1", at)
        zeros = one - at
        total += int(text[one : one + zeros + 1], 2) - 1
        found.append(total)
        at = one + zeros + 1
    return found


def test_a_list_longer_than_a_chunk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 bytes: nearly every list is read again with a larger one."""
    monkeypatch.setattr(bvgraph, "_CHUNK_BYTES", 8)
    made = _made("webgraph", tmp_path)
    store = ooc.convert(made.source, tmp_path / "g.ooc", **made.options)
    np.testing.assert_array_equal(edges_of(store), in_order(made.graph.edge_index))
    with pytest.raises(BudgetError, match="is too long for the host budget"):
        list(READER.open(made.source, _request(1)).edges(100))


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_edges_come_in_blocks_of_whole_lists(tmp_path: Path, size: int) -> None:
    """Also of a graph whose properties name the code of its offsets, and do not count its gaps."""
    made = _made("webgraph", tmp_path)
    path = made.source.with_suffix(".properties")
    lines = [line for line in path.read_text().split("\n") if not line.startswith("successorexpstats")]
    path.write_text("\n".join(lines).replace("compressionflags=", "compressionflags=OFFSETS_DELTA"))
    blocks = list(READER.open(made.source, _request()).edges(size))
    assert len(blocks) == 1 or all(len(block.sources) <= size + 300 for block in blocks)
    edges = np.concatenate([np.stack(block[:2]) for block in blocks], axis=1)
    np.testing.assert_array_equal(in_order(edges), in_order(made.graph.edge_index))


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ("00110", "5 successors among 2 nodes"),  # 5 in gamma
        ("01011010010100001010", "blocks past the end of the list they copy"),
        ("", "it stops early"),
    ],
)
def test_lists_that_cannot_be_are_refused(tmp_path: Path, bits: str, message: str) -> None:
    """The second: node 0 has the successor 0; node 1 has 1, of a block of 10 of node 0's list."""
    (path := tmp_path / "g.graph").write_bytes(
        bytes(int(bits[k : k + 8].ljust(8, "0"), 2) for k in range(0, len(bits), 8))
    )
    layout = Layout(
        window=1,
        least_interval=0,
        **dict.fromkeys(("outdegree", "block_count", "block", "residual"), Code(Family.GAMMA)),
        reference=Code(Family.UNARY),
    )
    with pytest.raises(SourceError, match=message):
        list(Successors(path, nodes=2, layout=layout, budget_bytes=1 << 20))


def _made(name: str, tmp_path: Path) -> Made:
    rng = np.random.default_rng(2)
    (folder := tmp_path / "source").mkdir()
    return FIXTURES[name](random_graph(rng, nodes=300, edges=2000), folder, rng)


@pytest.mark.parametrize("what", ["folder", "graph.graph", "graph.properties", "graph"])
def test_a_graph_is_named_by_either_file_their_folder_or_their_base(tmp_path: Path, what: str) -> None:
    made = _made("webgraph", tmp_path)
    folder = made.source.parent
    source = READER.open(folder if what == "folder" else folder / what, _request())
    assert (source.name, source.num_nodes, source.prepare) == ("graph", 300, None)


def _request(budget_bytes: int = 1 << 30) -> Request:
    return Request(split=None, budget_bytes=budget_bytes, options=_MADE_UP)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("BVGraph", "EFGraph", "only it.unimi.dsi.webgraph.BVGraph can be read"),
        ("nodes=300", "nodes=99999999", "too short for 99999999 nodes"),
        ("nodes=300", "nodes=-3", "nodes='-3'"),
        ("nodes=300", "knots=300", "lacks nodes"),
        ("nodes=300", "nodes=299", "different numbers of nodes"),
        ("arcs=", "arcs=1", "arcs"),
        ("zetak=3", "zetak=4", "damaged"),
        ("zetak=3", "zetak=99", "zetak=99, which cannot be"),
        ("windowsize=7", "windowsize=1", "damaged"),
        ("compressionflags=", "compressionflags=RESIDUALS_NIBBLE", "the code RESIDUALS_NIBBLE, which cannot be read"),
        ("compressionflags=", "compressionflags=OUTDEGREES_DELTA", "damaged"),
        ("version=0", "version=1", "version 0"),
    ],
)
def test_wrong_properties_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    made = _made("webgraph", tmp_path)
    path = made.source.with_suffix(".properties")
    lines = path.read_text().split("\n")
    at = next(number for number, line in enumerate(lines) if old in line and line[0] != "#")
    lines[at] = lines[at].replace(old, new)
    path.write_text("\n".join(lines))
    with pytest.raises(SourceError, match=message):
        ooc.convert(made.source, tmp_path / "g.ooc", **made.options)


def test_what_is_missing_or_too_large_is_refused(tmp_path: Path) -> None:
    made = _made("webgraph", tmp_path)
    with pytest.raises(SourceError, match=r"no features of its own; give features=FILE .* or random:COLUMNS"):
        ooc.convert(made.source, tmp_path / "g.ooc")
    with pytest.raises(SourceError, match="no labels of its own"):
        ooc.convert(made.source, tmp_path / "g.ooc", features="random:3")
    stream = made.source.read_bytes()
    properties = made.source.with_suffix(".properties")
    text = properties.read_text()
    properties.write_text(text + "#" * (1 << 20))
    with pytest.raises(SourceError, match="is no properties file: it is too large"):
        ooc.convert(made.source, tmp_path / "g.ooc", **_MADE_UP)
    properties.write_text(text)
    made.source.write_bytes(stream + bytes(40))
    with pytest.raises(SourceError, match="goes on after its last node"):
        ooc.convert(made.source, tmp_path / "g.ooc", **_MADE_UP)
    for suffix in (".graph", ".properties"):
        made.source.with_name(f"other{suffix}").write_bytes(made.source.with_suffix(suffix).read_bytes())
    with pytest.raises(SourceError, match="holds 2 WebGraph graphs"):
        ooc.convert(made.source.parent, tmp_path / "g.ooc", **_MADE_UP)
    made.source.unlink()
    with pytest.raises(SourceError, match=r"needs .*graph.graph, which is not there"):
        ooc.convert(made.source.with_suffix(".properties"), tmp_path / "g.ooc", **_MADE_UP)


def test_a_list_too_long_for_the_budget_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _made("webgraph", tmp_path)
    original = Successors.__init__

    def held(self: Successors, *args: object, **named: object) -> None:
        original(self, *args, **named)  # type: ignore[arg-type]
        self._most_held = 3

    monkeypatch.setattr(Successors, "__init__", held)
    with pytest.raises(BudgetError, match="too long for the host budget"):
        list(READER.open(made.source, _request()).edges(10))
