# SPDX-License-Identifier: Apache-2.0
"""Arrays of numbers in the npy format (numpy.lib.format), from a stream: header first, then values in order."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ooc.conversion.source import ranges
from ooc.conversion.streams import Stream, damaged, read_exactly, read_values
from ooc.errors import SourceError
from ooc.storage.array import AnyArray

_MAGIC_BYTES = 8
_MOST_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class NpyHeader:
    """What an npy file says of its array; ``bytes``: length of the header itself."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    column_major: bool
    bytes: int

    @property
    def count(self) -> int:
        return prod(self.shape)


def read_header(stream: Stream, *, size: int, name: str) -> NpyHeader:
    """Read the header of an npy file of ``size`` bytes; ``stream`` is left at the first value.

    SourceError for anything but a plain array of numbers that fills the file exactly.
    """
    begin = read_exactly(stream, _MAGIC_BYTES, name)
    version = (begin[6], begin[7])
    if begin[:6] != b"\x93NUMPY" or version not in ((1, 0), (2, 0)):
        raise damaged(name, "it is no npy file of version 1 or 2")
    length = read_exactly(stream, 2 if version == (1, 0) else 4, name)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > _MOST_HEADER_BYTES:
        raise damaged(name, f"its header claims {header_bytes} bytes")
    text = io.BytesIO(length + read_exactly(stream, header_bytes, name))
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, column_major, dtype = parse(text)
    except Exception as error:  # Its text is evaluated as a literal, which raises nearly anything.
        raise damaged(name, f"its header is not numpy's ({type(error).__name__})") from error
    header = NpyHeader(
        shape=tuple(shape),
        dtype=dtype,
        column_major=bool(column_major),
        bytes=_MAGIC_BYTES + len(length) + header_bytes,
    )
    if dtype.hasobject:
        raise SourceError(f"{name} holds an array of Python objects, which are never loaded")
    if dtype.kind not in "biuf" or dtype.names is not None:
        raise SourceError(f"{name} holds {dtype} values, not plain numbers")
    if any(extent < 0 for extent in header.shape) or header.bytes + header.count * dtype.itemsize != size:
        raise damaged(name, f"{size} bytes are no array {list(header.shape)} of {dtype}")
    return header


def value_blocks(stream: Stream, header: NpyHeader, block: int, name: str) -> Iterator[AnyArray]:
    """All values in file order, at most ``block`` at a time; the end is checked after the last."""
    for start, stop in ranges(header.count, block):
        yield read_values(stream, stop - start, header.dtype, name)
    if stream.read(1):
        raise damaged(name, "it is longer than it says")


def row_blocks(stream: Stream, header: NpyHeader, rows: int, name: str) -> Iterator[AnyArray]:
    """The rows of a matrix [n, columns], at most ``rows`` at a time."""
    columns = header.shape[1]
    if header.column_major and min(header.shape) > 1:
        raise SourceError(f"{name} lies column by column in its file; write it again with numpy.ascontiguousarray")
    for values in value_blocks(stream, header, max(1, rows) * columns, name):
        yield values.reshape(-1, columns)
