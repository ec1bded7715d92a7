# SPDX-License-Identifier: Apache-2.0
"""Tiny matrices: a second thread costs more than it brings. Graphs that many cases share are converted once."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch_geometric.data import Data

from ooc.storage.store import Store
from tests.exactness.comparison import store_of
from tests.graphs import GraphCase, random_data

Converted = Callable[[GraphCase], tuple[Data, Store]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """torch computes with one thread here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A graph in float64 and its store, the same ones whenever a module's tests ask for it."""
    known: dict[GraphCase, tuple[Data, Store]] = {}

    def get(graph: GraphCase) -> tuple[Data, Store]:
        if graph not in known:
            data = random_data(graph)
            known[graph] = data, store_of(data, tmp_path_factory.mktemp("shared"))
        return known[graph]

    return get
