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
from collections.abc import Sequence

_READ, _WRITE = 0, 1
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
_CONTROL_BLOCK = struct.Struct("<QIIHhIQQqQII")  # data, key, flags, opcode, priority, fd, buf, nbytes, offset, …
_EVENT = struct.Struct("<QQqq")  # data, control block, result, second result
_POINTER_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long] * 6


class KernelQueue:
    """At most ``depth`` requests under way, each in a slot numbered from 0.

    Raises OSError where the system has no such queue (ENOSYS), forbids it (EPERM), or has given them all away
    (EAGAIN: fs.aio-max-nr). Not thread-safe, except that one thread may ``reap`` while another submits.
    """

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != _POINTER_BYTES:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._numbers = numbers
        self._blocks = bytearray(depth * _CONTROL_BLOCK.size)
        self._pointers = (ctypes.c_uint64 * depth)()
        self._events = bytearray(depth * _EVENT.size)
        self._depth = depth
        # Kept: while these live, the bytearrays can neither move nor shrink under the kernel.
        self._pinned = [(ctypes.c_char * len(m)).from_buffer(m) for m in (self._blocks, self._events)]
        self._blocks_at, self._events_at = (ctypes.addressof(pinned) for pinned in self._pinned)
        self._pointers_at = ctypes.addressof(self._pointers)
        context = ctypes.c_ulong(0)
        self._call(_SETUP, depth, ctypes.addressof(context))
        self._context = context.value

    def prepare(self, slot: int, descriptor: int, address: int, nbytes: int, offset: int, *, writing: bool) -> None:
        """Describe the request of a free slot; ``submit`` sends it."""
        _CONTROL_BLOCK.pack_into(
            self._blocks,
            slot * _CONTROL_BLOCK.size,
            slot,
            0,
            0,
            _WRITE if writing else _READ,
            0,
            descriptor,
            address,
            nbytes,
            offset,
            0,
            0,
            0,
        )

    def submit(self, slots: Sequence[int]) -> int:
        """Send prepared slots → how many were taken, from the first; OSError if the first one was not."""
        for index, slot in enumerate(slots):
            self._pointers[index] = self._blocks_at + slot * _CONTROL_BLOCK.size
        return self._call(_SUBMIT, self._context, len(slots), self._pointers_at)

    def reap(self, maximum: int) -> list[tuple[int, int]]:
        """Wait until a request has ended → (slot, bytes moved or minus the error number) of at most ``maximum``.

        A signal may end the wait early, with nothing.
        """
        try:
            count = self._call(_GETEVENTS, self._context, 1, min(maximum, self._depth), self._events_at, 0)
        except InterruptedError:
            return []
        ended = memoryview(self._events)[: count * _EVENT.size]
        return [(slot, result) for slot, _, result, _ in _EVENT.iter_unpack(ended)]

    def close(self) -> None:
        """Wait for what is under way and give the queue back."""
        if self._context:
            self._call(_DESTROY, self._context)
            self._context = 0

    def _call(self, which: int, *arguments: int) -> int:
        padded = (*arguments, *(0 for _ in range(5 - len(arguments))))
        result: int = _libc.syscall(self._numbers[which], *padded)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
