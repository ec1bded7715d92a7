# SPDX-License-Identifier: Apache-2.0
"""A run's weights on their own: read from its folder, written as files that plain PyG loads."""

import io
import json
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ooc.errors import OptionError, RunError
from ooc.storage.array import replace_file
from ooc.train.run import RunFolder

State = dict[str, Tensor]

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Checkpoint(Enum):
    """Which of a run's weights."""

    BEST = "best"
    """Those of the best validation score; the last ones where nothing was evaluated."""
    LAST = "last"
    """Those after the last epoch; where weights are averaged, their average."""


def load_weights(run: RunFolder, which: Checkpoint) -> State:
    """The ``state_dict`` of the run's model. RunError where the run has none yet."""
    best = run.load_best() if which is Checkpoint.BEST else None
    if best is not None:
        return _tensors(best, "model", run.path)
    last = run.last()
    if last is None:
        raise RunError(f"the run at {run.path} has no weights yet: no epoch was finished")
    average = last.get("average")
    if average is not None and int(average["n_averaged"]):
        return {name.removeprefix("module."): t for name, t in average.items() if name.startswith("module.")}
    return _tensors(last, "model", run.path)


def _tensors(state: dict[str, Any], name: str, path: Path) -> State:
    found = state.get(name)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise RunError(f"the checkpoint of {path} holds no weights")
    return found


def export_weights(state: State, path: Path, *, metadata: dict[str, str], force: bool = False) -> None:
    """Write ``state`` to ``path``, as safetensors or for ``torch.load`` by its ending: whole, or not at all.

    OptionError for another ending, or where the file is there already and ``force`` is not given.
    """
    match path.suffix:
        case ".safetensors":
            data = _safetensors(state, metadata)
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


def _safetensors(state: State, metadata: dict[str, str]) -> bytes:
    """The safetensors format, version of 2023: u64 length of a JSON header, the header, the tensors' bytes.

    See the format's description in the repository huggingface/safetensors; the library is not needed for it.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    parts: list[bytes] = []
    end = 0
    for name, tensor in state.items():
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise OptionError(f"safetensors cannot hold {name} of {tensor.dtype}; give a name in .pt")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [end, end + len(data)]
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        parts.append(data)
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return len(text).to_bytes(8, "little") + text + b"".join(parts)
