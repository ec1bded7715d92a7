# SPDX-License-Identifier: Apache-2.0
"""A run's weights on their own: read from its folder, written as files that plain PyG loads."""

import io
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ooc.errors import OptionError, RunError
from ooc.storage.array import replace_file
from ooc.storage.store import Store
from ooc.train.embedding import Embedding, LearntRows
from ooc.train.runs.run import RunFolder

State = dict[str, Tensor]


def load_weights(run: RunFolder, which: str) -> State:
    """The ``state_dict`` of the run's model. RunError where the run has none yet.

    ``which``: ``"best"`` of the best validation score, or the last ones where nothing was evaluated; ``"last"`` after
    the last epoch, where weights are averaged their average.
    """
    state, is_best = _kept(run, which)
    if not is_best:
        average = state.get("average")
        if average is not None and int(average["n_averaged"]):
            return {name.removeprefix("module."): t for name, t in average.items() if name.startswith("module.")}
    found = state.get("model")
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"the checkpoint of {run.path} holds no weights")
    return found


def learnt_rows(run: RunFolder, which: str, embedding: Embedding, store: Store) -> LearntRows:
    """The embedding that goes with these weights; RunError where it is not there."""
    state, _ = _kept(run, which)
    dtype = next((weight.dtype for weight in load_weights(run, which).values()), torch.get_default_dtype())
    return LearntRows.of_run(embedding, store, dtype, run.path, state.get("embedding"))


def _kept(run: RunFolder, which: str) -> tuple[dict[str, Any], bool]:
    """What the run has of its best epoch, or of its last one; and whether it is the best."""
    best = run.load_best() if which == "best" else None
    state = run.last() if best is None else best
    if state is None:
        raise RunError(f"the run at {run.path} has no weights yet: no epoch was finished")
    return state, best is not None


def export_weights(state: State, path: Path, *, metadata: dict[str, str], force: bool) -> None:
    """Write ``state`` to ``path``, as safetensors or for ``torch.load`` by its ending: whole, or not at all.

    OptionError for another ending, or where the file is there already and ``force`` is not given.
    """
    match path.suffix:
        case ".safetensors":
            copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
            data = safetensors.torch.save(copies, metadata)  # which takes no tensors that share memory
        case ".pt":
            buffer = io.BytesIO()
            torch.save(state, buffer)
            data = buffer.getvalue()
        case _:
            raise OptionError(f"{path} must end in .safetensors or .pt")
    if path.exists() and not force:
        raise OptionError(f"{path} exists; give another name, or force=True to replace it")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"the folder of {path} does not exist")
    replace_file(path, data)
