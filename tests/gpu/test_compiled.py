# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for GPUs that are not there, and what comes out is what was meant, and what the docs say."""

import re
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.examples import ORDINARY

triton = pytest.importorskip("triton", reason="kernels for the GPU need triton: pip install -r requirements.gpu.txt")

KERNELS = {
    *("sum_segments", "sum_slots"),
    *("draw_masks", "draw_edge_masks"),
    *("maxima_segments", "maxima_slots"),
    *("message_segments", "message_slots", "message_sources", "message_targets", "pack_upstream"),
    *("rectified_segments", "rectified_map"),
}
TOOL: Any = SourceFileLoader(
    "kernel_table", str(Path(__file__).resolve().parent.parent.parent / "tools" / "kernel_table")
).load_module()
"""What the page's table is made by."""


def rows_of_page() -> Iterator[tuple[str, list[int]]]:
    """By kernel, the most of every number: registers, bytes spilled and shared, each for 8.0 and 9.0."""
    made = TOOL.PAGE.read_text(encoding="utf-8").partition(TOOL.BEGIN)[2].partition(TOOL.END)[0]
    for line in made.splitlines():
        if line.startswith("| `"):
            name, _, _, *numbers = (cell.strip(" `") for cell in line.strip("|").split("|"))
            yield name, [int(number.rpartition("–")[2]) for number in numbers]


@pytest.mark.timeout(600)
def test_kernels_compile_and_none_begins_to_spill() -> None:
    """Without atomics and without spilling registers, but for a few where dropout is drawn or features of edges are
    mapped, with attention and edge functions in float32 and bfloat16; rows of sums are loaded 16 bytes at a time. With
    the page's version of Triton, nothing takes more than its table has. In an ordinary run for compute capability 8.0
    alone, and not where programs and Triton are those of the table, which have been compiled before."""
    thorough = settings.default.max_examples > ORDINARY
    if not thorough and f"triton {triton.__version__}; programs {TOOL.fingerprint()};" in TOOL.PAGE.read_text("utf-8"):
        pytest.skip("no program has changed since the table was made")
    found = TOOL.compiled("all" if thorough else "", TOOL.CAPABILITIES if thorough else TOOL.CAPABILITIES[:1])
    page = dict(rows_of_page())
    assert set(page) == KERNELS
    is_the_pages = f"triton {triton.__version__};" in TOOL.PAGE.read_text(encoding="utf-8")
    for at, programs in enumerate(found):
        assert {one["kernel"] for one in programs} == KERNELS
        for one in programs:
            assert not one["has_atomics"], one
            if one["kernel"] == "sum_segments" and re.match(r"sum (?!1 |1000 )", one["label"]):
                assert one["widest_load_bytes"] == 16, one
            if is_the_pages:
                taken = one["registers"], one["spilled_bytes"], one["shared_bytes"]
                assert all(number <= most for number, most in zip(taken, page[one["kernel"]][at::2], strict=True)), one
            if not re.search("dropout|features", one["label"]):
                assert one["spilled_bytes"] == 0, one
