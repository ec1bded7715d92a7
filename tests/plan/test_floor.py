# SPDX-License-Identifier: Apache-2.0
"""The least memory on a device: parameters, the narrowest slab of what is gathered, and what goes by the size of a
tile, whatever the widths, the layers and the largest degree (docs/planning.md, "The floor")."""

from collections.abc import Callable
from functools import cache, reduce
from math import ceil
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from ooc.cli.arguments.settings import TrainSettings
from ooc.cli.plan import load_hardware
from ooc.cli.planning import Planning
from ooc.model.layers.attention import slices_of_head
from ooc.plan import UNMEASURED, Hardware
from ooc.plan.graphs import GraphStatistics
from ooc.train.optimizer_state import PIECE
from ooc.train.resources import BLOCKS_BYTES, WORKING_BYTES
from ooc.train.setup import Saving
from tests.examples import cases, examples

A5000 = load_hardware("a5000")
CLASSES = 16
MOST_NUMBERS = 1 << 30
"""Of a matrix of a graph of usual size."""
LARGE = 38, 41
"""Powers of two: numbers of a matrix of a large one, 1.1 to 8.8 TB."""
FRAME_BYTES, FRAMES, FRAMES_OF_ATTENTION = 6 << 20, 9, 21
"""Of two steps that pull: a frame at most; how many, of which one is what a slab leaves of its last. With attention as
many as the largest of some hundred drawn had, and two more."""
WIDEST_OF_LARGE = 1024
"""Columns: of more, one for every 100,000 nodes, a step's rows lie in so many slabs that their blocks take more than
what is gathered from."""
WIDEST_OF_ATTENTION = 8192
"""Columns of a hidden layer: of twice as many in three layers blocks take 203 MB, beside 7 GB of parameters."""
LEAST_SHARES_AFTER_THEIR_PRODUCT = {"gcn": 0.8, "gin": 0.8, "sage": 0.9}
"""Of the floor, where features begin to be gathered after their product."""
OF_STATE = 11 * 4 * PIECE
"""Bytes of pieces of what Adam keeps on the SSD: three of its two moments, and what stepping one makes."""


def drawn_graph(nodes: int, degree: int, features: int, *, hub: bool) -> GraphStatistics:
    edges = nodes * degree
    return GraphStatistics("drawn", nodes, edges, features, CLASSES, nodes, "", hub=edges // 2 if hub else None)


def floor(graph: GraphStatistics, model: str, hidden: int, layers: int, machine: Hardware = A5000) -> list[int]:
    """Its parts: parameters, temporaries, slabs, blocks; and three of the host, on the CPU two."""
    training = TrainSettings(store="", model=model, hidden=hidden, layers=layers, threads=2)
    return list(Planning(training, graph, machine, tuple(Saving)).floor().values())


@cache
def floor_of_cpu(nodes: int, degree: int, features: int, hidden: int, layers: int, model: str, hub: bool) -> int:
    """All of it."""
    return sum(floor(drawn_graph(nodes, degree, features, hub=hub), model, hidden, layers, UNMEASURED))


NODES = st.integers(15, 22).map(lambda power: 1 << power)
NUMBERS = st.just(0) | st.integers(*LARGE).map(lambda power: 1 << power)
WIDTHS = st.integers(4, 14).map(lambda power: 1 << power)
MODELS = st.sampled_from(["gat", "gcn", "gin", "sage"])


@settings(max_examples=examples(3), deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(NODES, NUMBERS, st.integers(2, 16) | st.just(128), WIDTHS, WIDTHS, st.integers(2, 3), MODELS, st.booleans())
@example(1 << 16, 0, 15, 512, 1 << 12, 2, "gin", True)
@example(0, 1 << 39, 15, 1024, 256, 3, "gat", False)
@example(0, 1 << 38, 15, 1024, 256, 3, "gcn", True)
@example(0, 1 << 41, 128, 32, 16, 2, "gat", True)
@example(0, 1 << 39, 5, 64, 512, 2, "gat", False)
@example(0, 1 << 41, 3, 128, 16, 3, "gat", True)
@example(1 << 22, 0, 128, 512, 256, 2, "sage", True)
@example(1 << 18, 0, 9, 128, 1 << 12, 3, "gin", False)
def test_the_floor_is_no_more_than_is_stated(
    nodes: int, numbers: int, degree: int, features: int, hidden: int, layers: int, model: str, hub: bool
) -> None:
    """Part by part, whatever the widths; also of graphs of so many tiles that a step of a row pass is several, whose
    matrices have so many ``numbers``."""
    hidden = min(hidden, WIDEST_OF_ATTENTION) if model == "gat" else hidden
    if numbers:
        features, hidden = min(features, WIDEST_OF_LARGE), min(hidden, WIDEST_OF_LARGE)
        nodes = min(numbers // max(features, hidden), 1 << 30)
    else:
        nodes = min(nodes, MOST_NUMBERS // max(features, hidden))
    graph = drawn_graph(nodes, degree, features, hub=hub)
    _, temporaries, slab, blocks, host, _, on_their_way = floor(graph, model, hidden, layers)
    assert temporaries <= WORKING_BYTES
    slice_columns = ceil(hidden / slices_of_head(hidden, nodes=nodes, itemsize=4)) + 3
    narrowest = 4 * nodes * (slice_columns if model == "gat" else 8)
    frames = FRAMES_OF_ATTENTION if model == "gat" else FRAMES
    gathering, row_pass = narrowest + frames * FRAME_BYTES, BLOCKS_BYTES * 5 // 2
    assert slab + blocks <= max(gathering, row_pass)
    parts = nodes * degree // 16  # of rows of more than 512 edges
    assert host <= (16 if nodes * degree < 1 << 31 else 36) * nodes + parts + OF_STATE + 2_000_000
    assert on_their_way <= 2 * FRAME_BYTES


@settings(max_examples=examples(2), deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(NODES, st.integers(2, 16), WIDTHS, WIDTHS, st.integers(2, 3), MODELS, st.booleans(), st.integers(0, 3))
@example(1 << 17, 10, 8192, 64, 2, "gcn", False, 2)
def test_the_floor_grows_with_the_graph_and_the_widths(
    nodes: int, degree: int, features: int, hidden: int, layers: int, model: str, hub: bool, doubled: int
) -> None:
    """Of twice as many nodes or edges, or of matrices twice as wide, it is no less, but for what blocks leave of
    frames, and tiles of a sixteenth fewer rows."""
    nodes = min(nodes, MOST_NUMBERS // max(features, hidden))
    larger = [(2 * nodes, degree, features, hidden), (nodes, 2 * degree, features, hidden)]
    larger += [(nodes, degree, 2 * features, hidden), (nodes, degree, features, 2 * hidden)]
    *shape, width = larger[doubled]
    least = sum(floor(drawn_graph(nodes, degree, features, hub=hub), model, hidden, layers)[:4])
    assert 0.9 * least <= sum(floor(drawn_graph(*shape, hub=hub), model, width, layers)[:4])


NOT_LESS = [
    (1 << 17, 10, 1727, 64, 2, "gcn", False, "a few columns"),
    (1 << 16, 3, 276, 74, 3, "gin", False, "a few columns"),
    (1 << 17, 3, 480, 16, 2, "gcn", False, "a few columns"),
    (1 << 17, 10, 1024, 512, 2, "sage", False, "a few columns"),
    (1 << 17, 40, 6826, 64, 2, "gcn", False, "a few columns"),
    (1 << 14, 16, 341, 16, 2, "sage", False, "a few columns"),
    (1 << 14, 16, 341, 16, 2, "sage", False, "hidden"),
]
"""Where more once took less."""


def examples_of(given: list[tuple[Any, ...]]) -> Callable[[Any], Any]:
    """A decorator that adds each."""
    return lambda test: reduce(lambda tried, one: example(*one)(tried), given, test)


@settings(max_examples=examples(1), deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    nodes=st.integers(14, 20).map(lambda power: 1 << power),
    degree=st.integers(2, 12),
    features=st.integers(16, 8192),
    hidden=st.integers(16, 2048),
    layers=st.integers(2, 3),
    model=st.sampled_from(["gcn", "gin", "sage"]),
    hub=st.booleans(),
    more=st.sampled_from(["nodes", "edges", "a few columns", "features", "hidden"]),
)
@examples_of(cases(NOT_LESS[-2:], NOT_LESS))
def test_more_of_anything_takes_no_less_on_the_cpu(
    nodes: int, degree: int, features: int, hidden: int, layers: int, model: str, hub: bool, more: str
) -> None:
    """Twice as many nodes or edges, or matrices twice as wide or a little wider: the floor is no less, but for what
    blocks leave of frames, and where x begins to be gathered after its product."""
    nodes = min(nodes, MOST_NUMBERS // max(features, hidden))
    larger = {
        "nodes": (2 * nodes, degree, features, hidden),
        "edges": (nodes, 2 * degree, features, hidden),
        "a few columns": (nodes, degree, features + features // 16, hidden),
        "features": (nodes, degree, 2 * features, hidden),
        "hidden": (nodes, degree, features, 2 * hidden),
    }[more]
    share = LEAST_SHARES_AFTER_THEIR_PRODUCT[model] if larger[2] > features else 0.95
    rest = layers, model, hub
    assert floor_of_cpu(*larger, *rest) >= share * floor_of_cpu(nodes, degree, features, hidden, *rest)


@pytest.mark.parametrize(("model", "least"), [("gcn", 24_000), ("sage", 18_000), ("gat", 19_000)])
def test_little_of_a_row_is_at_hand_at_a_time(model: str, least: int) -> None:
    """So that tiles which are worth their launches do with what is stated."""
    graph = drawn_graph(1_000_000, 10, 128, hub=False)
    planning = Planning(TrainSettings(store="", model=model, hidden=64, layers=2), graph, A5000, tuple(Saving))
    _, temporaries, *_ = planning.floor().values()
    assert temporaries <= WORKING_BYTES
    assert planning.report().plan.tile_rows >= least
