# SPDX-License-Identifier: Apache-2.0
"""A graph with types of nodes and edges: PyG's HeteroData, a model made by ``to_hetero``, trained within 64 MB.

python examples/typed_graph.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero

import ooc

PAPERS, AUTHORS, FIELDS, WRITTEN, CITED = 3000, 2000, 5, 9000, 12_000


def papers() -> HeteroData:
    """Papers of some fields, which mostly cite papers of their own field and are by authors who stay in one."""
    generator = torch.Generator().manual_seed(0)
    field, of_author = (torch.randint(0, FIELDS, (count,), generator=generator) for count in (PAPERS, AUTHORS))

    def pairs(count: int, ends: Tensor) -> Tensor:
        edges = torch.stack([torch.randint(0, len(of), (6 * count,), generator=generator) for of in (ends, field)])
        alike = ends[edges[0]] == field[edges[1]]
        return edges[:, alike | (torch.rand(6 * count, generator=generator) < 0.05)][:, :count]

    data = HeteroData()
    data["paper"].x = one_hot(field, FIELDS) + 2.0 * torch.randn(PAPERS, FIELDS, generator=generator)
    data["paper"].y = field
    data["author"].x = torch.randn(AUTHORS, 3, generator=generator)
    data["author", "writes", "paper"].edge_index = writes = pairs(WRITTEN, of_author)
    data["paper", "written_by", "author"].edge_index = writes.flip(0)
    data["paper", "cites", "paper"].edge_index = pairs(CITED, field)
    return data


class Sage(torch.nn.Module):
    """A homogeneous model; ``to_hetero`` gives each type of edges a convolution of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 32), SAGEConv((-1, -1), FIELDS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """[N, F] → [N, fields]."""
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def main(folder: Path) -> None:
    """Train in ``folder``, and print how far the trained model's logits in PyG are from those that are predicted."""
    torch.manual_seed(0)
    data = papers()
    model = to_hetero(Sage(), data.metadata())
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)  # now its layers know their widths
    store = ooc.convert(data, folder / "papers.ooc", split="random:0")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ooc.Trainer(model, store, memory="64M", optimizer=optimizer, spill_dir=folder) as trainer:
        records = trainer.fit(epochs=20)
        predicted = trainer.predict()
    with torch.no_grad():
        logits = model.eval()(data.x_dict, data.edge_index_dict)["paper"]
    print(f"accuracy on test papers: {records[-1].test_acc:.3f}")
    print(f"logits differ from PyG's by {float((predicted - logits).abs().max()):.0e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
