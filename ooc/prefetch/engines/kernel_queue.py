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

_READ, _WRITE = 0, 1
_SETUP, _DESTROY, _GETEVENTS, _SUBMIT = range(4)
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
_WORD_BYTES = 8
_BLOCK = struct.Struct("<Q8xQQQQ16x")
"""A control block: tag, (key, flags), operation and file (u16 operation, i16 priority, u32 descriptor), address, bytes,
offset, (two unused)."""
_EVENT = struct.Struct("<Q8xq8x")  # tag, (control block), result, (second result)

_KEPT = 4
"""Queues that nobody uses are kept for the next one who wants one as deep: giving one back took the kernel 31 ms (it
waits for a grace period), longer than all else that closing a small trainer takes."""
_idle: dict[int, list[int]] = {}  # by depth
os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 6


class Requests:
    """Requests of one file and direction, sent in their order, in any portions: of each ``wanted``, its address, bytes
    and offset.

    Their results come back with tags: ``first_tag`` for the first, one more for each that follows, all below 2⁶⁴.
    """

    __slots__ = ("descriptor", "first_tag", "wanted", "writing")

    def __init__(self, first_tag: int, *, writing: bool) -> None:
        self.descriptor = -1
        self.first_tag = first_tag
        self.writing = writing
        self.wanted: list[tuple[int, int, int]] = []


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
        self._process = os.getpid()
        self._events, self._events_at = _fixed(depth * _EVENT.size)
        self._blocks, blocks_at = _fixed(depth * _BLOCK.size)
        self._places = range(0, depth * _BLOCK.size, _BLOCK.size)
        self._pointers = array("Q", [blocks_at + place for place in self._places])
        self._pointers_at = self._pointers.buffer_info()[0]
        kept = _idle.get(depth)
        if kept:
            self._context = kept.pop()
        else:
            context = ctypes.c_ulong(0)
            self._call(_SETUP, depth, ctypes.addressof(context))
            self._context = context.value

    def submit(self, requests: Requests, first: int, count: int) -> int:
        """Send ``count`` requests from the ``first`` on → how many were taken; OSError if the first one was not.

        The kernel copies what describes them, so that all are described in the same place.
        """
        pack, blocks = _BLOCK.pack_into, self._blocks
        aim = requests.descriptor << 32 | (_WRITE if requests.writing else _READ)
        tag = requests.first_tag + first
        wanted = requests.wanted[first : first + count]
        for place, (address, nbytes, offset) in zip(self._places, wanted, strict=False):
            pack(blocks, place, tag, aim, address, nbytes, offset)
            tag += 1
        return self._call(_SUBMIT, self._context, count, self._pointers_at)

    def reap(self, minimum: int, maximum: int) -> list[tuple[int, int]]:
        """Wait until ``minimum`` requests have ended → (tag, bytes moved or minus the error number) of at most
        ``maximum``. At least so many must be under way. A signal may end the wait early, with fewer or nothing."""
        most = min(maximum, self._depth)
        try:
            count = self._call(_GETEVENTS, self._context, min(minimum, most), most, self._events_at)
        except InterruptedError:
            return []
        return list(_EVENT.iter_unpack(memoryview(self._events)[: count * _EVENT.size]))

    def close(self, *, is_idle: bool) -> None:
        """Wait for what is under way and give the queue back; where ``is_idle``, nothing is, and no result unread."""
        context, self._context = self._context, 0
        if not context or os.getpid() != self._process:  # a queue is of one process alone
            return
        kept = _idle.setdefault(self._depth, [])
        if is_idle and len(kept) < _KEPT:
            kept.append(context)
        else:
            self._call(_DESTROY, context)

    def _call(self, which: int, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> int:
        result: int = _syscall(self._numbers[which], first, second, third, fourth, 0)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _fixed(nbytes: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Memory that stays where it is, and its address."""
    memory = ctypes.create_string_buffer(nbytes)
    return memory, ctypes.addressof(memory)
