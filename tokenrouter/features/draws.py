"""Random draws that a replay repeats: hashed from a seed and the token's prefix.

Shape letters: T tokens in a step.
"""

from torch import Tensor

DRAW_LEVELS = 1 << 24
"""A draw is one of so many equally likely integers, each exact in float32."""

_MASK = (1 << 64) - 1
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


def seed_key(seed: int) -> int:
    """A signed 64-bit integer in which any two seeds differ in about half the bits (splitmix64)."""
    x = ((seed + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
