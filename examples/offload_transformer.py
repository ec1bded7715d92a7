# SPDX-License-Identifier: Apache-2.0
"""A transformer trained in a third of the memory that its steps take: the same weights, bit for bit.

    python examples/offload_transformer.py [FOLDER]

Two lines take what autograd saves in hand; model, loss and optimizer stay as they are. Scratch data goes to FOLDER.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ooc
from ooc.sizes import format_size

TOKENS, LENGTH, WIDTH, LAYERS, BATCH = 64, 64, 32, 4, 8


class LanguageModel(nn.Module):
    """Says which token comes next, and how wrong that is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=hidden.device, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())


def train(model: nn.Module, steps: int = 3) -> float:
    """A few steps on the same text; the last loss."""
    torch.manual_seed(1)
    text = torch.randint(TOKENS, (BATCH, LENGTH + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(folder: Path) -> None:
    """Train a model as ever, and its copy within a budget."""
    torch.manual_seed(0)
    model = LanguageModel()
    frugal = copy.deepcopy(model)
    print(f"loss {train(model):.4f}")
    with ooc.offload(model, memory="1G", spill_dir=folder) as run:  # to see what a step takes
        model(*torch.randint(TOKENS, (2, BATCH, LENGTH))).backward()
    all_of_it = run.plan.nbytes
    with ooc.offload(frugal, memory=all_of_it // 3, spill_dir=folder) as run:
        print(f"loss {train(frugal):.4f} in {format_size(run.plan.nbytes)} instead of {format_size(all_of_it)}")
    for name, fate in zip(run.plan.names, run.plan.fates, strict=True):
        if name.startswith("blocks"):
            print(f"  {name}: {fate.value}")
    same = all(map(torch.equal, model.state_dict().values(), frugal.state_dict().values()))
    print(f"weights are the same bits: {same}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            main(Path(scratch))
