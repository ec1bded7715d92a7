# SPDX-License-Identifier: Apache-2.0
"""What KvikIO documents of CuFile, IOFuture and defaults, over plain system calls: RuntimeErrors, whatever is wrong."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, Self

FLAGS = {"r": os.O_RDONLY, "r+": os.O_RDWR}


class IOFuture:
    def __init__(self, future: "Future[int]") -> None:
        self._future = future

    def get(self) -> int:
        try:
            return self._future.result()
        except OSError as error:
            raise RuntimeError(f"POSIX error on pread at: posix_io.hpp:\n{error.strerror}") from error

    def done(self) -> bool:
        return self._future.done()


class CuFile:
    opened = 0
    pool: ThreadPoolExecutor
    lock = threading.Lock()

    def __init__(self, file: str, flags: str = "r") -> None:
        try:
            self._descriptor = os.open(file, FLAGS[flags] | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"Unable to open file: {error.strerror}") from error
        with CuFile.lock:
            CuFile.opened += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None) -> IOFuture:
        view = memoryview(buf)[:size]
        return IOFuture(self.pool.submit(os.preadv, self._descriptor, [view], file_offset))

    def pwrite(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None) -> IOFuture:
        view = memoryview(buf)[:size]
        return IOFuture(self.pool.submit(os.pwritev, self._descriptor, [view], file_offset))


def fake_kvikio(pool: ThreadPoolExecutor) -> ModuleType:
    """The stand-in, to be put into ``sys.modules``; ``settings`` has what was given to ``defaults.set``."""
    module: Any = ModuleType("kvikio")
    module.settings = {}
    CuFile.pool = pool
    module.CuFile = CuFile
    module.defaults = SimpleNamespace(set=module.settings.update)
    return module  # type: ignore[no-any-return]
