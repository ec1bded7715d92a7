# SPDX-License-Identifier: Apache-2.0
"""Checksums of pieces come to those of the whole, and what is read is compared with them."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.errors import StoreError
from ooc.storage.array import open_array
from ooc.storage.checksums import combined, of_zeros, quick_sum
from ooc.storage.writer import ArrayWriter
from tests.damage import seal


@given(first=st.binary(max_size=300), second=st.binary(max_size=300), zeros=st.integers(0, 200_000))
def test_two_checksums_come_to_that_of_both(first: bytes, second: bytes, zeros: int) -> None:
    value = google_crc32c.value
    assert combined(value(first), value(second), len(second)) == value(first + second)
    assert of_zeros(zeros) == value(bytes(zeros))
    assert combined(value(first), of_zeros(zeros), zeros) == value(first + bytes(zeros))
    padded = first + bytes(-len(first) % 8)
    assert quick_sum(np.frombuffer(first, np.uint8)) == sum(np.frombuffer(padded, "<u8").tolist()) % 2**64


@pytest.mark.parametrize("rows", [700, 4096, 100_000])
def test_reading_from_first_to_last_finds_a_changed_bit(tmp_path: Path, rows: int) -> None:
    """By one call or many, overlapping ones, too; not where a part is all that is read."""
    with ArrayWriter(tmp_path, "a", (10_000, 3), "float32", chunk_bytes=32 << 10) as writer:
        writer.append(np.arange(30_000, dtype=np.float32).reshape(-1, 3))
    array = open_array(tmp_path, "a")
    assert array.num_chunks > 2

    def read() -> None:
        for start in range(0, 10_000, rows):
            array.read(max(0, start - 5), min(start + rows, 10_000))

    read()
    path = array.chunk_path(array.num_chunks - 1)
    content = bytearray(path.read_bytes())
    content[1000] ^= 4
    path.write_bytes(content)
    array.read(0, array.chunks[0])
    with pytest.raises(StoreError, match=rf"^a: the SSD returns other bytes of {path} than"):
        read()
    seal(array)
    read()
