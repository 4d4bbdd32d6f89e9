"""Seeds of the counter-keyed random numbers (``ops.gumbel``)."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix_seed(seed: int) -> int:
    """Mixes a seed of up to 64 bits, so that neighbouring seeds share no sequence.

    This is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    z = (seed + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
