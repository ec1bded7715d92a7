# SPDX-License-Identifier: Apache-2.0
"""Pseudorandom words, each from its number alone: SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), in which any word can be computed without those before it."""

from typing import Any

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The difference between the states of two consecutive words."""


def mixed(states: Any) -> npt.NDArray[np.uint64]:
    """Return the word of each state, uint64 [n]; modulo 2⁶⁴ throughout."""
    x: npt.NDArray[np.uint64] = np.asarray(states, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
