# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for GPUs that are not there, and what comes out is what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.examples import ORDINARY

pytest.importorskip("triton", reason="kernels for the GPU need triton: pip install -r requirements.gpu.txt")

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SUMS = {"sum_segments", "sum_slots"}
KERNELS = {
    *SUMS,
    *("draw_masks", "draw_edge_masks"),
    *("maxima_segments", "maxima_slots", "shares_segments"),
    *("attend_segments", "attend_slots", "sources_segments", "sources_slots", "pack_upstream"),
    *("message_segments", "message_slots", "message_sources", "message_targets"),
    *("rectified_segments", "rectified_map"),
}


@pytest.mark.parametrize(("arguments", "kernels"), [(("90",), KERNELS), (("80", "sums"), SUMS)])
def test_kernels_compile(arguments: tuple[str, ...], kernels: set[str], tmp_path: Path) -> None:
    """Without atomics and without spilling registers, but for a few where dropout is drawn or features of edges are
    mapped, with attention and edge functions in float32 and bfloat16; rows of sums are loaded 16 bytes at a time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *filter(None, sys.path)]),
    }
    if arguments == ("90",) and settings.default.max_examples > ORDINARY:
        arguments = ("90", "all")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compilation.py")), *arguments],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {one["kernel"] for one in found} == kernels
    for one in found:
        assert not one["has_atomics"], one
        has_dropout, has_features = "dropout" in one["label"], "features" in one["label"]
        assert one["spilled_bytes"] <= (64 if has_dropout or has_features else 0), one
        most = 224 if has_dropout and has_features else 168
        assert one["registers"] <= most, one  # 9 or 12 warps of a multiprocessor at least
        if one["kernel"] == "sum_segments":
            assert one["widest_load_bytes"] == 16, one
