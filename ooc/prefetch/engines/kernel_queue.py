# SPDX-License-Identifier: Apache-2.0
"""The kernel's own queue of requests (``io_submit(2)``): many under way at once, handed over in one call.

With O_DIRECT these requests are truly asynchronous, so one thread keeps a disk busy that would otherwise take a
dozen, and the interpreter runs once a batch instead of a few times a request. The four system calls need no
library; their numbers and the two structures (linux/aio_abi.h) are fixed for ever.
"""

import ctypes
import errno
import os
import platform
import struct
from array import array
from collections.abc import Iterable, Sequence

_READ, _WRITE = 0, 1
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
_WORD_BYTES = 8
_BLOCK_WORDS = 8  # of a control block: tag, key and flags, operation and file, address, bytes, offset, two unused
_AIM_WORD = 2  # of these, the one of operation and file: u16 operation, i16 priority, u32 descriptor
_COLUMN_WORDS = (0, 3, 4, 5)  # those of tag, address, bytes and offset
_EVENT = struct.Struct("<Q8xq8x")  # tag, (control block), result, (second result)

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 6


class Requests:
    """Requests of one file and direction, laid out as the kernel reads them: described once, sent in any portions.

    The kernel copies what it is sent, so that these may be forgotten while their requests are under way.
    """

    __slots__ = ("_blocks", "_pointers", "writing")

    def __init__(
        self,
        *,
        tags: Iterable[int],
        addresses: Iterable[int],
        nbytes: Sequence[int],
        offsets: Iterable[int],
        writing: bool,
    ) -> None:
        """Columns of one entry a request; a tag (below 2⁶⁴) comes back with its request's result."""
        self.writing = writing
        blocks = array("Q", bytes(_WORD_BYTES * _BLOCK_WORDS * len(nbytes)))
        for word, column in zip(_COLUMN_WORDS, (tags, addresses, nbytes, offsets), strict=True):
            blocks[word::_BLOCK_WORDS] = array("Q", column)
        self._blocks = blocks
        start, words = blocks.buffer_info()
        self._pointers = array("Q", range(start, start + words * _WORD_BYTES, _BLOCK_WORDS * _WORD_BYTES))

    def aim(self, descriptor: int) -> None:
        """Name the file of all of them."""
        word = descriptor << 32 | (_WRITE if self.writing else _READ)
        self._blocks[_AIM_WORD::_BLOCK_WORDS] = array("Q", (word,)) * len(self._pointers)

    def pointers(self, first: int) -> int:
        """Where the pointers to the control blocks lie, from the ``first`` on; they live as long as this."""
        return self._pointers.buffer_info()[0] + first * _WORD_BYTES

    def tags(self, first: int, count: int) -> list[int]:
        """Of ``count`` requests from the ``first`` on."""
        return self._blocks[first * _BLOCK_WORDS : (first + count) * _BLOCK_WORDS : _BLOCK_WORDS].tolist()


class KernelQueue:
    """At most ``depth`` requests under way.

    Raises OSError where the system has no such queue (ENOSYS), forbids it (EPERM), or has given them all away
    (EAGAIN: fs.aio-max-nr). Not thread-safe, except that one thread may ``reap`` while another submits.
    """

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != _WORD_BYTES:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._numbers = numbers
        self._depth = depth
        self._events = bytearray(depth * _EVENT.size)
        self._pinned = (ctypes.c_char * len(self._events)).from_buffer(self._events)  # so that they cannot move
        self._events_at = ctypes.addressof(self._pinned)
        context = ctypes.c_ulong(0)
        self._call(_SETUP, depth, ctypes.addressof(context))
        self._context = context.value

    def submit(self, requests: Requests, first: int, count: int) -> int:
        """Send ``count`` requests from the ``first`` on → how many were taken; OSError if the first one was not."""
        return self._call(_SUBMIT, self._context, count, requests.pointers(first))

    def reap(self, minimum: int, maximum: int) -> list[tuple[int, int]]:
        """Wait until ``minimum`` requests have ended → (tag, bytes moved or minus the error number) of at most
        ``maximum``. At least so many must be under way. A signal may end the wait early, with fewer or nothing."""
        most = min(maximum, self._depth)
        try:
            count = self._call(_GETEVENTS, self._context, min(minimum, most), most, self._events_at)
        except InterruptedError:
            return []
        return list(_EVENT.iter_unpack(memoryview(self._events)[: count * _EVENT.size]))

    def close(self) -> None:
        """Wait for what is under way and give the queue back."""
        if self._context:
            self._call(_DESTROY, self._context)
            self._context = 0

    def _call(self, which: int, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> int:
        result: int = _syscall(self._numbers[which], first, second, third, fourth, 0)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
