"""Random draws that a replay repeats: hashed from a seed and the token's prefix, or its number in a stream.

Shape letters: T tokens in a step, N numbers.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

UInt64Array = NDArray[np.uint64]

DRAW_LEVELS = 1 << 24
"""A draw is one of so many equally likely integers, each exact in float32."""

_MASK = (1 << 64) - 1
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MULTIPLIER = 0xD6E8FEB86659FD93 - (1 << 64)  # of Pelle Evensen's rrmxmx, as a signed integer


def draw_levels(prefix_hash_T: Tensor, seed: int) -> Tensor:
    """One draw per token, int64 [T] in 0 .. DRAW_LEVELS - 1, a function of its prefix and the seed.

    Args:
        prefix_hash_T: int64, already well mixed, so that one round is enough here.
        seed: any integer; other seeds draw independently.
    """
    x_T = prefix_hash_T ^ seed_key(seed)
    x_T = (x_T ^ ((x_T >> 32) & 0xFFFFFFFF)) * _MULTIPLIER
    return (x_T >> 40) & (DRAW_LEVELS - 1)


@lru_cache
def seed_key(seed: int) -> int:
    """A signed 64-bit integer in which any two seeds differ in about half the bits (splitmix64)."""
    start = np.array([((seed + 1) * _GAMMA) & _MASK], np.uint64)
    return int(splitmix64(start).view(np.int64)[0])


def splitmix64(x_N: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64 (Steele et al. 2014): every input bit reaches every output bit."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(_MIX_1)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(_MIX_2)
    return x_N ^ (x_N >> np.uint64(31))


def uniform_draws(key_N: UInt64Array, number_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Float64 [N] in [0, 1): draw ``number_N``, from 0, of the splitmix64 stream that starts at each key."""
    at_N = key_N + (number_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    return (splitmix64(at_N) >> np.uint64(11)).astype(np.float64) * 2.0**-53
