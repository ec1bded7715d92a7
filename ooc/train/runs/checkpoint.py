# SPDX-License-Identifier: Apache-2.0
"""The states that a run keeps, as torch saves them: plain data, of which nothing is run, with checksums; on the CPU,
whatever device they come from.
"""

import copy
import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from ooc.errors import RunError, as_error

State = dict[str, Any]


def write_state(file: BinaryIO, state: State) -> None:
    """``state``: tensors, numbers, strings, and lists and dicts of them."""
    import torch

    noting: Any = _Noting(file)  # torch asks for no more of a file
    summing = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # `read_state` wants them, whatever the program around us does
    try:
        torch.save(_on_cpu(state), noting)
    finally:
        torch.serialization.set_crc32_options(summing)
    if noting.error is not None:
        raise noting.error


def read_state(path: Path) -> State | None:
    """A checkpoint's content, None where there is no such file.

    Only plain data is read: a pickled program in its place is refused. torch itself looks at no checksum: a
    flipped bit would be another weight.
    """
    if not path.exists():
        return None
    import torch

    with as_error(RunError, path):
        data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            wrong = members.testzip()
        if wrong is not None:
            raise zipfile.BadZipFile(wrong)
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make zipfile and pickle raise almost anything
        raise RunError(f"{path} is damaged and cannot be read") from error
    if not isinstance(state, dict) or "epoch" not in state:
        raise RunError(f"{path} is no checkpoint")
    return state


class _Noting:
    """What torch writes to ``file``; it would report a full disk as an internal error without a cause."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Who has opened the file does that."""


def _on_cpu(state: Any) -> Any:
    """``state`` with its tensors on the CPU: whoever reads it may have no other device."""
    import torch

    match state:
        case torch.Tensor():
            return state.cpu()
        case dict():
            moved = copy.copy(state)  # with what else a state_dict carries
            for name, value in state.items():  # not by update, which counts what a Counter is given
                moved[name] = _on_cpu(value)
            return moved
        case list() | tuple():
            return type(state)(_on_cpu(value) for value in state)
        case _:
            return state
