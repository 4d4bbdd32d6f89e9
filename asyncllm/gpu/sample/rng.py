"""Random numbers keyed by (seed, position), without any state that batches could share."""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix_seed(seed: int) -> np.uint64:
    """A seed of up to 64 bits, mixed so that neighbouring seeds share no sequence."""
    return _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))[0]


def counter_uniform(states: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number per row in [0, 1), float64 with 53 random bits.

    It is output number ``position`` of SplitMix64 (Steele, Lea and Flood, 2014) started at
    ``state``, computed without the outputs before it.

    Args:
        states: ``[R]`` uint64 from ``mix_seed``.
        positions: ``[R]``, position of the token in its sequence.
    """
    steps = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(states + steps) >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
