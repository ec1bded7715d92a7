# SPDX-License-Identifier: Apache-2.0
"""A command reads neither PyG's datasets, torch's compiler, sympy nor triton, and all are there for who asks."""

import subprocess
import sys
from pathlib import Path

TRAINED = """
import sys
from ooc.cli import main
assert main(["train", sys.argv[1], "--epochs", "2", "--model", "gat", "--quiet", "--out", "run"]) == 0
late = {"torch_geometric.datasets.planetoid", "torch._dynamo.eval_frame", "pandas", "sympy", "triton"}
read = late & set(sys.modules)
assert not read, read

import torch, torch_geometric
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as threads:
    found = threads.map(lambda at: torch_geometric.datasets.Planetoid, range(4))
assert {one.__module__ for one in found} == {"torch_geometric.datasets.planetoid"}
assert not hasattr(torch_geometric.datasets, "NoSuch")
assert torch._dynamo.disable(main) is main
assert not torch._dynamo.is_compiling() and "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo.disable(main) is not main, "torch's own"
from torch.fx.experimental import symbolic_shapes
assert symbolic_shapes.sym_eq((2, 3), (2, 3)) and not symbolic_shapes.sym_eq((2, 3), (2,))
size = symbolic_shapes.ShapeEnv().create_unbacked_symint()
assert isinstance(symbolic_shapes.sym_eq((size,), (3,)), torch.SymBool) and "sympy" in sys.modules
row = torch.ones(3)
assert torch.equal(torch.compile(torch.sin, backend="eager")(row), row.sin())
"""


def test_training_reads_little_and_all_is_there_for_who_asks(graph: Path, here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, str(graph)], cwd=here, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
