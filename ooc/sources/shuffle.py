# SPDX-License-Identifier: Apache-2.0
"""A random order of 0 … n-1 that is computed, not stored: the same for one seed, in no memory."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ooc.sources.source import Ids

_ROUNDS = 3

_Numbers = npt.NDArray[np.uint64]


class Shuffle:
    """A bijection of ``range(n)``: mixing rounds over the next power of two, repeated until below n.

    Each round multiplies by an odd number and folds the upper half onto the lower: both can be undone.
    """

    def __init__(self, n: int, seed: int, *, stream: int = 0) -> None:
        self._n = n
        bits = max(2, (n - 1).bit_length())
        self._mask = np.uint64((1 << bits) - 1)
        self._half = np.uint64((bits + 1) // 2)
        drawn = np.random.SeedSequence([seed, stream, 0x0C]).generate_state(_ROUNDS, np.uint64)
        odd = [(int(value) & int(self._mask)) | 1 for value in drawn]
        self._factors = [np.uint64(value) for value in odd]
        self._inverses = [np.uint64(pow(value, -1, 1 << bits)) for value in odd]
        self._added = np.uint64(int(drawn[0]) >> 17 & int(self._mask))

    def at(self, places: Ids) -> Ids:
        """What lies at ``places`` of the order."""
        return self._walk(places, self._forward)

    def place_of(self, values: Ids) -> Ids:
        """Where ``values`` lie in the order: the inverse of :meth:`at`."""
        return self._walk(values, self._backward)

    def _forward(self, x: _Numbers) -> _Numbers:
        x = (x + self._added) & self._mask
        for factor in self._factors:
            x *= factor
            x &= self._mask
            x ^= x >> self._half
        return x

    def _backward(self, x: _Numbers) -> _Numbers:
        x = x.copy()
        for inverse in reversed(self._inverses):
            x ^= x >> self._half
            x *= inverse
            x &= self._mask
        x -= self._added
        x &= self._mask
        return x

    def _walk(self, values: Ids, step: Callable[[_Numbers], _Numbers]) -> Ids:
        out = step(values.astype(np.uint64))
        limit = np.uint64(self._n)
        while len(outside := np.flatnonzero(out >= limit)):
            out[outside] = step(out[outside])
        return out.view(np.int64)
