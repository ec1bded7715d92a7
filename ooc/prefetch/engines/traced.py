# SPDX-License-Identifier: Apache-2.0
"""An engine whose requests somebody may be told of, as they are sent off."""

from collections.abc import Callable, Sequence

from ooc.prefetch.arena import Bytes
from ooc.prefetch.engine import Counters, Engine, Span, Ticket

Watch = Callable[[Sequence[Span], bool, Ticket], None]
"""Is told what is read, or written (``True``), on the thread that asked for it."""


class TracedEngine(Engine):
    """``inner``, and for as long as there is one, ``watch`` is told of every request."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.name = inner.name
        self.watch: Watch | None = None

    @property
    def counters(self) -> Counters:  # type: ignore[override]  # of the inner one, whatever that makes of it
        return self._inner.counters

    def read(self, spans: Sequence[Span], into: Bytes, *, bulk: bool = False) -> Ticket:
        ticket = self._inner.read(spans, into, bulk=bulk)
        if self.watch is not None:
            self.watch(spans, False, ticket)
        return ticket

    def write(self, spans: Sequence[Span], source: Bytes) -> Ticket:
        ticket = self._inner.write(spans, source)
        if self.watch is not None:
            self.watch(spans, True, ticket)
        return ticket

    def close(self) -> None:
        self._inner.close()
